"""Static keys. The keys of two static objects are equal exactly if one program may serve both.

A key is hashable. `equinox.filter_jit` compares static objects by `==`. Keys differ from that:

- `1`, `True` and `1.0` have different keys, and so have `0.0` and `-0.0`. NaN equals NaN.
- Dicts with equal items in a different order have different keys.
- These two rules also hold inside of builtin containers, Modules, and dataclasses whose `__eq__` is
    generated.
- The parts of a container are copied into its key, so a later change in place is noticed.

Objects whose class has no `__eq__` are compared by identity, and so is the `__self__` of a method.
Any other object is compared by its type, then its `hash`, then its `==`, as in a lookup in a dict.
"""

import collections
import dataclasses
import functools
import hashlib
import math
import struct
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from .._compat import ArrayImpl, fields_of, has_generated_eq, native

#: A static container with more parts than this, nested parts included, isn't read into its key,
#: because each warm call compares all parts. As in Equinox, the same object then counts as
#: unchanged, and a different object is compared by `==`.
MAX_PARTS = 100

# The key of an object that is read into parts is `(reader, class, names or None, part, ...)`. The
# `reader` is one of these numbers, and tells guards how to compare an object with the key without
# creating the key of the object. `native.c` has the same numbers.
NUMBER, ITEMS, PAIRS, FIELDS, OTHER = range(5)

#: The types whose objects are their own keys, because an object of a different type never has an
#: equal key.
THEMSELVES = frozenset({str, int, bytes, type(None)})

#: The types of static objects that can't change and refer to no other objects.
CONSTANTS = THEMSELVES | {bool, float, complex}


class Opaque:
    """The key of an object that isn't read into parts. The key keeps the object alive.

    - `value`: the object.
    - `identity_suffices`: whether the same object counts as unchanged, without comparing hashes.
    - `content`: a tuple that is compared instead of the object. For an array it is the dtype, the
        shape and a digest of the numbers at the time when the key was created. For an object that
        is compared by identity it is the `id`, which no other object can have while the key lives.
        `None` for an object that is compared by its `hash` and `==`.
    - `hash`: the hash of the first two items of `content` or, without a `content`, of the object.
        `None` if the object has no hash.
    """

    __slots__ = ("content", "hash", "identity_suffices", "value")

    def __init__(self, value: Any, identity_suffices: bool, content: tuple[Any, ...] | None = None):
        self.value = value
        self.identity_suffices = identity_suffices
        self.content = content
        try:
            # The hash of an array covers only its dtype and shape. So a dict still finds the key
            # of an array whose numbers were changed in place.
            self.hash = hash(value if content is None else content[:2])
        except TypeError:
            # The object has no hash, like a list, or like a tuple that contains a list.
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
        # The `==` of an array would return an array, not a bool.
        if self.content is not None:
            return other.content == self.content
        return other.value is self.value or bool(other.value == self.value)

    @property
    def has_hash(self) -> bool:
        """True if the object itself has been hashed for this key."""
        return self.content is None and self.hash is not None

    @property
    def is_changeable(self) -> bool:
        """True if the key contains the content of a NumPy array, which may change in place."""
        has_content = self.content is not None and len(self.content) > 1
        return has_content and type(self.value) is not ArrayImpl

    def compare_by_identity(self) -> None:
        """From now on, let the key equal only keys of the same object.

        The same array counts as unchanged, whatever its owner writes into it. So a program that is
        traced later may have compiled in other numbers than those in `content`. Such a program must
        not serve a different array that has the numbers in `content`.
        """
        self.content = (id(self.value),)


class IdentityRef(weakref.ref[Any]):
    """A weak reference that compares its object by identity, even if the class has an `__eq__`."""

    __slots__ = ("_id",)

    def __init__(self, value: Any):
        self._id = id(value)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        # Not by `_id`, because a new object may have the `id` of an object that has died.
        value = self()
        return type(other) is IdentityRef and value is not None and value is other()


class _Static(NamedTuple):
    """The spec of a static object.

    - `key`: the key of the object.
    - `ask`: whether guards must ask JAX's registry, because the class of the object may have been
        registered as a node since the spec was created.
    """

    key: Hashable
    ask: bool = False


