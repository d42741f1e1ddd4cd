"""Constants, which can't change and hold nothing that compares by identity; what tells two apart.

A program compiled for one may serve another exactly if they are of the same types, and equal; but
zeros are told apart by their signs, and NaN equals NaN.
"""

import operator
from collections.abc import Collection, Hashable
from itertools import chain
from typing import Any

from .._compat import native_back_end

#: The types of those that aren't containers.
CONSTANTS = frozenset({type(None), bool, int, str, bytes, float, complex})

#: Those that equal none of another type.
TOLD_BY_EQUALITY = frozenset({type(None), int, str, bytes})

# Tuples in tuples down to here are constants. (As deep as `_native.c` looks.)
_MAX_DEPTH = 200


class Constants(tuple[Any, ...]):
    """A part of a typed static key that refers to nothing weakly."""

    __slots__ = ()


def constants_key(values: tuple[Any, ...], constants: frozenset[type] = CONSTANTS) -> Hashable:
    """Return one key for values that are all constants, by their types; None for others."""
    types = tuple(map(type, values))
    kinds = {*types}
    if not kinds <= constants:
        return None
    if are_told_by_equality(values, kinds):
        return Constants((types, values))
    # A call for each would take three times as long.
    return Constants(
        (types, tuple([v if type(v) in TOLD_BY_EQUALITY else number_key(v) for v in values]))
    )


def are_told_by_equality(values: Collection[Any], kinds: Collection[type]) -> bool:
    """Return whether `is_told_by_equality` holds for values of these types, by few calls."""
    if complex in kinds:
        return False
    return float not in kinds or not (0.0 in values or any(map(operator.ne, values, values)))


def number_key(value: Any) -> Hashable:
    """Return what tells a constant from others of its type: its text, where equality doesn't."""
    return value if is_told_by_equality(value) else repr(value)


def is_told_by_equality(value: Any) -> bool:
    """Return whether only the same constants of its type equal a constant without parts.

    Not zeros, of which there are two, nor NaN, nor complex numbers, which may be made of these.
    """
    return type(value) is not complex and (
        type(value) is not float or (bool(value) and value == value)
    )


def is_same_by_python(value: Any, expected: Any) -> bool:
    """Return whether a value is the expected one, or a constant and the same as that.

    A no is no answer for what isn't a constant.
    """
    pending = [(value, expected)]
    # A tuple may hold another twice, and that one a third, ...
    seen: set[tuple[int, int]] = set()
    while pending:
        value, expected = pending.pop()
        if value is expected:
            continue
        kind = type(value)
        if kind is not type(expected):
            return False
        if kind is tuple:
            if len(value) != len(expected):
                return False
            if (id(value), id(expected)) in seen:
                continue
            seen.add((id(value), id(expected)))
            pending += zip(value, expected, strict=True)
        elif kind is float or kind is complex:
            if number_key(value) != number_key(expected):
                return False
        elif kind is frozenset:
            if value != expected or not TOLD_BY_EQUALITY.issuperset(map(type, (*value, *expected))):
                return False
        elif kind not in TOLD_BY_EQUALITY or value != expected:
            return False
    return True


def is_constant_by_python(value: Any) -> bool:
    """Return whether a value is a constant that `hash` tells: not NaN, which has many hashes."""
    level: tuple[Any, ...] = (value,)
    for _ in range(_MAX_DEPTH):
        kinds = {*map(type, level)}
        if float in kinds or complex in kinds:
            numbers = [part for part in level if type(part) in (float, complex)]
            if any(map(operator.ne, numbers, numbers)):
                return False
        kinds -= CONSTANTS
        if not kinds:
            return True
        if not kinds <= {tuple, frozenset}:
            return False
        sets = [part for part in level if type(part) is frozenset]
        if not TOLD_BY_EQUALITY.issuperset(map(type, chain.from_iterable(sets))):
            return False
        # Each once: see above.
        tuples = {id(part): part for part in level if type(part) is tuple}
        level = (*chain.from_iterable(tuples.values()),)
    return False


def has_more_parts_by_python(constant: Any, n: int) -> bool:
    """Return whether a constant has more than `n` parts, itself included."""
    level: tuple[Any, ...] = (constant,)
    while level:
        n -= len(level)
        if n < 0:
            return True
        level = (*chain.from_iterable([p for p in level if type(p) in (tuple, frozenset)]),)
    return False


if (_back_end := native_back_end()) is None:
    is_same, is_constant = is_same_by_python, is_constant_by_python
    has_more_parts = has_more_parts_by_python
else:
    is_same, is_constant = _back_end.is_same, _back_end.is_constant
    has_more_parts = _back_end.has_more_parts
