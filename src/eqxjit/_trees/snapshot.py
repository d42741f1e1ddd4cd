"""Snapshots of static containers: whether one is still as it was is asked in C, not in Python.

A typed static key takes Python some 0.3 microseconds an element. A snapshot holds a container's
elements, and compares them with those that it has now by identity, natively where that is possible;
where that can't tell, it says no, and the typed key decides. It refers weakly to what compares by
identity, as typed keys do.
"""

import contextlib
import copy
import marshal
import math
import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np

from .._compat import ArrayImpl, native_back_end
from .constants import CONSTANTS, TOLD_BY_EQUALITY, are_told_by_equality, is_same
from .elements import ATTRIBUTES, Reading, reading_of, walk, whole_key
from .static_key import (
    ByContent,
    ByEquality,
    compared_by_equality,
    compares_by_identity,
    fields_key,
    holds_for_all,
    is_fixed_dtype,
    is_hashable,
    is_opaque,
    stays,
    typed_key,
)

#: Containers of more elements than this, those of the containers in them included, are compared by
#: identity first: by then looking at each takes as long as a whole call of `equinox.filter_jit`.
LARGEST = 2_048

# Up to so many addresses are listed sooner than the array of them is made.
_FEW = 16

# Comparing so many bytes takes as long as comparing an element.
_BYTES_PER_ELEMENT = 128

# Looking into one more container takes as long as comparing so many elements.
_ELEMENTS_PER_PART = 20

# Marshalling a text takes as much longer than comparing an element.
_ELEMENTS_PER_TEXT = 3

# A class's own `==`, or `hash`, takes as long as comparing so many elements.
_ELEMENTS_PER_EQUALITY = 25
_ELEMENTS_PER_HASH = 12

# Up to so many times as large as what is looked into in each call, natively, an object that isn't
# the traced one is compared natively, too. Larger ones take too long to take a snapshot of.
_LARGEST_OWN = 8

# The native back end compares so many items of a list in the time of one element.
NATIVE_ELEMENTS = 10

# CPython's flags of a class that is made at run time, and of one that can't be changed even so.
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8

_OBJECTS = np.dtype(object)

_CONSTANTS = CONSTANTS | {range}

# What `marshal` writes of these tells them apart, types, signs of zeros and orders included.
_MARSHALLED_CONSTANTS = CONSTANTS - {bytes}
_MARSHALLED_CONTAINERS = frozenset({tuple, list, dict, set, frozenset})
# The last version without references, by which equal objects are written differently.
_MARSHAL_VERSION = 2


class Snapshot(Protocol):
    """A snapshot of one static value, or of each that is equal to it.

    - `size`: how many elements it holds on to.
    """

    @property
    def size(self) -> int: ...

    def matches(self, value: Any) -> bool:
        """Return whether the typed static key of a value is that of the value it was made of."""
        ...


class _Same:
    """The value itself, which can't change, or isn't looked into, while it is of its class."""

    __slots__ = ("kind", "size", "value")

    def __init__(self, value: Any, size: int = 1):
        self.value = value
        self.kind = type(value)
        self.size = size

    def matches(self, value: Any) -> bool:
        return value is self.value and type(value) is self.kind


class _SameWeakly:
    """The same, without keeping it alive."""

    __slots__ = ("ref",)
    size = 1

    def __init__(self, value: Any):
        self.ref = weakref.ref(value)

    def matches(self, value: Any) -> bool:
        return value is self.ref()


class _Marshalled:
    """A snapshot of nested builtin containers of numbers and strings, made in one call of C."""

    __slots__ = ("data", "kind", "size")

    def __init__(self, value: Any, size: int):
        self.kind = type(value)
        self.data = marshal.dumps(value, _MARSHAL_VERSION)
        self.size = size

    def matches(self, value: Any) -> bool:
        # `marshal` writes of subclasses nothing (it raises), or what their buffers hold.
        if type(value) is not self.kind:
            return False
        try:
            return marshal.dumps(value, _MARSHAL_VERSION) == self.data
        except ValueError:
            return False


