"""Static objects: a hashable stand-in for each, equal exactly if one program may serve both.

Unlike `==`, which `equinox.filter_jit` compares with, stand-ins tell `1` from `True` and `1.0`,
`0.0` from `-0.0`, and one order of a dict's items from another, also inside of builtin containers,
dataclasses with a generated `__eq__` and Modules; and NaN equals NaN. Containers are copied into
their stand-in, so that a later change in place shows. For all else the type, its `==` and
`hash` decide, as in Equinox.
"""

import collections
import dataclasses
import struct
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .._compat import ArrayImpl, fields_of, native
from .._interruptions import unless_it_raises

#: Static containers with more parts than these are compared as in Equinox: the very object is taken
#: to be unchanged, another one is asked by `==`. A warm call looks at each part.
MAX_PARTS = 1000 if native is not None else 100

# One that C asks Python about counts as so many parts: an array, a set, a method, a Module.
_N_OTHER = MAX_PARTS // 32

# Deeper ones count as too large, because reading them takes a frame for each level.
_MAX_DEPTH = 100

# How a stand-in in the form (reader, class, names or None, part, ...) was read; as in `native.c`.
NUMBER, ITEMS, PAIRS, FIELDS, OTHER = range(5)

#: The types whose objects stand for themselves, because they equal none of another type.
THEMSELVES = frozenset({str, int, bytes, type(None)})

#: The types of static objects that can't change and hold nothing else.
CONSTANTS = THEMSELVES | {bool, float, complex}

# A NaN equals every other, whatever its bits.
_NAN = struct.pack("d", float("nan"))


class Opaque:
    """A stand-in for an object that its type, its `hash` and its `==` tell from others."""

    __slots__ = ("hash", "value")

    def __init__(self, value: Any, value_hash: int | None):
        self.value = value
        #: As it was when this was made, in which a change may show; None for unhashable objects.
        self.hash = value_hash

    def __hash__(self) -> int:
        return hash(type(self.value)) if self.hash is None else self.hash

    def __eq__(self, other: object) -> bool:
        return type(other) is Opaque and other.hash == self.hash and self.matches(other.value)

    def matches(self, value: Any) -> bool:
        """Return whether this stands for a value, too."""
        mine = self.value
        if type(value) is not type(mine) or (self.hash is not None and hash(value) != self.hash):
            return False
        if value is mine:
            return True
        if issubclass(type(value), np.ndarray):
            # Its `==` broadcasts, and has no single answer.
            return value.dtype == mine.dtype and value.tobytes() == mine.tobytes()
        return bool(value == mine)


