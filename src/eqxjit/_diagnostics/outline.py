"""The outline of what a function captured, to recognise a function that is defined again."""

import collections
import itertools
from collections.abc import Hashable, Iterable
from typing import Any

import equinox as eqx

from .._compat import fields_of
from .._spec.static import compared_fields, freeze
from .._spec.tree import is_array
from .description import lasting

# More of it isn't looked at.
_MAX_PARTS = 200

_LONG_TEXT = 100
_LONG_INT = 2**64

_Part = tuple[Hashable, ...]


def outline(values: Iterable[Any]) -> tuple[Hashable, ...]:
    """Return a key that is equal for values that are alike, as far as their first parts tell.

    Holds none of the values, calls nothing of the user's, and reads no array. Objects that compare
    by identity are alike if they are the same; others with an `==` of their own by their class.
    """
    parts: list[Hashable] = []
    pending = collections.deque(itertools.islice(values, _MAX_PARTS))
    while pending and len(parts) < _MAX_PARTS:
        part, children = _part(pending.popleft())
        parts.append(part)
        pending.extend(itertools.islice(children, _MAX_PARTS - len(pending)))
    return tuple(parts)


def _part(value: Any) -> tuple[_Part, Iterable[Any]]:
    """Return what to note of a value itself, and what to look at next."""
    kind = type(value)
    if kind is str or kind is bytes:
        return (lasting(kind), len(value), value[:_LONG_TEXT]), ()
    if value is None or kind is bool or kind is complex or kind is float:
        # By its text: zeros differ by their sign, and NaN equals itself.
        return (lasting(kind), repr(value)), ()
    if kind is int:
        return (int.__name__, value if abs(value) < _LONG_INT else value.bit_length()), ()
    if is_array(value):
        # One may not be computed yet.
        return ("array",), ()
    if issubclass(kind, (tuple, list)):
        base: type = tuple if issubclass(kind, tuple) else list
        return (lasting(kind), base.__len__(value)), base.__iter__(value)
    if issubclass(kind, dict):
        items = itertools.chain.from_iterable([*dict.items(value)])
        return (lasting(kind), dict.__len__(value)), items
    if issubclass(kind, eqx.Module):
        return (lasting(kind),), fields_of(value).values()
    if kind.__eq__ is object.__eq__:
        return (lasting(freeze(value)),), ()
    fields = compared_fields(kind)
    if fields is None:
        return (lasting(kind),), ()
    return (lasting(kind),), [object.__getattribute__(value, field) for field in fields]
