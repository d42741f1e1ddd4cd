"""The key of a static object: hashable, and equal to another's exactly if one program serves both.

Unlike `==`, by which `equinox.filter_jit` compares, keys tell `1` from `True` and `1.0`, `0.0` from
`-0.0`, and one order of a dict's items from another, also inside of builtin containers, dataclasses
with a generated `__eq__` and Modules; and NaN equals NaN. A container is copied into its key, so
that a later change in place shows. What Python compares by identity is compared by identity here:
an object without an `__eq__`, and the `__self__` of a method. For all else the type, its `hash` and
its `==` decide, in this order, as in a lookup in a dict.
"""

import collections
import dataclasses
import functools
import hashlib
import math
import struct
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from .._compat import ArrayImpl, fields_of, has_generated_eq, native

#: Static containers of more entries, nested ones included, are compared as in Equinox: the very
#: object counts as unchanged, another one is asked by `==`. A warm call looks at each entry.
MAX_PARTS = 100

# How a key in the form (reader, class, names or None, part, ...) was read; as in `native.c`.
NUMBER, ITEMS, PAIRS, FIELDS, OTHER = range(5)

#: The types whose objects are their own keys, because they equal none of another type.
THEMSELVES = frozenset({str, int, bytes, type(None)})

#: The types of static objects that can't change and hold nothing else.
CONSTANTS = THEMSELVES | {bool, float, complex}


class Opaque:
    """The key of an object that isn't read into parts. It keeps the object alive.

    - `value`: the object.
    - `identity_suffices`: whether the very object counts as unchanged, without a `hash`.
    - `content`: stands for the object in comparisons. For an array, what it held when the key was
        made. For an object that is compared by identity, its `id`, which no other object can get
        as long as the key lives. None for an object whose `hash` and `==` decide.
    - `hash`: the hash of the object or of its `content`; None for an object that has no hash.
    """

    __slots__ = ("content", "hash", "identity_suffices", "value")

    def __init__(self, value: Any, identity_suffices: bool, content: tuple[Any, ...] | None = None):
        self.value = value
        self.identity_suffices = identity_suffices
        self.content = content
        try:
            # The hash of an array covers its dtype and shape alone, not the numbers that its owner
            # may change in place: the very array stays found.
            self.hash = hash(value if content is None else content[:2])
        except TypeError:
            # Python's way to say that something has no hash, as a tuple of lists hasn't.
            self.hash = None

    def __hash__(self) -> int:
        return hash(type(self.value)) if self.hash is None else self.hash

    def __eq__(self, other: object) -> bool:
        if type(other) is not Opaque or type(other.value) is not type(self.value):
            return False
        if other.value is self.value and self.identity_suffices:
            return True
        if other.hash != self.hash:
            return False
        # An array's own `==` broadcasts, and has no single answer.
        if self.content is not None:
            return other.content == self.content
        return other.value is self.value or bool(other.value == self.value)

    @property
    def has_hash(self) -> bool:
        """Whether the object was hashed when the key was made."""
        return self.content is None and self.hash is not None

    @property
    def is_changeable(self) -> bool:
        """Whether the key stands for the content of a NumPy array, which may change in place."""
        has_content = self.content is not None and len(self.content) > 1
        return has_content and type(self.value) is not ArrayImpl

    def identify(self) -> None:
        """Have the key equal its very object alone from now on.

        The very array counts as unchanged whatever its owner writes into it, so a program that is
        traced later may hold other numbers than the key says. That program must not serve other
        arrays that equal what this array once held.
        """
        self.content = (id(self.value),)


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


class _Static(NamedTuple):
    """A static object in a spec, by its key.

    - `key`: the key.
    - `ask`: whether JAX's registry has to be asked if the class became a node meanwhile.
    """

    key: Hashable
    ask: bool = False


# In C, because hashing and comparing specs calls its methods for each static object.
Static: Any = _Static if native is None else native.Static


class _TooLarge(Exception):
    """A container has more entries than `MAX_PARTS`."""


def static_key(value: Any) -> Hashable:
    """Return the key of one static object.

    A constant is its own key or has its bits, an object that compares by identity a weak reference,
    a container `(reader, class, names, part, ...)`.
    """
    # A list of one number, because all levels count towards the same bound.
    try:
        return _key(value, [MAX_PARTS])
    except _TooLarge:
        return Opaque(value, True)


def same(value: Any, key: Hashable) -> bool:
    """Return whether a key is that of a value: the rule, which `native.c` follows."""
    # The very container of many entries, or the very array, is looked into no further.
    if type(key) is Opaque and key.identity_suffices and value is key.value:
        return True
    # In the order in which a dict compares, which asks the `==` of the new value.
    return key == static_key(value)


def _key(value: Any, left: list[int]) -> Hashable:
    kind = type(value)
    if kind in THEMSELVES:
        return value
    read = _READERS.get(kind)
    if read is None:
        if kind.__eq__ is object.__eq__:
            return _by_identity(value)
        read = _reader_of_class(kind)
    # One in a container counts as unchanged if it is the very object, as for `==`.
    return Opaque(value, left[0] < MAX_PARTS) if read is None else read(value, left)


def _keys(parts: Collection[Any], left: list[int]) -> list[Hashable]:
    """Return the keys of the parts of a container."""
    left[0] -= len(parts)
    if left[0] < 0:
        raise _TooLarge
    return [part if type(part) in THEMSELVES else _key(part, left) for part in parts]


def _by_identity(value: Any) -> Hashable:
    if type(value).__weakrefoffset__:
        return IdentityRef(value)
    # The class has no weak references, as `object`, named tuples and classes with `__slots__`.
    return Opaque(value, True, (id(value),))


