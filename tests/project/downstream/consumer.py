"""A package that uses eqxjit, for type checkers: each wanted error is marked."""

import abc
import functools
from collections.abc import Callable
from typing import Any, Protocol, assert_type

import equinox as eqx
import jax

import eqxjit
from eqxjit import filter_jit
from eqxjit.types import BoundJitFunction, JitFunction


@filter_jit
def decorated(model: eqx.nn.Linear, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return model(x) * scale


@filter_jit(donate="all", max_traces=3)
def with_options(x: jax.Array, name: str) -> tuple[jax.Array, str]:
    return x, name


def named(n: int) -> str:
    return str(n)


class Base(eqx.Module):
    @abc.abstractmethod
    def step(self, x: jax.Array, times: int) -> jax.Array: ...

    @abc.abstractmethod
    def __call__(self, x: jax.Array, times: int = 1) -> jax.Array: ...


class Steps(Protocol):
    def step(self, x: jax.Array, times: int) -> jax.Array: ...


class Model(Base):
    weight: jax.Array

    @filter_jit
    def step(self, x: jax.Array, times: int) -> jax.Array:
        return self.weight * x * times

    @filter_jit(donate="all-except-first")
    def donating(self, x: jax.Array) -> jax.Array:
        return self.weight * x

    @staticmethod
    @filter_jit
    def static(x: jax.Array, times: int) -> jax.Array:
        return x * times

    @classmethod
    @filter_jit
    def made(cls, x: jax.Array) -> "Model":
        return cls(x)

    @property
    @filter_jit
    def size(self) -> float:
        return 1.0

    @filter_jit
    def __call__(self, x: jax.Array, times: int = 1) -> jax.Array:
        return self.static(x, times) + self.step(x, times=times)


class Derived(Model):
    """Inherits all methods."""


class Plain(abc.ABC):
    @filter_jit
    @abc.abstractmethod
    def step(self, x: jax.Array) -> jax.Array: ...


def use_functions(model: eqx.nn.Linear, x: jax.Array) -> None:
    assert_type(decorated(model, x, scale=2.0), jax.Array)
    assert_type(with_options(x, "a"), tuple[jax.Array, str])
    assert_type(filter_jit(named)(3), str)
    filter_jit(functools.partial(named, 1))()
    called: Callable[[int], str] = filter_jit(named)
    called(3)
    filter_jit(named, inline=True, compiler_options={"xla_embed_ir_in_executable": True})(3)
    filter_jit(eqx.filter_vmap(decorated))

    decorated(model)  # type: ignore[call-arg]
    decorated(model, x, scale="large")  # type: ignore[arg-type]
    with_options(x, 3)  # type: ignore[arg-type]
    filter_jit(decorated, donate="everything")  # type: ignore[call-overload]
    filter_jit(decorated, donates="all")  # type: ignore[call-overload]
    filter_jit(decorated, inline="yes")  # type: ignore[call-overload]
    decorated.cache_info()  # type: ignore[attr-defined]


def use_what_a_wrapper_has(model: eqx.nn.Linear, x: jax.Array) -> None:
    assert isinstance(decorated, JitFunction)
    assert_type(decorated.traces(), list[eqxjit.types.Trace])
    assert_type(decorated.traces()[0].reason, str)
    assert_type(decorated.cache_info().traces, int)
    assert_type(decorated.lower(model, x), eqxjit.types.Lowered)
    assert_type(decorated.compile(model, x).seconds, float)
    decorated.clear_cache()

    decorated.cash_info()  # type: ignore[attr-defined]
    print(decorated.traces()[0].resaon)  # type: ignore[attr-defined]


def takes(step: Callable[[jax.Array, int], jax.Array], steps: Steps) -> None:
    """Takes a callable, such as a method or an instance."""


def use_methods(x: jax.Array, plain: Plain) -> None:
    model = Model(x)
    assert_type(model.step(x, 3), jax.Array)
    assert_type(Model.step(model, x, 3), jax.Array)
    assert_type(Derived(x).step(x, times=3), jax.Array)
    assert_type(model.donating(x), jax.Array)
    assert_type(Model.static(x, 3), jax.Array)
    assert_type(Model.made(x), Model)
    assert_type(model.made(x), Model)
    assert_type(model.size, float)
    assert_type(model(x, times=2), jax.Array)
    assert_type(filter_jit(model)(x, 2), jax.Array)
    assert_type(plain.step(x), jax.Array)
    takes(model.step, model)
    takes(model, model)
    step = model.step
    assert isinstance(step, BoundJitFunction)
    assert_type(step.traces(), list[eqxjit.types.Trace])
    assert_type(step.cache_info().traces, int)
    assert_type(step.lower(x, 3), eqxjit.types.Lowered)
    assert_type(step.compile(x, 3), eqxjit.types.CompileCost)
    step.clear_cache()

    model.step(x, "three")  # type: ignore[arg-type]
    model.step(x)  # type: ignore[call-arg]
    model.donating(x, x)  # type: ignore[call-arg]
    Model.static(x, "three")  # type: ignore[arg-type]
    Model.made()  # type: ignore[call-arg]
    model(x, times="two")  # type: ignore[arg-type]
    filter_jit(model)(x, "two")  # type: ignore[arg-type]
    takes(Model.static, 3)  # type: ignore[arg-type]
    step.cash_info()  # type: ignore[attr-defined]


def use_the_rest(model: eqx.nn.Linear, x: jax.Array) -> None:
    frozen = eqxjit.freeze(named)
    annotated: eqxjit.types.FrozenFunction[[int], str] = frozen
    assert_type(annotated(3), str)
    assert_type(frozen(3), str)
    assert_type(frozen.compile(x).seconds, float)
    assert_type(frozen.cache_info().traces, int)
    assert_type(eqxjit.freeze(named, 3)(), str)
    assert_type(eqxjit.freeze(Model(x))(x, 2), jax.Array)
    assert_type(eqxjit.load("file"), eqxjit.types.FrozenFunction[..., Any])
    with eqxjit.compile_report() as report:
        assert_type(report, eqxjit.types.CompileReport)
    assert_type(eqxjit.explain_retraces()(named)(3), str)
    with eqxjit.explain_retraces(False):
        named(3)

    eqxjit.explain_retraces()(named)("three")  # type: ignore[arg-type]
    eqxjit.explain_retraces("yes")  # type: ignore[arg-type]

    frozen("three")  # type: ignore[arg-type]
    eqxjit.freeze(Model(x))(x, "two")  # type: ignore[arg-type]
    print(eqxjit.CompileReport)  # type: ignore[attr-defined]
