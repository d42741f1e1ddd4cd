"""Typed static keys, made once for each static object: from then on a snapshot of it is compared.

Most static objects come again and again, call after call, and some can be changed in place. So the
key of an object that was met before is the key that it had, if the snapshot that was taken with it
still matches. Invariant: nothing of the user's is kept alive that typed keys don't keep alive, but
containers of constants.
"""

import collections
import contextlib
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeGuard

from .._compat import MISSING, PyTreeDef, TreedefColumns, treedef_columns
from .constants import CONSTANTS, Constants, constants_key, has_more_parts
from .elements import whole_key
from .garbage import without_collecting
from .snapshot import (
    LARGEST,
    Snapshot,
    Snapshots,
    compared_by_identity,
    native_check,
    snapshots_if_long,
    snapshots_of,
)
from .static_key import (
    SIMPLE,
    ByContent,
    Hashed,
    compared_by_equality,
    compares_by_identity,
    content_key,
    identity_suffices,
    is_container,
    typed_key,
)

# Of the objects with one key so many elements are held in all, and so many objects at least.
_MOST_ELEMENTS = 100_000
_LEAST_OBJECTS = 8


class KnownKey(Hashed):
    """A typed static key, with snapshots of objects that have it.

    - `refs`: the weak references in it, once somebody has looked for them.
    """

    __slots__ = ("_by_id", "_common", "_n_elements", "refs")

    def __init__(self, typed: Hashable):
        super().__init__(typed)
        self.refs: list[weakref.ref[Any]] | None = None
        #: Snapshots of objects, by `id`, the latest last; and one for all that are equal to those.
        self._by_id: collections.OrderedDict[int, Snapshot] = collections.OrderedDict()
        self._n_elements = 0
        self._common: Snapshot | None = None

    def matches(self, value: Any) -> bool:
        """Return whether a snapshot shows that a value has this key; if none does, it may still."""
        try:
            snapshot = self._by_id.get(id(value))
            if snapshot is not None and snapshot.matches(value):
                return True
            common = self._common
            return common is not None and common is not snapshot and common.matches(value)
        except Exception:
            # Then the typed key tells, or raises likewise.
            return False

    def is_learned(self, value: Any) -> bool:
        """Return whether there is a snapshot of this very object, as it is."""
        try:
            snapshot = self._by_id.get(id(value))
            return snapshot is not None and snapshot.matches(value)
        except Exception:
            return False

    def learn(self, value: Any) -> None:
        """Take snapshots of a value, if this is its key and there are none of it, as it is."""
        if self.is_learned(value):
            return
        # What can't be read is left to the typed key.
        with contextlib.suppress(Exception):
            # In this order: another thread may be changing it.
            snapshots = snapshots_of(value)
            if self.typed == whole_key(value):
                self.keep(value, snapshots)

    def keep(self, value: Any, snapshots: Snapshots) -> None:
        """Keep the snapshots of a value that has had this key since, if it is as it was."""
        if snapshots.is_large:
            _large.add(self)
        try:
            if not snapshots.own.matches(value):
                return
        except Exception:
            return
        self._common = self._common or snapshots.common
        former = self._by_id.pop(id(value), None)
        self._by_id[id(value)] = snapshots.own
        self._n_elements += snapshots.own.size - (0 if former is None else former.size)
        # One by one: there may be tens of thousands.
        while self._n_elements > _MOST_ELEMENTS and len(self._by_id) > _LEAST_OBJECTS:
            _, oldest = self._by_id.popitem(last=False)
            self._n_elements -= oldest.size

    def snapshot_of(self, value: Any) -> Snapshot | None:
        """Return the snapshot of this very object."""
        return self._by_id.get(id(value))


#: The keys that are in use, by the hash of their typed static keys and a place among those with one
#: hash: equal objects have the very same key.
_in_use: weakref.WeakValueDictionary[tuple[int, int], KnownKey] = weakref.WeakValueDictionary()

# Unhashable objects of a class all have one hash, and each asks the `==` of so many others.
_MOST_OF_ONE_HASH = 8

#: The keys of the objects met, by `id`: a guess, as others may be at their addresses by now.
_met: dict[int, weakref.ref[KnownKey]] = {}

# So many objects are remembered before those are dropped whose keys are no longer in use.
_MOST_MET = 16_384


