"""Classes that do all they can to mislead a cache: static values, Modules, nodes and functions.

Each static value has a number, which nothing that its class overrides gets in the way of reading.
"""

import collections
import enum
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


def _raise(kind=RuntimeError):
    raise kind("hostile")


def _kind(name, base=Numbered, **members):
    return type(name, (base,), {"__module__": __name__, **members})


def _raising(kind=RuntimeError):
    return lambda *_: _raise(kind)


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
#: Raises every other time.
EqAlternates = _kind("EqAlternates", __eq__=_in_turn(_same_number, _raising()), __hash__=_one)
EqIsAlwaysTrue = _kind("EqIsAlwaysTrue", __eq__=lambda *_: True, __hash__=_one)
HashAndEqRaise = _kind("HashAndEqRaise", __eq__=_raising(), __hash__=_raising())
GetattributeRaisesAttributeError = _kind(
    "GetattributeRaisesAttributeError", __getattribute__=_raising(AttributeError)
)
ClassRaises = _kind("ClassRaises", __class__=property(_raising()))

_OTHERS = [
    _kind("EqRaisesAndHashCollides", __eq__=_raising(), __hash__=_one),
    _kind("EqReturnsArray", __eq__=lambda *_: _array, __hash__=_one),
    # Not even of itself, like NaN.
    _kind("EqIsNeverTrue", __eq__=lambda *_: False, __hash__=_one),
    _kind("EqRecurs", __eq__=lambda self, other: self == other, __hash__=_one),
    # Equal to the plain number, with its hash.
    _kind(
        "EqOfAnotherType", __eq__=_equals_its_number, __hash__=lambda self: hash(number_of(self))
    ),
    _kind("HashRaises", __hash__=_raising()),
    _kind("HashChanges", __eq__=_same_number, __hash__=lambda self: next(_count)),
    _kind("GetattrAnswersAnything", __getattr__=lambda self, name: lambda *_, **__: self),
    _kind("ClassIsAnArray", __class__=jax.Array),
    _kind("ClassIsAModule", __class__=eqx.Module),
    _kind("ClassIsATuple", __class__=tuple),
    _kind("DictRaises", __dict__=property(_raising())),
    _kind("ReprRaises", __repr__=_raising()),
    _kind("LenAndIterRaise", __len__=_raising(), __iter__=_raising()),
    _kind("IterIsEndless", __iter__=itertools.repeat, __len__=lambda self: 2**40),
    # Not an array to Equinox, though NumPy would make one of it.
    _kind(
        "ArrayProtocol",
        __array__=lambda self, dtype=None, copy=None: np.ones(3, dtype),
        __jax_array__=lambda self: jnp.ones(3),
    ),
]


class IntOfItsOwn(int):
    def __eq__(self, other):
        return type(other) is IntOfItsOwn and int(self) == int(other)

    def __hash__(self):
        return 1


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
    def __eq__(cls, other):
        _raise()

    def __hash__(cls):
        return 1

    def __instancecheck__(cls, instance):
        return True

    def __subclasscheck__(cls, subclass):
        return True

    def __bool__(cls):
        _raise()


class WithHostileMetaclass(Numbered, metaclass=Meta):
    pass


class MetaWithoutName(type):
    @property
    def __name__(cls):
        _raise()

    def __getattribute__(cls, name):
        if name.startswith("__") and name not in ("__class__", "__dict__", "__mro__"):
            _raise(AttributeError)
        return super().__getattribute__(name)


class NamelessClass(Numbered, metaclass=MetaWithoutName):
    pass


class Colour(enum.Enum):
    RED, GREEN = 2, 3

    def __int__(self):
        return self.value


VALUES = [
    *(EqRaises, EqAlternates, EqIsAlwaysTrue, HashAndEqRaise, ClassRaises),
    *(GetattributeRaisesAttributeError, *_OTHERS),
    *(IntOfItsOwn, FloatThatLies, TupleOfItsOwn),
    *(WithHostileMetaclass, NamelessClass, Colour),
]

#: Those whose `==` calls different ones equal: which number counts is then anyone's guess.
LIARS = {EqIsAlwaysTrue, FloatThatLies}

FRAGILE = {
    *(EqAlternates, HashAndEqRaise, GetattributeRaisesAttributeError),
    *(ClassRaises, WithHostileMetaclass, NamelessClass),
}


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

PLACES = {
    "itself": (lambda v: v, lambda tree: tree),
    "tuple in dict": (lambda v: {"k": (v, X)}, lambda tree: tree["k"][0]),
    "named tuple": (lambda v: Pair(X, v), lambda tree: tree.value),
    "field": (lambda v: Holder(v, X), lambda tree: tree.value),
    "static field": (lambda v: StaticHolder(X, v), lambda tree: tree.value),
    "list in a static field": (lambda v: StaticHolder(X, [v]), lambda tree: tree.value[0]),
    "metadata": (lambda v: Registered(X, v), lambda tree: tree.value),
}
