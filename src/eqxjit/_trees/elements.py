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
from .static_key import iterated, keyed_fields, looked_into_as, typed_key

#: Containers in containers down to here are looked into; upstream's `==` gets no further.
DEEPEST = 1_000

#: How to read all that the `==` of a container compares.
Reader = Callable[[Any], list[Any]]


def _items(value: tuple[Any, ...]) -> list[Any]:
    return [*tuple.__iter__(value)]


def _set(value: set[Any]) -> list[Any]:
    return iterated(set.__iter__, value)


def _frozenset(value: frozenset[Any]) -> list[Any]:
    return [*frozenset.__iter__(value)]


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


def _namespace(value: types.SimpleNamespace) -> list[Any]:
    return _pairs(vars(value))


def _fields(value: eqx.Module) -> list[Any]:
    fields = fields_of(value)
    return [*fields, *fields.values()]


def _flattened(value: eqx.Module) -> list[Any]:
    leaves, treedef = tree_flatten(value)
    return [treedef, *leaves]


def _attributes(names: tuple[str, ...], value: Any) -> list[Any]:
    return [getattr(value, name) for name in names]


#: How to read all that the `==` of a builtin container compares. Its subclasses' own methods have
#: no say.
_READERS: dict[type, Reader] = {
    tuple: _items,
    list: list.copy,
    set: _set,
    frozenset: _frozenset,
    collections.deque: _deque,
    collections.OrderedDict: _ordered_dict,
    collections.defaultdict: _default_dict,
    dict: _pairs,
    collections.Counter: _pairs,
    types.MappingProxyType: _mapping,
    types.SimpleNamespace: _namespace,
}


def reader(kind: type) -> Reader | None:
    """Return how to read all that decides on a container's typed key, if it is a container."""
    read = _READERS.get(kind)
    if read is not None:
        return read
    base = looked_into_as(kind)
    if base is eqx.Module:
        return _fields if keeps_fields_plainly(kind) else None
    if base is not None:
        return _READERS.get(base)
    fields = keyed_fields(kind)
    if fields is None:
        return None
    return functools.partial(_attributes, fields)


def reader_of(value: Any) -> Reader | None:
    """Return `reader` of a value's class, except where a Module holds nodes of other classes.

    The typed key of a Module flattens those, whatever their own `==` says.
    """
    read = reader(type(value))
    return _flattened if read is _fields and _holds_other_nodes(value) else read


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
        elif reader(kind) is _items and _is_unregistered(node):
            pending += _items(node)
        else:
            return True
    return False


def _is_unregistered(node: Any) -> bool:
    """Return whether JAX knows a node's class for a named tuple only."""
    *_, root = treedef_rows(tree_structure(node, is_leaf=lambda part: part is not node))
    return root[3] is None


class NativeReading(NamedTuple):
    """The way in which the native back end reads the elements of a container.

    - `op`: the number of it in `_native.c`.
    - `cost`: comparing an element takes as long as comparing so many items of a list.
    - `names`: the attributes to read.
    """

    op: int
    cost: int
    names: tuple[str, ...] = ()


_ITEMS, _ITERATED, _ENTRIES, _COPIED, _FIELD_DICT, _ATTRIBUTES = range(6)

_NATIVE_READINGS: dict[Reader, NativeReading] = {
    _items: NativeReading(_ITEMS, 1),
    list.copy: NativeReading(_ITEMS, 1),
    _pairs: NativeReading(_ENTRIES, 3),
    _default_dict: NativeReading(_ENTRIES, 3, ("default_factory",)),
    _mapping: NativeReading(_COPIED, 5),
    _namespace: NativeReading(_FIELD_DICT, 3),
    _fields: NativeReading(_FIELD_DICT, 3),
}


def native_reading(kind: type, read: Reader) -> NativeReading | None:
    """Return how the native back end reads what `read` does; None where it can't."""
    if isinstance(read, functools.partial):
        return reading_of_attributes(read.args[0])
    if kind is set or kind is frozenset:
        # A subclass may have an `__iter__` of its own.
        return NativeReading(_ITERATED, 6)
    return _NATIVE_READINGS.get(read)


def reading_of_attributes(names: tuple[str, ...]) -> NativeReading:
    """Return the way of reading attributes."""
    return NativeReading(_ATTRIBUTES, 10, names)


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
        read = None if is_set else reader_of(part)
        if read is None:
            key.append(typed_key(part))
            return []
        elements = read(part)
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