class TracedObjects:
    """The large static objects that one function was traced with, and their keys.

    To look into one takes longer than a whole call of upstream's, which compares it with itself by
    identity. So does a warm call. Invariant: what is about to be traced has its key made without.
    """

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[int, tuple[Snapshot, weakref.ref[KnownKey]]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def key_of(self, value: Any) -> KnownKey | None:
        """Return the key that an object had when it was traced; None for any other object."""
        found = self._found.get(id(value))
        return None if found is None or not found[0].matches(value) else found[1]()

    def add(self, values: Iterable[Any]) -> None:
        """Note those of some values that are large: their keys have just been made."""
        if not _large:
            # Mostly, and to walk a wide tree takes long.
            return
        found = self._found
        for value in values:
            if type(value) in SIMPLE:
                continue
            ref = _met.get(id(value))
            known = None if ref is None else ref()
            if not is_large(known):
                continue
            whole = compared_by_identity(value)
            address = id(value)
            found.pop(address, None)
            if whole is not None:
                found[address] = whole, weakref.ref(known, _dropping(found, address))


def _dropping(
    found: dict[int, tuple[Snapshot, weakref.ref[KnownKey]]], address: int
) -> Callable[[weakref.ref[KnownKey]], None]:
    def died(ref: weakref.ref[KnownKey]) -> None:
        pair = found.get(address)
        if pair is not None and pair[1] is ref:
            found.pop(address, None)

    return died


class TracedKey(NamedTuple):
    """The key of a large object in a guard: those that were traced have it by identity."""

    known: KnownKey
    traced: TracedObjects


#: The keys of objects that are larger than what is looked into in each call.
_large: weakref.WeakSet[KnownKey] = weakref.WeakSet()


def is_large(key: Hashable) -> TypeGuard[KnownKey]:
    """Return whether a key is that of objects which a warm call doesn't look into."""
    return type(key) is KnownKey and key in _large


def static_key(value: Any, traced: TracedObjects | None = None) -> Hashable:
    """Return the typed static key of a value, made in Python only where it is new or changed.

    **Arguments:**

    - `value`: any object.
    - `traced`: the large objects that are compared by identity; None to look into all.

    **Returns:**

    A hashable object: of a container a `KnownKey`, which equals no key by `typed_key`.

    **Raises:**

    Whatever the `__hash__` or the `__eq__` of a user's class raises.
    """
    kind = type(value)
    if kind in SIMPLE or compares_by_identity(kind):
        return typed_key(value)
    if traced is not None:
        of_trace = traced.key_of(value)
        if of_trace is not None:
            return of_trace
    by_content = content_key(value)
    if by_content is not None:
        # It is made as fast as a snapshot is compared.
        return _known_if_large(value, by_content)
    ref = _met.get(id(value))
    known = None if ref is None else ref()
    if known is not None and known.matches(value):
        return known
    looks_into = is_container(kind)
    # Before its key: another thread may be changing it.
    snapshots = snapshots_if_long(value) if looks_into else None
    typed = whole_key(value)
    opaque = compared_by_equality(typed)
    if not looks_into and (opaque is None or opaque.hash is not None):
        return typed
    if opaque is not None:
        snapshots = Snapshots(opaque, opaque)
    is_second = known is not None and known.typed == typed
    if known is None or not is_second:
        known = _known(value, typed)
    if snapshots is not None:
        # Its key then isn't made a second time.
        known.keep(value, snapshots)
    if is_second:
        # Likely not its last.
        known.learn(value)
    return known


def _known_if_large(value: Any, key: ByContent) -> Hashable:
    """Return a key by content; one by which it can be traced by identity, if that is large."""
    if not has_more_parts(key.value, LARGEST):
        return key
    known = _known(value, key)
    _large.add(known)
    return known


def _known(value: Any, typed: Hashable) -> KnownKey:
    """Return the `KnownKey` of a typed static key, which a value has; mostly there is but one."""
    try:
        known = _find_or_make(typed)
    except Exception:
        # Its own `==` raises: whoever looks the key up will see.
        return KnownKey(typed)
    if len(_met) >= _MOST_MET:
        _forget_unused()
    _met[id(value)] = weakref.ref(known)
    return known


def _find_or_make(typed: Hashable) -> KnownKey:
    typed_hash = hash(typed)
    for place in range(_MOST_OF_ONE_HASH):
        known = _in_use.get((typed_hash, place))
        if known is None:
            known = _in_use[typed_hash, place] = KnownKey(typed)
            return known
        if known.typed == typed:
            return known
    return KnownKey(typed)


def _forget_unused() -> None:
    for address, ref in [*_met.items()]:
        if ref() is None:
            _met.pop(address, None)
    if len(_met) >= _MOST_MET:
        _met.clear()


#: The keys that were found in one call, with their objects, which `id` then tells apart.
Seen = dict[int, tuple[Any, Hashable]]


def has_key(value: Any, key: Hashable, seen: Seen | None = None) -> bool:
    """Return whether a value's typed static key is `key`.

    **Arguments:**

    - `value`: any object.
    - `key`: made by `static_key`.
    - `seen`: what was found earlier in this call: an object is looked at once.
    """
    if type(key) is ByContent:
        return key.matches(value)
    if seen is None and type(key) is KnownKey and key.matches(value):
        return True
    key, traced = key if type(key) is TracedKey else (key, None)
    if seen is not None and (found := seen.get(id(value))) is not None:
        return bool(found[1] == key)
    found_key: Hashable = None if traced is None else traced.key_of(value)
    if found_key is None:
        is_known = type(key) is KnownKey and key.matches(value)
        found_key = key if is_known else static_key(value)
    if seen is not None:
        seen[id(value)] = (value, found_key)
    return found_key is key or bool(found_key == key)


def learned_key(value: Any, traced: TracedObjects | None = None) -> Hashable:
    """Return the typed static key of a value that guards will compare with others from now on."""
    key = static_key(value, traced)
    if type(key) is not KnownKey:
        return key
    if type(key.typed) is ByContent:
        # What is the very object isn't gone through then, either.
        return key.typed
    if traced is not None and is_large(key):
        return TracedKey(key, traced)
    key.learn(value)
    return key


def native_check_of(value: Any, key: Hashable) -> Callable[[Any], bool] | None:
    """Return what asks the native back end whether a value is as this one was; None without."""
    return native_check(key.snapshot_of(value) if type(key) is KnownKey else key)


class KnownKeys:
    """The keys of a dict, to be compared with those of others that have as many.

    - `key`: the typed static key of them all.
    """

    __slots__ = ("_addresses", "_collect", "_keys", "_types", "key")

    def __init__(self, keys: list[Any], is_ordered: bool):
        """`is_ordered`: whether the order of the keys counts."""
        self._collect = tuple if is_ordered else frozenset
        self.key = learned_key(self._collect(keys))
        # Kept, so that no others come to be at their addresses.
        self._keys = keys
        suffices = all(map(identity_suffices, keys))
        self._addresses = self._collect(map(id, keys)) if suffices else None
        is_told = not is_ordered and all(
            type(key) is tuple and _TOLD_BY_TYPES.issuperset(map(type, key)) for key in keys
        )
        #: The types of what is in each, where those and equality tell keys apart.
        self._types = {key: (*map(type, key),) for key in keys} if is_told else None

    def match(self, value: Any) -> bool:
        """Return whether the typed static key of the keys of a dict is this one."""
        if self._addresses is not None and self._collect(map(id, value)) == self._addresses:
            return True
        types = self._types
        if types is None:
            return has_key(self._collect(value), self.key)
        return all(type(key) is tuple and types.get(key) == (*map(type, key),) for key in value)


_TOLD_BY_TYPES = frozenset({int, str, bytes, bool})

#: What the metadata of most Modules is made of, beside `MISSING`, which there is but one of.
CONSTANT_METADATA = CONSTANTS if type(MISSING) is object else CONSTANTS | {type(MISSING)}


def metadata_key(metadata: Any, traced: TracedObjects | None = None) -> Hashable:
    """Return the typed static key of a node's metadata, which may be made anew each time."""
    if type(metadata) is tuple:
        key = constants_key(metadata, CONSTANT_METADATA)
        return key or (tuple, tuple([static_key(part, traced) for part in metadata]))
    return whole_key(metadata) if type(metadata) is list else static_key(metadata, traced)


def treedef_key(treedef: PyTreeDef) -> Hashable:
    """Return the typed static key of a structure: its nodes, with typed keys of metadata."""
    return columns_key(columns_of(treedef))


def columns_of(treedef: PyTreeDef) -> TreedefColumns:
    """Return `treedef_columns`; of many nodes, while no garbage is collected."""
    return without_collecting(lambda: treedef_columns(treedef), treedef.num_nodes)


def columns_key(columns: TreedefColumns, traced: TracedObjects | None = None) -> Hashable:
    """Return the typed static key of a structure, by the columns of its treedef."""
    kinds, arities, metadata, classes = columns
    # The rows of leaves, of which there are most, have neither.
    rows = [
        data
        for data, cls in zip(metadata, classes, strict=True)
        if data is not None or cls is not None
    ]
    parts = tuple(itertools.chain.from_iterable([row for row in rows if type(row) is tuple]))
    together = constants_key(parts, CONSTANT_METADATA)
    sizes: tuple[int | None, ...] = ()
    if together is not None:
        # Modules of constants, of which there are many: a key for each would take far longer.
        sizes = tuple([len(row) if type(row) is tuple else None for row in rows])
        rows = [row for row in rows if type(row) is not tuple]
    keys = tuple([None if row is None else metadata_key(row, traced) for row in rows])
    return (Constants((kinds, arities, classes, sizes)), together, keys)