class _SetOfConstants:
    """A snapshot of a set of constants that equal none of another type."""

    __slots__ = ("size", "value")

    def __init__(self, value: set[Any]):
        self.value = frozenset(value)
        self.size = len(self.value)

    def matches(self, value: Any) -> bool:
        return (
            type(value) is set
            and value == self.value
            and TOLD_BY_EQUALITY.issuperset(map(type, value))
        )


class _Bytes:
    """An object with a buffer: what that holds is compared without a copy of it."""

    __slots__ = ("attributes", "data", "kind", "size")

    def __init__(self, value: Any):
        self.kind = type(value)
        # The fields of a structured dtype can be renamed.
        self.attributes = copy.deepcopy(_buffer_attributes(value))
        # Not `bytes(value)`, which takes an array of one integer for a length.
        self.data = memoryview(value).tobytes()
        self.size = len(self.data) // _BYTES_PER_ELEMENT

    def matches(self, value: Any) -> bool:
        return (
            type(value) is self.kind
            and _buffer_attributes(value) == self.attributes
            # With equal lengths: all of it.
            and self.data.startswith(value)
        )


class _Keyed:
    """A value for which nothing quicker than its typed key is known."""

    __slots__ = ("key",)
    size = 1

    def __init__(self, key: Any):
        self.key = key

    def matches(self, value: Any) -> bool:
        return bool(whole_key(value) == self.key)


class _Token:
    """An object that lives as long as who refers to it."""

    __slots__ = ("__weakref__",)


class _Elements:
    """The elements of a container: by identity, or else constants by type and `==`.

    - `addresses`: those of all elements, in one object.
    - `constants`: those that are held on to, with `None` in the place of the others.
    - `held`: asks the native back end whether they are all the same; None where it can't tell.
    - `weak`: references to those that compare by identity; `died` has those that are dead. If this
        is garbage, nobody's death is noted: `alive` is a weak reference that is cleared then.
    - `parts`: the snapshots of those that have to be looked into, by position; `hashed` are the
        positions of those whose own `hash` tells while they are the same, with their classes and
        `hashes`, and `others` the rest.
    """

    __slots__ = (
        "addresses",
        "alive",
        "constants",
        "constants_types",
        "died",
        "has_fixed_classes",
        "hashed",
        "hashed_types",
        "hashes",
        "held",
        "kind",
        "others",
        "parts",
        "read",
        "size",
        "token",
        "weak",
        "weak_places",
        "weak_types",
    )

    def __init__(
        self,
        kind: type,
        reading: Reading,
        elements: list[Any],
        parts: dict[int, Any],
        weak: list[int],
    ):
        self.kind = kind
        self.read = reading.read
        self.addresses = _addresses(elements)
        self.parts = [*parts.items()]
        self.others = [pair for pair in self.parts if not _is_hashed(pair[1])]
        self.hashed = [index for index, part in self.parts if _is_hashed(part)]
        self.hashed_types = [type(elements[index]) for index in self.hashed]
        self.hashes = [parts[index].hash for index in self.hashed]
        self.size = len(elements) + sum([part.size for part in parts.values()])
        self.died: list[weakref.ref[Any]] = []
        self.weak = [weakref.ref(elements[index], self.died.append) for index in weak]
        self.token = _Token()
        self.alive = weakref.ref(self.token, self.died.append) if weak else None
        self.weak_types = [type(elements[index]) for index in weak]
        self.has_fixed_classes = all(map(_has_fixed_class, {*self.weak_types}))
        self.held = self._native(reading, elements, parts, weak)
        self.weak_places = weak
        self.constants = elements
        for index in (*parts, *weak):
            self.constants[index] = None
        types = [*map(type, self.constants)]
        kinds = {*types}
        is_told = kinds <= CONSTANTS and are_told_by_equality(self.constants, kinds)
        self.constants_types = types if is_told else None

    def _native(
        self, reading: Reading, elements: list[Any], parts: dict[int, Any], weak: list[int]
    ) -> Callable[[Any], bool] | None:
        back_end = native_back_end()
        if back_end is None or reading.op is None:
            return None
        asked: dict[int, Any] = {index: _asked_natively(part) for index, part in parts.items()}
        for index in weak:
            kind = type(elements[index])
            if not _has_fixed_class(kind):
                asked[index] = kind
        try:
            return back_end.Held(
                self.kind,
                reading.op,
                reading.names,
                tuple(elements),
                tuple(sorted(asked.items())),
                self.died,
                self.alive,
                # What outlives this object; not `self`, for the sake of no cycle.
                (elements, self.weak, parts, self.token),
            )
        except ValueError:
            # Keys of a dict that have to be looked into.
            return None

    def matches(self, value: Any) -> bool:
        if type(value) is not self.kind:
            return False
        if self.held is not None and self.held(value):
            return True
        items = self.read(value)
        if len(items) != len(self.constants):
            return False
        # The address of an object that died may be another's by now.
        is_told = not self.died and (self.alive is None or self.alive() is not None)
        are_same = is_told and _addresses(items) == self.addresses
        if are_same and self.hashed:
            objects = [items[index] for index in self.hashed]
            if [*map(type, objects)] != self.hashed_types or [*map(hash, objects)] != self.hashes:
                return False
        for index, part in self.others if are_same else self.parts:
            if not part.matches(items[index]):
                return False
        if are_same:
            return self.has_fixed_classes or self._weak_match(items)
        if self.weak and not self._weak_match(items):
            return False
        for index, _ in self.parts:
            items[index] = None
        if self.constants_types is None:
            return all(map(is_same, items, self.constants))
        return [*map(type, items)] == self.constants_types and items == self.constants

    def _weak_match(self, items: list[Any]) -> bool:
        objects = [items[place] for place in self.weak_places]
        for place in self.weak_places:
            items[place] = None
        # One may have been made an object of another class, and a dead one isn't `None`.
        return [*map(type, objects)] == self.weak_types and all(
            map(operator.is_, objects, map(operator.call, self.weak))
        )