class Identity:
    """A stand-in for an object that equals itself alone, and can't be referred to weakly."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return type(other) is Identity and other.value is self.value


class IdentityRef(weakref.ref[Any]):
    """A weak reference to an object that equals itself alone, whatever its class says."""

    __slots__ = ("_id",)

    def __init__(self, value: Any):
        self._id = id(value)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        # The `id` of one that died may be another's by now.
        value = self()
        return type(other) is IdentityRef and value is not None and value is other()


class _TooLarge(Exception):
    """A container has more parts than `MAX_PARTS`, or is nested too deeply."""


def freeze(value: Any) -> Hashable:
    """Return the stand-in for one static object.

    A constant stands for itself or by its bits, an object that compares by identity by a weak
    reference, a container by `(reader, class, names, part, ...)`.
    """
    kind = type(value)
    if kind in THEMSELVES:
        return value
    if kind is bool:
        return _TRUE if value else _FALSE
    if kind is float:
        # As many Modules hold, of which each takes a while below.
        return (NUMBER, float, None, _bits(value))
    if kind is tuple and len(value) <= MAX_PARTS and THEMSELVES.issuperset(map(type, value)):
        # As the metadata of most nodes.
        return (ITEMS, tuple, None, *value)
    if kind in _READERS or kind.__eq__ is not object.__eq__:
        # A list of one number, because all levels count towards the same bound.
        try:
            return _freeze(value, [MAX_PARTS], 0)
        except _TooLarge:
            return Opaque(value, None)
    return _by_identity(value)


_TRUE = (NUMBER, bool, None, True)
_FALSE = (NUMBER, bool, None, False)


def same(value: Any, frozen: Hashable) -> bool:
    """Return whether a stand-in is that of a value: the rule, which `native.c` follows."""
    if type(frozen) is Opaque:
        return frozen.matches(value)
    return freeze(value) == frozen


def _freeze(value: Any, left: list[int], depth: int) -> Hashable:
    kind = type(value)
    if kind in THEMSELVES:
        return value
    read = _READERS.get(kind) or _reader_of_class(kind)
    if read is None:
        return _by_identity(value) if kind.__eq__ is object.__eq__ else _opaque(value)
    found = read(value, left)
    if found is None:
        return _opaque(value)
    reader, names, parts = found
    if depth and (reader == OTHER or (reader == PAIRS and kind is not dict)):
        left[0] -= _N_OTHER
        if left[0] < 0:
            raise _TooLarge
    if reader in (NUMBER, OTHER):
        return (reader, kind, names, *parts)
    return (reader, kind, names, *_freeze_parts(parts, left, depth + 1))


def _freeze_parts(parts: Iterable[Any], left: list[int], depth: int = 1) -> list[Hashable]:
    parts = [*parts]
    left[0] -= len(parts)
    if left[0] < 0 or depth > _MAX_DEPTH:
        raise _TooLarge
    return [part if type(part) in THEMSELVES else _freeze(part, left, depth) for part in parts]


def _by_identity(value: Any) -> Hashable:
    kind = type(value)
    # Whether it can be referred to weakly.
    if not kind.__weakrefoffset__:
        return Identity(value)
    if kind.__eq__ is object.__eq__ and kind.__hash__ is object.__hash__:
        # Equal while alive if the referents are, that is, by identity; and compared in C.
        ref = weakref.ref(value)
        # A reference keeps its hash, and has none to make once its object is gone.
        hash(ref)
        return ref
    return IdentityRef(value)


def _opaque(value: Any) -> Opaque:
    # A `__hash__` of the user's may refuse.
    return Opaque(value, unless_it_raises(lambda: hash(value), None))


# --- What is read of an object: how, the names of fields, and the parts ---------------------------

_Read = tuple[int, tuple[str, ...] | None, Any]


def _number(value: Any, left: list[int]) -> _Read:
    parts = (value.real, value.imag) if type(value) is complex else (value,)
    return NUMBER, None, (b"".join(map(_bits, parts)),)


def _bits(value: float) -> bytes:
    # Zeros have two signs, and NaN equals NaN.
    return struct.pack("d", value) if value == value else _NAN


def _items(value: Any, left: list[int]) -> _Read:
    # Not by iterating: the `__iter__` of a subclass has no say.
    base: type = tuple if issubclass(type(value), tuple) else list
    return ITEMS, None, base.__getitem__(value, slice(None))


def _pairs(value: dict[Any, Any], left: list[int]) -> _Read:
    # Unlike for `==`, the order of the items matters: a function may go through them.
    if not isinstance(value, collections.OrderedDict):
        return PAIRS, None, [*dict.keys(value), *dict.values(value)]
    cls = collections.OrderedDict
    return OTHER, None, _freeze_parts([*cls.keys(value), *cls.values(value)], left)


def _elements(value: Any, left: list[int]) -> _Read:
    base: type = set if issubclass(type(value), set) else frozenset
    copied = base.copy(value)
    # With their number: a set can hold several NaN.
    return OTHER, None, (len(copied), frozenset(_freeze_parts(copied, left)))


def _method(value: types.MethodType, left: list[int]) -> _Read:
    # Methods compare their `__self__` by identity.
    return OTHER, None, (_freeze(value.__func__, left, 0), _by_identity(value.__self__))


def _numpy(value: np.ndarray | np.generic, left: list[int]) -> _Read | None:
    if value.dtype.hasobject:
        return None
    # As many parts as a list of its numbers would have.
    left[0] -= value.nbytes // 8
    if left[0] < 0:
        raise _TooLarge
    return OTHER, None, (value.dtype, value.shape, value.tobytes())


def _array(value: Any, left: list[int]) -> _Read | None:
    # Keys of random numbers have a dtype that only JAX has.
    if not isinstance(value.dtype, np.dtype) or not value.is_fully_addressable:
        return OTHER, None, (_by_identity(value),)
    read = _numpy(np.asarray(value), left)
    return None if read is None else (OTHER, None, (value.weak_type, *read[2]))


def _module(value: eqx.Module, left: list[int]) -> _Read:
    fields = fields_of(value)
    return OTHER, (*fields,), _freeze_parts(fields.values(), left)


_OF_SLICES = ("start", "stop", "step")

_READERS: dict[type, Callable[[Any, list[int]], _Read | None]] = {
    bool: lambda value, left: (NUMBER, None, (value,)),
    float: _number,
    complex: _number,
    tuple: _items,
    list: _items,
    dict: _pairs,
    collections.OrderedDict: _pairs,
    set: _elements,
    frozenset: _elements,
    slice: lambda value, left: (FIELDS, _OF_SLICES, (value.start, value.stop, value.step)),
    types.MethodType: _method,
    np.ndarray: _numpy,
    ArrayImpl: _array,
}


def register_reader(kind: type, content: Callable[[Any], Hashable]) -> None:
    """Have what a function returns stand for the objects of a class, which compare by identity."""
    _READERS[kind] = lambda value, left: (OTHER, None, (content(value),))


_CONTAINERS = (tuple, list, dict, collections.OrderedDict, set, frozenset)


def _reader_of_class(kind: type) -> Callable[[Any, list[int]], _Read | None] | None:
    """Return how objects of a class that isn't builtin are read; None where `==` decides."""
    if issubclass(kind, np.generic):
        return _numpy
    if issubclass(kind, jax.Array):
        return _array
    for base in (*_CONTAINERS, eqx.Module):
        # A subclass that keeps its base's `==` is looked into as that is.
        if issubclass(kind, base):
            if kind.__eq__ is not base.__eq__:
                return None
            return _module if base is eqx.Module else _READERS[base]
    names = compared_fields(kind)
    if names is None:
        return None
    return lambda value, left: (FIELDS, names, [getattr(value, name) for name in names])


