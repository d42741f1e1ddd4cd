"""Callables of all kinds, each of which can be jitted and takes one array."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit

X = jnp.arange(1.0, 4.0)


def documented(
    x: jax.Array, /, scale: float = 2.0, *args: int, key: str = "k", **more
) -> jax.Array:
    """Scales."""
    return x * scale


def scaled(weight, x):
    return x * weight


class Model(eqx.Module):
    """A model."""

    weight: jax.Array
    name: str = eqx.field(static=True, default="net")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the model."""
        return self.weight * x

    def step(self, x, rate=0.1):
        """One step."""
        return self.weight * x * rate

    @eqxjit.filter_jit
    def jitted(self, x):
        return self.weight * x


class Plain:
    """A callable object."""

    def __call__(self, x):
        return x * 2


CALLABLES = {
    "function": documented,
    "lambda": lambda x: x * 2,
    "functools.wraps": functools.wraps(documented)(lambda *args: documented(*args)),
    "functools.partial": functools.partial(functools.partial(scaled, X)),
    "jax Partial": jax.tree_util.Partial(scaled, X),
    "eqx.Partial": eqx.Partial(scaled, np.ones(3, np.float32)),
    "Module": Model(X),
    "method": Model(X).step,
    "jitted method": Model(X).jitted,
    "plain object": Plain(),
    "class": Model,
    "filter_grad": eqx.filter_grad(lambda x: (x**2).sum()),
    "filter_vmap": eqx.filter_vmap(Model(jnp.ones(()))),
    "jax.jit": jax.jit(documented),
    "jax ufunc": jnp.negative,
    "builtin": abs,
    "wrapper": eqxjit.filter_jit(documented),
    "eqx.nn.MLP": eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0)),
}

every_callable = pytest.mark.parametrize("fun", CALLABLES.values(), ids=CALLABLES)