def _asked_natively(part: Any) -> Any:
    if type(part) is _Elements and part.held is not None:
        return part.held
    if _is_hashed(part):
        return type(part.value), part.hash
    if type(part) is _Same:
        return part.kind
    return part.matches


def native_check(snapshot: Any) -> Callable[[Any], bool] | None:
    """Return what asks the native back end for a match, where it can tell; a no is no answer."""
    back_end = native_back_end()
    if type(snapshot) is not ByContent or snapshot.names is None or back_end is None:
        return snapshot.held if type(snapshot) is _Elements else None
    kind, names, values = snapshot.kind, snapshot.names, snapshot.value
    return back_end.Held(kind, ATTRIBUTES, names, values, (), [], None, values)


def _has_fixed_class(kind: type) -> bool:
    """Return whether the class of its objects can't be assigned to."""
    # Of a class, the metaclass could be; that takes one on purpose.
    flags = kind.__flags__
    return issubclass(kind, type) or not flags & _HEAP_TYPE or bool(flags & _IMMUTABLE_TYPE)


def _is_hashed(part: Any) -> TypeGuard[ByEquality]:
    return type(part) is ByEquality and part.hash is not None


def _addresses(items: list[Any]) -> bytes | tuple[int, ...]:
    """Return the `id`s of some objects: in half the time of comparing each by `is`."""
    if len(items) <= _FEW:
        return (*map(id, items),)
    return np.fromiter(items, _OBJECTS, len(items)).tobytes()


def _buffer_attributes(value: Any) -> Any:
    if type(value) is bytearray:
        return len(value)
    return value.dtype, value.shape, value.flags.c_contiguous


# --- Making one -------------------------------------------------------------------------------


class Snapshots(NamedTuple):
    """The snapshots of one value.

    - `own`: of the value itself.
    - `common`: of all values that are equal to it, if it is small.
    - `is_large`: whether to look into it takes longer than upstream's whole call.
    """

    own: Snapshot
    common: Snapshot | None
    is_large: bool = False


def snapshots_of(value: Any) -> Snapshots:
    """Return the snapshots of a value."""
    return _snapshots(value, _survey(value))


