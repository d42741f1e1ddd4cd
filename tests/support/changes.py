"""Changes arguments in place, behind the back of the function that they were passed to."""

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np
from jax.tree_util import default_registry

from tests.support import nodes
from tests.support.strategies import Change


def apply(change: Change, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Change something in the arguments, in place.

    **Returns:**

    Whether a static value may have been changed. `equinox.filter_jit` doesn't see that where it
    compares an object with itself, or an `OrderedDict` with a `dict`.
    """
    places = [place for value in (*args, *kwargs.values()) for place in _places(value)]
    # An argument can be replaced, but not removed or added, which would be an error.
    places += [_Place(part, [_replace_item]) for part in (args, kwargs)]
    place = places[change.place % len(places)]
    way = place.ways[change.way % len(place.ways)]
    # Nothing changes if the target is read-only or empty, or if a new value can't be hashed.
    with contextlib.suppress(ValueError, TypeError, LookupError, ZeroDivisionError):
        way(place.target, change)
    return place.is_static


_KINDS = {int: bool, bool: float, float: int, list: tuple, tuple: list}
_KINDS |= {dict: collections.OrderedDict, collections.OrderedDict: dict}


def _instead_of(old: Any, change: Change) -> Any:
    """Return an equal value of another type, or a zero of the other sign, or else a new value."""
    if type(old) is float and old == 0 and math.copysign(1, old) > 0:
        return -0.0
    if type(old) in _KINDS and (not isinstance(old, (int, float)) or old in (0, 1)):
        return _KINDS[type(old)](old)
    # Arrays don't belong in static fields.
    return change.array() if eqx.is_array(old) else change.value()


_Way = Callable[[Any, Change], Any]


class _Place(NamedTuple):
    """An object that can be changed in place, and the ways to change it."""

    target: Any
    ways: list[_Way]
    is_static: bool = False


def _places(value: Any, is_static: bool = False) -> Iterator[_Place]:
    """Yield each mutable object in a value, also in static fields."""
    ways = next((ways for kind, ways in _WAYS.items() if isinstance(value, kind)), None)
    if ways is not None:
        always_static = not isinstance(value, (list, dict, np.ndarray))
        yield _Place(value, ways, is_static or always_static)
    if isinstance(value, (eqx.Module, nodes.Settings, nodes.Config)):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                static = is_static or field.metadata.get("static", False)
                yield from _places(getattr(value, field.name), static)
        return
    try:
        one_level = default_registry.flatten_one_level(value)
    except (TypeError, ValueError, AttributeError):
        # It is an outdated `eqx.nn.State`, or has keys that can't be sorted, or lacks an attribute.
        return
    for child in [] if one_level is None else one_level[0]:
        yield from _places(child, is_static)


def _replace_item(target: Any, change: Change) -> None:
    key = _key(target, change)
    target[key] = _instead_of(target[key], change)


def _replace_key(target: Any, change: Change) -> None:
    key = _key(target, change)
    new = _instead_of(key, change)
    hash(new)
    target[new] = target.pop(key)


def _key(target: Any, change: Change) -> Any:
    keys = list(target) if isinstance(target, dict) else range(len(target))
    return keys[change.place % len(keys)]


def _reorder(target: Any, change: Change) -> None:
    for key in sorted(target, reverse=True):
        target[key] = target.pop(key)


def _replace_attribute(target: Any, change: Change) -> None:
    attributes = vars(target)
    name = _key(attributes, change)
    # This also works for frozen classes.
    object.__setattr__(target, name, _instead_of(attributes[name], change))


def _overwrite(target: np.ndarray, change: Change) -> None:
    target[...] = target == 0


_WAYS: dict[Any, list[_Way]] = {
    list: [
        _replace_item,
        lambda target, change: target.append(target[0]),
        lambda target, change: target.pop(),
        lambda target, change: target.reverse(),
    ],
    dict: [
        _replace_item,
        _replace_key,
        _reorder,
        lambda target, change: target.update(new=change.value()),
        lambda target, change: target.popitem(),
    ],
    eqx.Module: [
        _replace_attribute,
        lambda target, change: object.__delattr__(target, _key(vars(target), change)),
        lambda target, change: object.__setattr__(target, "not_a_field", change.value()),
        lambda target, change: object.__setattr__(target, "__doc__", "A docstring of its own."),
    ],
    (nodes.FlaxState, nodes.Bag, nodes.Record, nodes.StaticNode, nodes.Settings): [
        _replace_attribute
    ],
    set: [lambda target, change: target.add(change.value())],
    np.ndarray: [_overwrite],
    # This makes the old state outdated.
    eqx.nn.State: [lambda target, change: target.update(target.substate(()))],
}
