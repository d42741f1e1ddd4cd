"""The classes of random arguments: all kinds of nodes and of static values."""

import collections
import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import optax

# --- Modules ----------------------------------------------------------------------------------


class Layer(eqx.Module):
    weight: Any
    bias: Any = None
    size: Any = eqx.field(static=True, default=1)

    def __call__(self, *args, **kwargs):
        return self.weight, args, kwargs

    def method(self, x):
        return self.weight, x


class Derived(Layer):
    """Inherits fields, and puts a static one before a dynamic one."""

    mode: Any = eqx.field(static=True, default="train")
    scale: Any = 1.0


class Converted(eqx.Module):
    """A Module with converted fields and an `__init__` of its own."""

    pair: Any = eqx.field(converter=lambda value: (value, None))
    level: Any = eqx.field(static=True, converter=lambda value: [value])

    def __init__(self, pair, level):
        self.level = level
        self.pair = pair


class Empty(eqx.Module):
    pass


class Wrapper(eqx.Module):
    """A Module to which `eqx.module_update_wrapper` copies `__name__`, `__doc__` and so on."""

    function: Callable[..., Any]
    weight: Any

    @property
    def __wrapped__(self):
        return self.function

    def __call__(self, *args):
        return self.function(*args)


def wrapper(function, weight):
    return eqx.module_update_wrapper(Wrapper(function, weight))


class Calling(eqx.Module):
    """A model that calls a function with its own arrays first."""

    function: Callable[..., Any] = eqx.field(static=True)
    weight: Any

    def __call__(self, *args, **kwargs):
        return self.function(self.weight, *args, **kwargs)

    forward = __call__


# --- Other registered nodes -------------------------------------------------------------------


class CheckedPair(collections.namedtuple("CheckedPair", ["first", "second"])):
    """A named tuple whose constructor does more than that of its base."""

    def __new__(cls, first, second=None):
        return super().__new__(cls, first, second)


Nothing = collections.namedtuple("Nothing", [])


@flax.struct.dataclass
class FlaxState:
    params: Any
    step: Any = flax.struct.field(pytree_node=False, default=0)


@jax.tree_util.register_pytree_node_class
class Bag:
    """A node that hands out its children by a generator, and its metadata in a tuple."""

    def __init__(self, label, *items):
        self.label = label
        self.items = list(items)

    def tree_flatten(self):
        return (item for item in self.items), (self.label,)

    @classmethod
    def tree_unflatten(cls, data, children):
        return cls(data[0], *children)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["meta"])
@dataclasses.dataclass
class Record:
    data: Any
    meta: Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticNode:
    """A node without children: all of it is metadata."""

    value: Any


def batch_norm():
    """Return a model with BatchNorm, and its state."""
    return eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="batch")


def adam_state():
    return optax.adam(1e-3).init({"w": jnp.zeros(2), "b": None})


# --- Static values ----------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    """Its members equal integers."""

    LOW = 0
    HIGH = 1


class Unit(enum.StrEnum):
    """Its members equal strings."""

    METRE = "m"


@dataclasses.dataclass(frozen=True)
class Config:
    """A frozen dataclass; its note takes no part in `==`."""

    value: Any
    note: Any = dataclasses.field(default=None, compare=False, repr=False)


@dataclasses.dataclass
class Settings:
    """A dataclass that can be changed in place, hence not hashed: for static fields only."""

    value: Any


class Release:
    """Releases are equal if their major versions are: the user's own `==` decides."""

    def __init__(self, major, minor):
        self.major = major
        self.minor = minor

    def __eq__(self, other):
        return isinstance(other, Release) and self.major == other.major

    def __hash__(self):
        return hash(self.major)

    def __repr__(self):
        return f"Release({self.major})"


class Plain:
    """Compares by identity."""


def plus_one(x):
    return x + 1


PLAIN = Plain(), Plain()
LAMBDA = lambda x: x  # noqa: E731
PARTIAL = functools.partial(plus_one, 1)