def snapshots_if_long(value: Any) -> Snapshots | None:
    """Return the same of a value whose typed key takes so long that it is made once."""
    with contextlib.suppress(Exception):
        is_listed = type(value) in (tuple, list)
        if is_listed and len(value) <= LARGEST and CONSTANTS.issuperset(map(type, value)):
            return None
        survey = _survey(value)
        if survey.size > LARGEST:
            return _snapshots(value, survey)
    # What can't be read is left to the typed key.
    return None


def _snapshots(value: Any, survey: "_Survey") -> Snapshots:
    whole = _Same(value, survey.size) if cannot_change(value) else None
    if whole is not None and survey.size > LARGEST:
        return Snapshots(whole, None, True)
    by_content = _by_content(value, survey)
    is_flat = survey.n_containers <= 1 and survey.size <= LARGEST
    is_compared_natively = survey.native_size <= _LARGEST_OWN * LARGEST * NATIVE_ELEMENTS
    own = by_content
    if by_content is None or is_flat or is_compared_natively:
        looked_into = _looked_into(value)
        if by_content is None or is_flat or type(looked_into) is not _Keyed:
            own = looked_into
    assert own is not None
    return Snapshots(whole or own, by_content or own, survey.is_large)


def _by_content(value: Any, survey: "_Survey") -> _SetOfConstants | _Marshalled | None:
    """Return a snapshot by which equal objects are told in C; None where there is none."""
    if type(value) is set and TOLD_BY_EQUALITY.issuperset(map(type, value)):
        return _SetOfConstants(value)
    return _Marshalled(value, survey.size) if survey.is_marshalled else None


def compared_by_identity(value: Any) -> Snapshot | None:
    """Return a snapshot by identity; None if it would keep alive what it mustn't."""
    if cannot_change(value):
        return _Same(value)
    by_fields = fields_key(value)
    if by_fields is not None:
        return by_fields
    with contextlib.suppress(TypeError):
        return _SameWeakly(value)
    # Last: to survey a large value takes long.
    return _Same(value) if _survey(value).is_light else None


def cannot_change(value: Any) -> bool:
    """Return whether a value can't change, and holds nothing that compares by identity."""
    return holds_for_all(_is_constant, value, _CONSTANTS)


def _is_constant(value: Any) -> bool:
    return _is_constant_kind(type(value))


def _is_constant_kind(kind: type) -> bool:
    if kind in _CONSTANTS or is_fixed_dtype(kind):
        return True
    return issubclass(kind, np.generic) and not issubclass(kind, np.void)


class _Survey(NamedTuple):
    """The cost of comparing a value.

    - `n`: as many elements as take as long, but for those that hold them.
    - `n_containers`: how many containers those are in.
    - `n_texts`: how many of them are strings.
    - `n_native`: as `n`, by the native back end, with items of lists for elements.
    - `is_light`: whether it holds nothing that could die before it.
    - `is_marshalled`: whether `marshal` tells all of it.
    - `is_native`: whether the native back end compares all of it, by identity.
    """

    n: int = 1
    n_containers: int = 0
    n_texts: int = 0
    n_native: int = 1
    is_light: bool = True
    is_marshalled: bool = False
    is_native: bool = False

    @property
    def size(self) -> int:
        """The same as one number, by Python."""
        if self.is_marshalled and self._n_parts:
            return self.n + _ELEMENTS_PER_TEXT * self.n_texts + self._n_parts
        return self.n + _ELEMENTS_PER_PART * self._n_parts

    @property
    def _n_parts(self) -> int:
        return max(self.n_containers - 1, 0)

    @property
    def is_large(self) -> bool:
        """True if that takes longer than upstream's whole call."""
        return self.size > LARGEST and self.native_size > LARGEST * NATIVE_ELEMENTS

    @property
    def native_size(self) -> float:
        """The same as `size`, by the native back end, in items of lists; infinite if it can't."""
        if not self.is_native:
            return math.inf
        return self.n_native + _ELEMENTS_PER_PART * self._n_parts