# The native class is used if there is one, because hashing or comparing a spec calls `__hash__` or
# `__eq__` for each static object.
Static: Any = _Static if native is None else native.Static


class _TooLarge(Exception):
    """A container has more parts than `MAX_PARTS`."""


def static_key(value: Any) -> Hashable:
    """Return the key of one static object.

    The key is one of

    - the object itself, if its type is in `THEMSELVES`;
    - an `IdentityRef`, for an object that is compared by identity;
    - a tuple `(reader, class, names or None, part, ...)`, for an object that is read into parts. A
        part is a key or, for a number, its bits;
    - an `Opaque`, for any other object.
    """
    # The list holds one number: how many parts may still be read, at all levels together.
    try:
        return _key(value, [MAX_PARTS])
    except _TooLarge:
        return Opaque(value, True)


def same(value: Any, key: Hashable) -> bool:
    """Return whether a value matches a key. `native.c` follows the same rule."""
    # An array or a large container counts as unchanged if it is the same object.
    if type(key) is Opaque and key.identity_suffices and value is key.value:
        return True
    # In this order `Opaque` calls the `==` of the new value, as when a table looks up a spec.
    return key == static_key(value)


def _key(value: Any, n_left: list[int]) -> Hashable:
    kind = type(value)
    if kind in THEMSELVES:
        return value
    read = _READERS.get(kind)
    if read is None:
        if kind.__eq__ is object.__eq__:
            return _by_identity(value)
        read = _reader_of_class(kind)
    if read is None:
        # Inside of a container (`n_left` has been reduced), the same object counts as unchanged
        # without comparing hashes, because the `==` of builtin containers also checks the identity
        # first.
        return Opaque(value, n_left[0] < MAX_PARTS)
    return read(value, n_left)


def _keys(parts: Collection[Any], n_left: list[int]) -> list[Hashable]:
    """Return the keys of the parts of a container, and count the parts."""
    n_left[0] -= len(parts)
    if n_left[0] < 0:
        raise _TooLarge
    return [part if type(part) in THEMSELVES else _key(part, n_left) for part in parts]


def _by_identity(value: Any) -> Hashable:
    """Return the key of an object that is compared by identity."""
    if type(value).__weakrefoffset__:
        return IdentityRef(value)
    # Some classes don't support weak references. Examples are `object`, and classes whose
    # `__slots__` don't include `__weakref__`.
    return Opaque(value, True, (id(value),))


# --- Readers, which return the keys of objects of certain classes ---------------------------------

# A reader takes the object, and a list with the number of parts that may still be read.
_Reader = Callable[[Any, list[int]], Hashable]


def _bool(value: bool, n_left: list[int]) -> Hashable:
    return (NUMBER, bool, None, value)


def _float(value: float, n_left: list[int]) -> Hashable:
    return (NUMBER, type(value), None, _bits(value))


def _complex(value: complex, n_left: list[int]) -> Hashable:
    return (NUMBER, type(value), None, _bits(value.real) + _bits(value.imag))


def _bits(value: float) -> bytes:
    # The bits of `0.0` and `-0.0` differ. All NaNs get the bits of one NaN.
    return struct.pack("d", math.nan if math.isnan(value) else value)


def items_of(value: Any) -> list[Any]:
    """Return the items of a tuple or list, without the `__iter__` that a subclass may define.

    Such an `__iter__` is code of the user's, and may yield other items than those that the
    inherited `==` compares.
    """
    base: Any = tuple if issubclass(type(value), tuple) else list
    return [*base.__iter__(value)]


def _items(value: Any, n_left: list[int]) -> Hashable:
    return (ITEMS, type(value), None, *_keys(items_of(value), n_left))


def _pairs(value: dict[Any, Any], n_left: list[int]) -> Hashable:
    # Unlike `==`, the key depends on the order of the items, because a function may iterate over
    # the dict. An item counts as one part, but `_keys` counts two, so add one for each item here.
    n_left[0] += len(value)
    return (PAIRS, type(value), None, *_keys([*value, *value.values()], n_left))


def _elements(value: Any, n_left: list[int]) -> Hashable:
    # The key also has the number of elements, because several NaNs in a set have one key.
    keys = _keys([*value], n_left)
    return (OTHER, type(value), None, len(keys), frozenset(keys))


