"""Small models and nodes that several tests call."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.random as jr


class Scaled(eqx.Module):
    weight: jax.Array
    scale: float = eqx.field(static=True, default=2.0)

    def __call__(self, x):
        return self.weight * x * self.scale


class Pair(NamedTuple):
    first: Any
    second: Any


class Point(NamedTuple):
    x: Any
    y: Any = 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


@dataclasses.dataclass(unsafe_hash=True)
class Thawed:
    value: Any


def mlp():
    return eqx.nn.MLP(4, 3, 8, 2, key=jr.key(0))


def arrays(tree: Any) -> list[Any]:
    """Return the leaves of a tree that are arrays, of JAX or of NumPy."""
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))
