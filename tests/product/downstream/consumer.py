"""A package that uses eqxjit, for type checkers: each wanted error is marked."""

from typing import assert_type

import equinox as eqx
import jax

import eqxjit
from eqxjit import filter_jit


@filter_jit
def decorated(model: eqx.nn.Linear, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    """Decorated without options."""
    return model(x) * scale


@filter_jit(donate="all", max_traces=3)
def with_options(x: jax.Array, name: str) -> tuple[jax.Array, str]:
    """Decorated with options."""
    return x, name


def named(n: int) -> str:
    """Wrapped later."""
    return str(n)


class Model(eqx.Module):
    """With a decorated method."""

    weight: jax.Array

    @filter_jit
    def step(self, x: jax.Array, times: int) -> jax.Array:
        """A step."""
        return self.weight * x * times


def use(model: eqx.nn.Linear, x: jax.Array) -> None:
    """What a user writes, right and wrong."""
    assert_type(decorated(model, x, scale=2.0), jax.Array)
    assert_type(with_options(x, "a"), tuple[jax.Array, str])
    assert_type(Model(x).step(x, 3), jax.Array)
    assert_type(filter_jit(named)(3), str)

    decorated(model)  # type: ignore[call-arg]
    decorated(model, x, scale="large")  # type: ignore[arg-type]
    with_options(x, 3)  # type: ignore[arg-type]
    Model(x).step(x, "three")  # type: ignore[arg-type]
    filter_jit(decorated, donate="everything")  # type: ignore[call-overload]

    frozen = eqxjit.freeze(model)
    assert_type(frozen, eqxjit.FrozenFunction)
    assert_type(frozen.compile(x).seconds, float)
    assert_type(frozen.cache_info().traces, int)
    with eqxjit.compile_report() as report:
        assert_type(report, eqxjit.CompileReport)