def _method(value: types.MethodType, n_left: list[int]) -> Hashable:
    # The `==` of methods compares `__self__` by identity.
    fun = _key(value.__func__, n_left)
    return (OTHER, types.MethodType, None, fun, _by_identity(value.__self__))


def _array(value: Any, n_left: list[int]) -> Hashable:
    kind = type(value)
    is_known = kind in (np.ndarray, ArrayImpl) or issubclass(kind, np.generic)
    # The dtype of JAX's random keys isn't a NumPy dtype. Arrays of objects have no bits to compare.
    if not is_known or not isinstance(value.dtype, np.dtype) or value.dtype.hasobject:
        # A subclass may have more than its numbers, such as a mask.
        return _by_identity(value)
    return Opaque(value, True, _array_content(value))


def _array_content(array: Any) -> tuple[Any, ...]:
    """Return the `content` of an array's key."""
    digest = hashlib.blake2b(np.asarray(array).tobytes()).digest()
    return array.dtype, array.shape, digest, getattr(array, "weak_type", None)


def _module(value: eqx.Module, n_left: list[int]) -> Hashable:
    fields = fields_of(value)
    return (OTHER, type(value), (*fields,), *_keys(fields.values(), n_left))


def _fields(names: tuple[str, ...]) -> _Reader:
    """Return a reader of objects whose `==` compares these attributes and nothing else."""

    def read(value: Any, n_left: list[int]) -> Hashable:
        parts = [getattr(value, name) for name in names]
        return (FIELDS, type(value), names, *_keys(parts, n_left))

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


# Bounded, because a session may define classes without end, and the cache keeps them alive.
@functools.lru_cache(maxsize=1024)
def _reader_of_class(kind: type) -> _Reader | None:
    """Return the reader for objects of a class, which has an `__eq__`.

    `None` if the objects are compared by their `hash` and `==`.
    """
    if issubclass(kind, (np.ndarray, np.generic, jax.Array)):
        return _array
    owner: Any = next(base for base in kind.__mro__ if "__eq__" in vars(base))
    if owner in _READERS:
        # Objects of a subclass that inherits `==` are read like objects of the base class.
        return _READERS[owner]
    if not has_generated_eq(owner):
        return None
    return _fields(tuple([field.name for field in dataclasses.fields(owner) if field.compare]))


def referents(key: Hashable) -> list[Any]:
    """Return the objects that a key, or a spec, refers to weakly, if they are still alive."""
    found = [part() for part in _parts(key) if isinstance(part, weakref.ref)]
    return [value for value in found if value is not None]


def changeable_keys(key: Hashable) -> list[Opaque]:
    """Return the keys of NumPy arrays within a key, or a spec: arrays may be changed in place."""
    return [part for part in _parts(key) if type(part) is Opaque and part.is_changeable]


def compare_changed_by_identity(keys: Sequence[Opaque]) -> None:
    """Compare each array by identity from now on if it has changed since its key was created."""
    for key in keys:
        if key.is_changeable and key.content != _array_content(key.value):
            key.compare_by_identity()


def interchangeable(value: Any, other: Any) -> bool:
    """Return whether callers can't tell one static object of an output from the other.

    True for the same object, for constants with equal keys, and for tuples of such objects. No
    `==` of a user's class is called.
    """
    kind = type(value)
    if value is other:
        return True
    if kind is not type(other):
        return False
    if kind in CONSTANTS:
        return static_key(value) == static_key(other)
    # Tuples matter, because many nodes have a tuple as metadata. A list isn't interchangeable with
    # an equal list, because its owner may change it later.
    return kind is tuple and len(value) == len(other) and all(map(interchangeable, value, other))


def _parts(key: Hashable) -> list[Any]:
    """Return the innermost parts of a key, or of a spec: everything but tuples and frozensets."""
    found: list[Any] = []
    pending: list[Any] = [key]
    while pending:
        part = pending.pop()
        if type(part) is tuple or type(part) is frozenset:
            pending.extend(part)
        elif isinstance(part, Static):
            pending.append(part.key)
        else:
            found.append(part)
    return found
