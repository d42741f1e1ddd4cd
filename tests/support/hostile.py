"""Classes of static values that do all they can to mislead a cache, and where they are put.

Each value has a number, which nothing that its class overrides gets in the way of reading.
"""

import collections
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


class Numbered:
    """What all static values here are."""

    __slots__ = ("__dict__", "__weakref__", "number")

    def __init__(self, number):
        Numbered.number.__set__(self, number)


def number_of(value):
    """The number of a value: of a numbered one, or of one that is its own number."""
    if issubclass(type(value), Numbered):
        return Numbered.number.__get__(value)
    return int(value)


def _kind(name, **members):
    return type(name, (Numbered,), {"__module__": __name__, **members})


def _raising(kind=RuntimeError):
    def fail(*_):
        raise kind("hostile")

    return fail


def _one(self):
    return 1


def _in_turn(one, other):
    """Does the one and the other in turn."""
    turns = itertools.count()
    return lambda *args: (other if next(turns) % 2 else one)(*args)


def _same_number(self, other):
    return type(other) is type(self) and number_of(self) == number_of(other)


def _equals_its_number(self, other):
    return number_of(self) == (number_of(other) if isinstance(other, Numbered) else other)


_array = jnp.array([True, False])
_count = itertools.count()

EqRaises = _kind("EqRaises", __eq__=_raising(), __hash__=object.__hash__)
EqIsAlwaysTrue = _kind("EqIsAlwaysTrue", __eq__=lambda *_: True, __hash__=_one)

_FRAGILE = [
    _kind("EqAlternates", __eq__=_in_turn(_same_number, _raising()), __hash__=_one),
    _kind("HashAndEqRaise", __eq__=_raising(), __hash__=_raising()),
    _kind("GetattributeRaises", __getattribute__=_raising(AttributeError)),
    _kind("ClassRaises", __class__=property(_raising())),
]

_OTHERS = [
    _kind("EqRaisesAndHashCollides", __eq__=_raising(), __hash__=_one),
    _kind("EqReturnsArray", __eq__=lambda *_: _array, __hash__=_one),
    # Not even of itself, like NaN.
    _kind("EqIsNeverTrue", __eq__=lambda *_: False, __hash__=_one),
    _kind("EqRecurs", __eq__=lambda self, other: self == other, __hash__=_one),
    # Equal to the plain number, with its hash.
    _kind("EqOfAnotherType", __eq__=_equals_its_number, __hash__=lambda s: hash(number_of(s))),
    _kind("HashRaises", __hash__=_raising()),
    _kind("HashChanges", __eq__=_same_number, __hash__=lambda self: next(_count)),
    _kind("GetattrAnswersAnything", __getattr__=lambda self, name: lambda *_, **__: self),
    _kind("ClassIsAnArray", __class__=jax.Array),
    _kind("ClassIsAModule", __class__=eqx.Module),
    _kind("ClassIsATuple", __class__=tuple),
    _kind("DictRaises", __dict__=property(_raising())),
    _kind("ReprRaises", __repr__=_raising()),
    _kind("IterIsEndless", __iter__=itertools.repeat, __len__=lambda self: 2**40),
    # Not an array to Equinox, though NumPy would make one of it.
    _kind(
        "ArrayProtocol",
        __array__=lambda self, dtype=None, copy=None: np.ones(3, dtype),
        __jax_array__=lambda self: jnp.ones(3),
    ),
]


class FloatThatLies(float):
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 1


class TupleOfItsOwn(tuple):
    """A leaf to JAX, whose elements aren't those that it shows."""

    def __new__(cls, number):
        return super().__new__(cls, (number,))

    def __iter__(self):
        return iter(("hostile",))

    def __len__(self):
        return 7

    def __int__(self):
        return tuple.__getitem__(self, 0)


class Meta(type):
    """A metaclass whose classes answer nothing rightly."""

    __eq__ = __bool__ = _raising()

    def __hash__(cls):
        return 1

    def __instancecheck__(cls, instance):
        return True

    @property
    def __name__(cls):
        raise RuntimeError("hostile")


class WithHostileMetaclass(Numbered, metaclass=Meta):
    pass


#: Of these only the error can be asked that upstream may manage without.
FRAGILE = {*_FRAGILE, WithHostileMetaclass}
VALUES = [EqRaises, EqIsAlwaysTrue, *_FRAGILE, WithHostileMetaclass, *_OTHERS]
VALUES += [FloatThatLies, TupleOfItsOwn]

#: Those whose `==` calls different ones equal: which number counts is then anyone's guess.
LIARS = {EqIsAlwaysTrue, FloatThatLies}


# --- Where a value is put -------------------------------------------------------------------------


class Holder(eqx.Module):
    value: object
    x: jax.Array


class StaticHolder(eqx.Module):
    x: jax.Array
    value: object = eqx.field(static=True)


class Registered:
    """A node whose metadata the value is."""

    def __init__(self, x, value):
        self.x = x
        self.value = value


jax.tree_util.register_pytree_node(
    Registered, lambda node: ((node.x,), node.value), lambda value, xs: Registered(xs[0], value)
)

Pair = collections.namedtuple("Pair", ["x", "value"])

X = jnp.arange(1.0, 4.0)

#: How a value is put into an argument, and how it is found there again.
PLACES = {
    "itself": (lambda v: v, lambda tree: tree),
    "tuple in dict": (lambda v: {"k": (v, X)}, lambda tree: tree["k"][0]),
    "named tuple": (lambda v: Pair(X, v), lambda tree: tree.value),
    "field": (lambda v: Holder(v, X), lambda tree: tree.value),
    "static field": (lambda v: StaticHolder(X, v), lambda tree: tree.value),
    "list in a static field": (lambda v: StaticHolder(X, [v]), lambda tree: tree.value[0]),
    "metadata": (lambda v: Registered(X, v), lambda tree: tree.value),
}