def _survey(value: Any) -> _Survey:
    n = n_containers = n_texts = n_native = 0
    is_light = is_marshalled = True
    is_native = native_back_end() is not None

    def elements_of(part: Any) -> list[Any]:
        """Survey one value, but for the elements that it returns."""
        nonlocal n, n_containers, n_texts, n_native, is_light, is_marshalled, is_native
        kind = type(part)
        reading = reading_of(part)
        if reading is None:
            atom = _survey_of_atom(part)
            n += atom.n
            is_light = is_light and atom.is_light
            is_marshalled = is_marshalled and atom.is_marshalled
            is_native = is_native and atom.is_native
            return []
        elements = reading.read(part)
        is_native = is_native and reading.op is not None
        n_native += reading.native_cost * len(elements)
        kinds = {*map(type, elements)}
        constants = {kind for kind in kinds if _is_constant_kind(kind)}
        n += round(reading.cost * len(elements))
        n_containers += 1
        is_marshalled = is_marshalled and kind in _MARSHALLED_CONTAINERS
        is_marshalled = is_marshalled and constants <= _MARSHALLED_CONSTANTS
        n_texts += [*map(type, elements)].count(str)
        if len(constants) == len(kinds):
            return []
        parts = [element for element in elements if type(element) not in constants]
        n -= len(parts)
        # It writes each element of a set twice, and so a set in a set in a set eight times.
        is_marshalled = is_marshalled and kind not in (set, frozenset)
        return parts

    walk(value, elements_of)
    return _Survey(n, n_containers, n_texts, n_native, is_light, is_marshalled, is_native)


def _survey_of_atom(value: Any) -> _Survey:
    kind = type(value)
    if _is_constant_kind(kind):
        return _Survey(is_marshalled=kind in _MARSHALLED_CONSTANTS, is_native=True)
    if kind is bytearray:
        return _Survey(len(value) // _BYTES_PER_ELEMENT)
    if kind is memoryview:
        # What it shows may be anybody's.
        return _Survey(value.nbytes // _BYTES_PER_ELEMENT, is_light=False)
    if kind is np.ndarray and value.dtype.hasobject:
        return _Survey(value.size, is_light=False)
    if kind is np.ndarray:
        return _Survey(value.nbytes // _BYTES_PER_ELEMENT)
    if is_opaque(value):
        # Its typed key holds on to it, too, or to a copy.
        return _Survey(_ELEMENTS_PER_HASH if is_hashable(value) else _ELEMENTS_PER_EQUALITY)
    is_same = compares_by_identity(kind)
    return _Survey(is_light=is_same and not _is_weakly_held(value), is_native=is_same)


def _is_weakly_held(value: Any) -> bool:
    """Return whether a snapshot mustn't keep alive a value that compares by identity."""
    if stays(value):
        return False
    try:
        weakref.ref(value)
    except TypeError:
        # The typed key holds on to it, too.
        return False
    return True


def _looked_into(value: Any) -> Snapshot:
    try:
        return _made_of(value)
    except RecursionError:
        return _Keyed(whole_key(value))


def _made_of(value: Any) -> Snapshot:
    kind = type(value)
    reading = reading_of(value)
    if reading is not None:
        return _elements(value, reading)
    if kind is ArrayImpl:
        # It can't be changed in place.
        return _SameWeakly(value)
    if kind is bytearray or (kind is np.ndarray and not value.dtype.hasobject):
        with contextlib.suppress(Exception):
            made = _Bytes(value)
            if made.matches(value):
                return made
    key = typed_key(value)
    return compared_by_equality(key) or _Keyed(key)


def _elements(value: Any, reading: Reading) -> _Elements:
    elements = reading.read(value)
    parts: dict[int, Any] = {}
    weak: list[int] = []
    kinds = {*map(type, elements)}
    constants = {kind for kind in kinds if _is_constant_kind(kind)}
    # Mostly all are.
    others = [] if len(constants) == len(kinds) else enumerate(elements)
    for index, element in others:
        if type(element) in constants or cannot_change(element):
            continue
        if not compares_by_identity(type(element)):
            parts[index] = _made_of(element)
        elif _is_weakly_held(element):
            weak.append(index)
        elif not _has_fixed_class(type(element)):
            parts[index] = _Same(element)
    return _Elements(type(value), reading, elements, parts, weak)