# --- What is read of an object, for its key -------------------------------------------------------

_Reader = Callable[[Any, list[int]], Hashable]


def _bool(value: bool, left: list[int]) -> Hashable:
    return (NUMBER, bool, None, value)


def _float(value: float, left: list[int]) -> Hashable:
    return (NUMBER, type(value), None, _bits(value))


def _complex(value: complex, left: list[int]) -> Hashable:
    return (NUMBER, type(value), None, _bits(value.real) + _bits(value.imag))


def _bits(value: float) -> bytes:
    # Zeros have two signs, and NaN equals NaN.
    return struct.pack("d", math.nan if math.isnan(value) else value)


def _items(value: Any, left: list[int]) -> Hashable:
    # Not by iterating: the `__iter__` of a subclass has no say.
    base: Any = tuple if isinstance(value, tuple) else list
    return (ITEMS, type(value), None, *_keys([*base.__iter__(value)], left))


def _pairs(value: dict[Any, Any], left: list[int]) -> Hashable:
    # Unlike for `==`, the order of the items matters: a function may go through them.
    # An item counts once.
    left[0] += len(value)
    return (PAIRS, type(value), None, *_keys([*value, *value.values()], left))


def _elements(value: Any, left: list[int]) -> Hashable:
    # With their number: a set can hold several NaN.
    keys = _keys([*value], left)
    return (OTHER, type(value), None, len(keys), frozenset(keys))


def _method(value: types.MethodType, left: list[int]) -> Hashable:
    # Methods compare their `__self__` by identity.
    fun = _key(value.__func__, left)
    return (OTHER, types.MethodType, None, fun, _by_identity(value.__self__))


def _array(value: Any, left: list[int]) -> Hashable:
    kind = type(value)
    is_known = kind in (np.ndarray, ArrayImpl) or issubclass(kind, np.generic)
    # Keys of random numbers have a dtype that only JAX has.
    if not is_known or not isinstance(value.dtype, np.dtype) or value.dtype.hasobject:
        # A mask, say, or a mapped file: what else tells it apart isn't clear.
        return _by_identity(value)
    return Opaque(value, True, _content(value))


def _content(array: Any) -> tuple[Any, ...]:
    digest = hashlib.blake2b(np.asarray(array).tobytes()).digest()
    return array.dtype, array.shape, digest, getattr(array, "weak_type", None)


def _module(value: eqx.Module, left: list[int]) -> Hashable:
    fields = fields_of(value)
    return (OTHER, type(value), (*fields,), *_keys(fields.values(), left))


def _fields(names: tuple[str, ...]) -> _Reader:
    """Return what reads these attributes, which are all that the objects' `==` compares."""

    def read(value: Any, left: list[int]) -> Hashable:
        parts = [getattr(value, name) for name in names]
        return (FIELDS, type(value), names, *_keys(parts, left))

    return read


_READERS: dict[type, _Reader] = {
    bool: _bool,
    float: _float,
    complex: _complex,
    tuple: _items,
    list: _items,
    dict: _pairs,
    collections.OrderedDict: _pairs,
    set: _elements,
    frozenset: _elements,
    slice: _fields(("start", "stop", "step")),
    types.MethodType: _method,
    eqx.Module: _module,
}


# Of the latest classes, because a session may define them without end.
@functools.lru_cache(maxsize=1024)
def _reader_of_class(kind: type) -> _Reader | None:
    """Return how objects of a class that isn't builtin are read; None where `==` decides."""
    if issubclass(kind, (np.ndarray, np.generic, jax.Array)):
        return _array
    owner: Any = next(base for base in kind.__mro__ if "__eq__" in vars(base))
    if owner in _READERS:
        # A subclass that keeps its base's `==` is looked into as that is.
        return _READERS[owner]
    if not has_generated_eq(owner):
        return None
    return _fields(tuple([field.name for field in dataclasses.fields(owner) if field.compare]))


def referents(key: Hashable) -> list[Any]:
    """Return the living objects to which a key, or a spec, refers weakly."""
    found = [part() for part in _parts(key) if isinstance(part, weakref.ref)]
    return [value for value in found if value is not None]


def changeable(key: Hashable) -> list[Opaque]:
    """Return the keys within a key, or a spec, that stand for the content of a NumPy array."""
    return [part for part in _parts(key) if type(part) is Opaque and part.is_changeable]


def check_unchanged(keys: Sequence[Opaque]) -> None:
    """Have each key of an array that was changed in place equal that very array alone."""
    for key in keys:
        if key.is_changeable and key.content != _content(key.value):
            key.identify()


def interchangeable(value: Any, other: Any) -> bool:
    """Return whether one object can stand for the other in an output. Runs no `==` of a user's.

    True for the very object, and for equal constants and tuples of them.
    """
    kind = type(value)
    if value is other:
        return True
    if kind is not type(other):
        return False
    if kind in CONSTANTS:
        return static_key(value) == static_key(other)
    # Many nodes have a tuple as metadata. A list isn't interchangeable, because its owner may
    # change it later.
    return kind is tuple and len(value) == len(other) and all(map(interchangeable, value, other))


def _parts(key: Hashable) -> Iterator[Any]:
    """Yield what a key, or a spec, consists of."""
    pending: list[Any] = [key]
    while pending:
        part = pending.pop()
        if type(part) is tuple or type(part) is frozenset:
            pending.extend(part)
        elif isinstance(part, Static):
            pending.append(part.key)
        else:
            yield part
