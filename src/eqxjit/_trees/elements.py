"""The elements of static containers: how each kind is read, and a key of what is nested deeply."""

import collections
import functools
import types
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np
from jax.tree_util import all_leaves, tree_flatten, tree_structure

from .._compat import ArrayImpl, fields_of, treedef_rows
from .constants import CONSTANTS
from .modules import dynamic_fields, keeps_fields_plainly
from .static_key import fields_values, iterated, keyed_fields, looked_into_as, typed_key

#: Containers in containers down to here are looked into; upstream's `==` gets no further.
DEEPEST = 1_000


# The ways in which `Held` reads, in the order of `_native.c`.
_ITEMS, _ITERATED, _ENTRIES, _COPIED, _FIELD_DICT, ATTRIBUTES = range(6)


class Reading(NamedTuple):
    """The way to read all that the `==` of a container compares: in Python, and by `Held` in C.

    - `read`: returns the elements.
    - `op`: which of the ways above; None where C can't.
    - `native_cost`, `cost`: as many items of a list take as long as an element, in C, in Python.
    - `names`: the attributes to read.
    """

    read: Callable[[Any], list[Any]]
    op: int | None = None
    native_cost: int = 0
    cost: float = 1.0
    names: tuple[str, ...] = ()


def _items(value: tuple[Any, ...]) -> list[Any]:
    return [*tuple.__iter__(value)]


def _pairs(value: dict[Any, Any]) -> list[Any]:
    return [*dict.keys(value), *dict.values(value)]


def _default_dict(value: collections.defaultdict[Any, Any]) -> list[Any]:
    return [*_pairs(value), value.default_factory]


def _ordered_dict(value: collections.OrderedDict[Any, Any]) -> list[Any]:
    # The dict below doesn't know of those that were moved to an end.
    return [*iterated(collections.OrderedDict.keys, value), *_pairs(value)]


def _deque(value: collections.deque[Any]) -> list[Any]:
    return [*iterated(collections.deque.__iter__, value), value.maxlen]


def _mapping(value: types.MappingProxyType[Any, Any]) -> list[Any]:
    copied = value.copy()
    return _pairs(copied) if type(copied) is dict else [copied]


def _flattened(value: eqx.Module) -> list[Any]:
    leaves, treedef = tree_flatten(value)
    return [treedef, *leaves]


#: Of builtin containers. Their subclasses' own methods have no say.
_READINGS: dict[type, Reading] = {
    tuple: Reading(_items, _ITEMS, 1),
    list: Reading(list.copy, _ITEMS, 1),
    set: Reading(functools.partial(iterated, set.__iter__), _ITERATED, 14, 2),
    frozenset: Reading(functools.partial(iterated, frozenset.__iter__), _ITERATED, 14, 2),
    collections.deque: Reading(_deque),
    # Its keys are read in two orders, of which one is kept in a linked list.
    collections.OrderedDict: Reading(_ordered_dict, cost=2),
    collections.defaultdict: Reading(_default_dict, _ENTRIES, 4, 1.5, ("default_factory",)),
    dict: Reading(_pairs, _ENTRIES, 4, 1.5),
    collections.Counter: Reading(_pairs, _ENTRIES, 4, 1.5),
    types.MappingProxyType: Reading(_mapping, _COPIED, 5, 1.5),
    types.SimpleNamespace: Reading(lambda value: _pairs(vars(value)), _FIELD_DICT, 4, 1.5),
}
_READING_OF_FIELDS = Reading(lambda value: _pairs(fields_of(value)), _FIELD_DICT, 4, 1.5)


def reading_of_class(kind: type) -> Reading | None:
    """Return how to read all that decides on a container's typed key, if it is a container."""
    reading = _READINGS.get(kind)
    if reading is not None:
        return reading
    base = looked_into_as(kind)
    if base is eqx.Module:
        return _READING_OF_FIELDS if keeps_fields_plainly(kind) else None
    if base is set or base is frozenset:
        # C would ask an `__iter__` of its own.
        return Reading(_READINGS[base].read, cost=_READINGS[base].cost)
    if base is not None:
        return _READINGS.get(base)
    names = keyed_fields(kind)
    if names is None:
        return None
    return Reading(lambda value: [*fields_values(value, names)], ATTRIBUTES, 10, names=names)


