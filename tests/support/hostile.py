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


class EqRaises(Numbered):
    def __eq__(self, other):
        _raise()

    __hash__ = object.__hash__


class EqRaisesAndHashCollides(EqRaises):
    def __hash__(self):
        return 1


class EqReturnsArray(Numbered):
    def __eq__(self, other):
        return jnp.array([True, False])

    def __hash__(self):
        return 1


class EqReturnsNothing(Numbered):
    def __eq__(self, other):
        return None

    def __hash__(self):
        return 1


class EqReturnsUntestable(Numbered):
    def __eq__(self, other):
        return BoolRaises(1)

    def __hash__(self):
        return 1


class EqIsNeverTrue(Numbered):
    """Not even of itself, like NaN."""

    def __eq__(self, other):
        return False

    def __hash__(self):
        return 1


class EqIsAlwaysTrue(Numbered):
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 1


class EqAlternates(Numbered):
    """Raises every other time."""

    turns = itertools.count()

    def __eq__(self, other):
        if next(self.turns) % 2:
            _raise()
        return type(other) is EqAlternates and number_of(self) == number_of(other)

    def __hash__(self):
        return 1


class EqRecurs(Numbered):
    def __eq__(self, other):
        return self == other

    def __hash__(self):
        return 1


class EqOfAnotherType(Numbered):
    """Equal to the plain number, with its hash."""

    def __eq__(self, other):
        return number_of(self) == (number_of(other) if isinstance(other, Numbered) else other)

    def __hash__(self):
        return hash(number_of(self))


class HashRaises(Numbered):
    def __hash__(self):
        _raise()


class HashAndEqRaise(EqRaises):
    def __hash__(self):
        _raise()


class HashChanges(Numbered):
    turns = itertools.count()

    def __eq__(self, other):
        return type(other) is HashChanges and number_of(self) == number_of(other)

    def __hash__(self):
        return next(self.turns)


class HashIsNoNumber(Numbered):
    def __hash__(self):
        return "hash"  # type: ignore[return-value]


class Unhashable(Numbered):
    __hash__ = None  # type: ignore[assignment]


class GetattributeRaises(Numbered):
    def __getattribute__(self, name):
        _raise()


class GetattributeRaisesAttributeError(Numbered):
    def __getattribute__(self, name):
        _raise(AttributeError)


class GetattrAnswersAnything(Numbered):
    def __getattr__(self, name):
        return lambda *args, **kwargs: self


class ClassIsAnArray(Numbered):
    __class__ = jax.Array  # type: ignore[assignment]


class ClassIsANumpyArray(Numbered):
    __class__ = np.ndarray  # type: ignore[assignment]


class ClassIsAModule(Numbered):
    __class__ = eqx.Module  # type: ignore[assignment]


class ClassIsATuple(Numbered):
    __class__ = tuple  # type: ignore[assignment]


class ClassIsADict(Numbered):
    __class__ = dict  # type: ignore[assignment]


class ClassRaises(Numbered):
    @property
    def __class__(self):
        _raise()


class DictRaises(Numbered):
    @property
    def __dict__(self):
        _raise()


class DictIsNone(Numbered):
    __dict__ = None  # type: ignore[assignment]


class ReprRaises(Numbered):
    def __repr__(self):
        _raise()


class ReprRaisesAndUnhashable(ReprRaises):
    __hash__ = None  # type: ignore[assignment]


class BoolRaises(Numbered):
    def __bool__(self):
        _raise()


class LenAndIterRaise(Numbered):
    def __len__(self):
        _raise()

    def __iter__(self):
        _raise()


class IterIsEndless(Numbered):
    def __iter__(self):
        return itertools.repeat(self)

    def __len__(self):
        return 2**40


class ArrayProtocol(Numbered):
    """Not an array to Equinox, though NumPy would make one of it."""

    def __array__(self, dtype=None, copy=None):
        return np.ones(3, dtype)

    def __jax_array__(self):
        return jnp.ones(3)


class WithoutWeakReferences:
    __slots__ = ("number",)

    def __init__(self, number):
        self.number = number

    def __int__(self):
        return self.number


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
    EqRaises,
    EqRaisesAndHashCollides,
    EqReturnsArray,
    EqReturnsNothing,
    EqReturnsUntestable,
    EqIsNeverTrue,
    EqIsAlwaysTrue,
    EqAlternates,
    EqRecurs,
    EqOfAnotherType,
    HashRaises,
    HashAndEqRaise,
    HashChanges,
    HashIsNoNumber,
    Unhashable,
    GetattributeRaises,
    GetattributeRaisesAttributeError,
    GetattrAnswersAnything,
    ClassIsAnArray,
    ClassIsANumpyArray,
    ClassIsAModule,
    ClassIsATuple,
    ClassIsADict,
    ClassRaises,
    DictRaises,
    DictIsNone,
    ReprRaises,
    ReprRaisesAndUnhashable,
    BoolRaises,
    LenAndIterRaise,
    IterIsEndless,
    ArrayProtocol,
    WithoutWeakReferences,
    IntOfItsOwn,
    FloatThatLies,
    TupleOfItsOwn,
    WithHostileMetaclass,
    NamelessClass,
    Colour,
]

#: Those whose `==` calls different ones equal: which number counts is then anyone's guess.
LIARS = {EqIsAlwaysTrue, FloatThatLies}

#: Those of which only the error can be asked that upstream may manage without.
FRAGILE = {
    EqAlternates,
    HashAndEqRaise,
    GetattributeRaises,
    GetattributeRaisesAttributeError,
    ClassRaises,
    WithHostileMetaclass,
    NamelessClass,
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

#: How a value is put into an argument, and how it is found there again.
PLACES = {
    "itself": (lambda v: v, lambda tree: tree),
    "list": (lambda v: [X, v], lambda tree: tree[1]),
    "tuple in dict": (lambda v: {"k": (v, X)}, lambda tree: tree["k"][0]),
    "named tuple": (lambda v: Pair(X, v), lambda tree: tree.value),
    "field": (lambda v: Holder(v, X), lambda tree: tree.value),
    "static field": (lambda v: StaticHolder(X, v), lambda tree: tree.value),
    "list in a static field": (lambda v: StaticHolder(X, [v]), lambda tree: tree.value[0]),
    "dict in a static field": (lambda v: StaticHolder(X, {1: v}), lambda tree: tree.value[1]),
    "metadata": (lambda v: Registered(X, v), lambda tree: tree.value),
}
