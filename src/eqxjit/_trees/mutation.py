"""Static objects that can be changed in place: which, whether they were, and copies of them."""

import collections
import contextlib
import copy
import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from .._compat import with_metadata
from .key_cache import Seen, has_key, learned_key, static_key
from .partition import DYNAMIC, StaticTree
from .static_key import compared_fields, identity_suffices, is_hashable, is_opaque


class Mutable(NamedTuple):
    """A static object that can be changed in place, with the typed key that it had."""

    value: Any
    key: Hashable


def mutable(static: StaticTree) -> list[Mutable]:
    """Return the static objects in a tree, leaves included, whose typed keys can change."""
    # A leaf that can't be hashed didn't come in by its key: it is the function's own object.
    leaves = [leaf for leaf in static.leaves if leaf is not DYNAMIC and is_hashable(leaf)]
    return mutable_among([*leaves, *static.metadata])


def mutable_among(values: Iterable[Any]) -> list[Mutable]:
    """Return those of some static objects whose typed keys can change."""
    # Layers often share one object, such as their configuration.
    found: list[Mutable] = []
    for value in {id(value): value for value in values}.values():
        if not identity_suffices(value):
            # What can't be compared can't be told to have changed.
            with contextlib.suppress(Exception):
                found.append(Mutable(value, learned_key(value)))
    return found


def are_repeated(values: Iterable[Any]) -> bool:
    """Return whether an object that is to be looked into is among them twice."""
    values = [*values]
    counts = collections.Counter(map(id, values))
    if len(counts) == len(values):
        return False
    repeated = {id(value): value for value in values if counts[id(value)] > 1}.values()
    return not all(identity_suffices(value) or is_opaque(value) for value in repeated)


def are_unchanged(objects: Iterable[Mutable], seen: Seen | None = None) -> bool:
    """Return whether none of them was changed since; `seen` is as for `has_key`."""
    try:
        return all(has_key(value, key, seen) for value, key in objects)
    except Exception:
        return False


def is_frozen(value: Any) -> bool:
    """Return whether a value can be changed by `object.__setattr__` alone, as Modules can."""
    if identity_suffices(value):
        return True
    kind = type(value)
    if kind is tuple or kind is frozenset:
        return all(map(is_frozen, value))
    fields = compared_fields(kind)
    if fields is None or not kind.__dataclass_params__.frozen:
        return False
    return all(is_frozen(getattr(value, field.name)) for field in dataclasses.fields(kind))


def snapshot(static: StaticTree) -> StaticTree:
    """Return the same static half, with copies of the objects in it that can be changed in place.

    One that can't be copied, or whose copy isn't equal to it, stays.
    """
    copies = {id(value): _copied(value, key) for value, key in mutable_among(static.metadata)}
    if not copies:
        return static

    def with_copies(metadata: Any) -> Any:
        if type(metadata) is tuple:
            return tuple([copies.get(id(part), part) for part in metadata])
        return copies.get(id(metadata), metadata)

    return StaticTree(with_metadata(static.treedef, with_copies), static.leaves)


def _copied(value: Any, key: Hashable) -> Any:
    try:
        copied = _copy(value)
        return copied if static_key(copied) == key else value
    except Exception:
        return value


def _copy(value: Any) -> Any:
    """Copy deeply, except what compares by identity, such as functions."""
    if identity_suffices(value):
        return value
    if type(value) is tuple:
        return tuple(map(_copy, value))
    if isinstance(value, dict):
        copied = copy.copy(value)
        # Not its own `update`, by which a Counter would count anew.
        dict.update(copied, [(key, _copy(element)) for key, element in value.items()])
        return copied
    if isinstance(value, (list, collections.deque)):
        copied = copy.copy(value)
        for index, element in enumerate(value):
            copied[index] = _copy(element)
        return copied
    return copy.deepcopy(value)