def reading_of(value: Any) -> Reading | None:
    """Return the reading of a value's class, except where a Module holds nodes of other classes.

    The typed key of a Module flattens those, whatever their own `==` says.
    """
    reading = reading_of_class(type(value))
    if reading is _READING_OF_FIELDS and _holds_other_nodes(value):
        return Reading(_flattened)
    return reading


_NO_NODES = frozenset(
    {
        *(*CONSTANTS, ArrayImpl, np.ndarray),
        *(type, types.FunctionType, types.BuiltinFunctionType),
    }
)

#: How to read the children of nodes whose typed keys are made of nothing else.
_CHILDREN: dict[type, Callable[[Any], Iterable[Any]]] = {
    tuple: iter,
    list: iter,
    dict: dict.values,
    collections.OrderedDict: collections.OrderedDict.values,
    collections.defaultdict: dict.values,
}


def _holds_other_nodes(module: eqx.Module) -> bool:
    """Return whether flattening a Module reads more than the elements of those in it."""
    fields = fields_of(module)
    pending = [fields[name] for name in dynamic_fields(type(module)) if name in fields]
    leaves = {*_NO_NODES}
    seen: dict[int, Any] = {}
    while pending:
        node = pending.pop()
        kind = type(node)
        if kind in leaves or id(node) in seen:
            continue
        seen[id(node)] = node
        children = _CHILDREN.get(kind)
        if children is not None:
            below = iterated(children, node)
            # Mostly all are.
            if not leaves.issuperset(map(type, below)):
                pending += below
        elif looked_into_as(kind) is eqx.Module:
            # It is asked for itself.
            continue
        elif all_leaves([node]):
            leaves.add(kind)
        elif reading_of_class(kind) is _READINGS[tuple] and _is_unregistered(node):
            pending += _items(node)
        else:
            return True
    return False


def _is_unregistered(node: Any) -> bool:
    """Return whether JAX knows a node's class for a named tuple only."""
    *_, root = treedef_rows(tree_structure(node, is_leaf=lambda part: part is not node))
    return root[3] is None


def whole_key(value: Any) -> Hashable:
    """Return the typed static key of a value; a flat one where it is nested too deeply for that.

    **Raises:**

    - `RecursionError`, if it contains itself, or is nested deeper than `DEEPEST`.
    - Whatever the `__hash__` or the `__eq__` of a user's class raises.
    """
    try:
        return typed_key(value)
    except RecursionError:
        # That, and comparing nested keys, takes several of Python's frames for each level.
        return _flat_key(value)


def _flat_key(value: Any) -> Hashable:
    key: list[Hashable] = [_flat_key]

    def elements_of(part: Any) -> list[Any]:
        kind = type(part)
        # Those of a set have no order.
        is_set = issubclass(kind, (set, frozenset)) and len(part) > 1
        reading = None if is_set else reading_of(part)
        if reading is None:
            key.append(typed_key(part))
            return []
        elements = reading.read(part)
        key.extend((kind, len(elements)))
        return elements

    walk(value, elements_of)
    return tuple(key)


def walk(value: Any, elements_of: Callable[[Any], Iterable[Any]]) -> None:
    """Call a function for a value, and for each of the elements that it returns, in pre-order.

    **Raises:**

    - `RecursionError`, if they are nested deeper than `DEEPEST`.
    """
    pending = [iter(elements_of(value))]
    while pending:
        for element in pending[-1]:
            elements = elements_of(element)
            if elements:
                pending.append(iter(elements))
                if len(pending) > DEEPEST:
                    raise RecursionError
                break
        else:
            pending.pop()