# By the `__eq__` of dataclasses: a method that was generated is of one class.
_compared: weakref.WeakKeyDictionary[types.FunctionType, tuple[str, ...] | None]
_compared = weakref.WeakKeyDictionary()


def compared_fields(kind: type) -> tuple[str, ...] | None:
    """Return the fields that a dataclass's generated `__eq__` compares; None for other classes."""
    equality: Any = kind.__eq__
    # `dataclasses` defines its methods in a function of this name, and leaves a user's alone.
    if type(equality) is not types.FunctionType or (
        equality.__code__.co_qualname != "__create_fn__.<locals>.__eq__"
    ):
        return None
    # Not by `in`, which takes an interruption for a key that can't be referred to weakly.
    found = _compared.get(equality, ...)
    if found is not ...:
        return found
    owner = next(base for base in kind.__mro__ if "__eq__" in vars(base))
    parameters = vars(owner).get("__dataclass_params__")
    names = None
    if parameters is not None and parameters.eq:
        names = tuple([field.name for field in dataclasses.fields(owner) if field.compare])
    return _compared.setdefault(equality, names)


def referents(frozen: Hashable) -> list[Any]:
    """Return the living objects to which a stand-in, or a spec, refers weakly."""
    found: list[Any] = []
    pending: list[Any] = [frozen]
    while pending:
        part = pending.pop()
        if type(part) is tuple or type(part) is frozenset:
            pending.extend(part)
        elif isinstance(part, weakref.ref):
            found.append(part())
        elif hasattr(part, "frozen"):
            pending.append(part.frozen)
    return [value for value in found if value is not None]
