"""Scans a call's arguments: their arrays, and a key by which a structure met before is found again.

One pass, which asks JAX's registry only for nodes that are neither builtin containers nor plain
Modules. For a structure's first call there is `partition`. Objects that compare
by identity stand in the key as their addresses: it says something only while they live, which
whoever keeps one checks by weak references. Meanwhile such keys are equal only where the typed
static keys are.
"""

import functools
import itertools
import operator
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import default_registry

from .._compat import ArrayImpl, fields_of
from .constants import CONSTANTS, constants_key
from .key_cache import TracedObjects, static_key
from .modules import dynamic_fields, is_module_class, keeps_fields_plainly, static_fields
from .partition import is_array_leaf
from .static_key import is_fixed_dtype
from .structure import is_plain_namedtuple

# Stand in a key for an array, for a sequence of nothing else, for Modules of one class, for dicts
# that have the same keys, and for dicts of one item in another.
_ARRAY, _ARRAYS, _MODULES, _DICTS, _CHAIN = "array", "arrays", "modules", "dicts", "chain"

_ONLY_ARRAYS = {ArrayImpl}
_ONLY_STRINGS = {str}
_ONLY_DICTS = {dict}

# Static containers of several Modules that are put into a key by their elements.
_KEYED_TOGETHER = frozenset({tuple, list, dict})

# Values that are equal exactly if they are the same, given their types.
_BY_VALUE = frozenset({int, str, bytes, bool, type(None)})

# Leaves that are no node, and no array.
_LEAVES = frozenset(
    {float, complex, type, types.FunctionType, types.BuiltinFunctionType, type(jax.jit(max))}
)

# From so many items on, a sequence is asked whether all are alike.
_FEW = 8

# Tuples nested in tuples more deeply than this have a flat key.
_DEEPEST_MARK = 50

#: More of them may go in a circle, unless there have been as many before.
MAX_NODES = 100_000


class Scanned(NamedTuple):
    """The result of a scan.

    - `arrays`: in the order of `jax.tree_util.tree_flatten`.
    - `key`: equal only for structures of which one may stand for the other.
    - `known_by_address`: the objects that stand in the key as their addresses.
    """

    arrays: list[Any]
    key: Hashable
    known_by_address: list[Any]


def scan(
    pytree: Any, traced: TracedObjects | None = None, max_nodes: int = MAX_NODES
) -> Scanned | None:
    """Scan a pytree; None if there is too much in it, or a Module that isn't whole.

    **Arguments:**

    - `pytree`: any pytree.
    - `traced`: the large static objects whose keys are told by identity.
    - `max_nodes`: how many nodes are not too many.

    Raises what the `__hash__` or the `__eq__` of a static value raises.
    """
    traced = traced or None
    arrays: list[Any] = []
    key: list[Hashable] = []
    known_by_address: list[Any] = []
    pending = [pytree]
    pop, note, take = pending.pop, key.append, arrays.append
    for _ in range(max_nodes + 1):
        if not pending:
            return Scanned(arrays, tuple(key), known_by_address)
        node = pop()
        cls = type(node)
        if cls is ArrayImpl:
            take(node)
            note(_ARRAY)
        elif cls is tuple or cls is list:
            size = len(node)
            if size == 1:
                # Mostly in another one.
                depth, node = 1, node[0]
                while type(node) is cls and len(node) == 1 and depth < max_nodes:
                    depth, node = depth + 1, node[0]
                if depth == max_nodes:
                    return None
                key += (cls, -depth)
                pending.append(node)
                continue
            key += (cls, size)
            if len(pending) + size > max_nodes:
                return None
            if size < _FEW:
                pending += node[::-1]
            elif (kinds := {*map(type, node)}) == _ONLY_ARRAYS:
                arrays += node
                note(_ARRAYS)
            elif kinds <= CONSTANTS:
                note(constants_key(tuple(node)))
            elif kinds == _ONLY_DICTS and (labels := _common_labels(node)):
                if len(pending) + size * len(labels) > max_nodes:
                    return None
                # Not by rows: so many tuples would have garbage collected.
                columns = [tuple(map(operator.itemgetter(label), node[::-1])) for label in labels]
                marks = [constants_key(column) for column in columns]
                key += (_DICTS, tuple(labels), *marks)
                rest = [column for column, mark in zip(columns, marks, strict=True) if not mark]
                children = [*itertools.chain.from_iterable(zip(*rest, strict=True))]
                _add_children(children, arrays, key, pending)
            elif (
                len(kinds) == 1
                and is_module_class(kind := kinds.pop())
                and (layout := _layout_of(kind)) is not None
            ):
                fields = [*map(fields_of, node)]
                if {*map(len, fields)} != {layout.size}:
                    return None
                columns = zip(*map(layout.static, fields), strict=True)
                marks = [_column_mark(column, known_by_address, traced) for column in columns]
                key += (_MODULES, kind, *marks)
                children = [*itertools.chain.from_iterable(map(layout.dynamic, fields[::-1]))]
                _add_children(children, arrays, key, pending)
            else:
                pending += node[::-1]
        elif cls in _BY_VALUE:
            key += (cls, node)
        elif cls in _LEAVES:
            key += (cls, _mark(node, known_by_address, traced))
        elif cls is dict and len(node) == 1 and type(*node) is str:
            labels = []
            while type(node) is dict and len(node) == 1 and len(labels) < max_nodes:
                [label] = node
                if type(label) is not str:
                    break
                labels.append(label)
                node = node[label]
            if len(labels) == max_nodes:
                return None
            key += (_CHAIN, tuple(labels))
            pending.append(node)
        elif cls is dict and {*map(type, node)} <= _ONLY_STRINGS:
            if len(pending) + len(node) > max_nodes:
                return None
            labels = sorted(node, reverse=True)
            key += (dict, tuple(labels))
            pending += map(node.__getitem__, labels)
        elif is_module_class(cls) and (layout := _layout_of(cls)) is not None:
            fields = fields_of(node)
            if len(fields) != layout.size:
                return None
            static = layout.static(fields)
            kinds = tuple(map(type, static))
            if not _BY_VALUE.issuperset(kinds):
                static = tuple([_mark(value, known_by_address, traced) for value in static])
            key += (cls, kinds, static)
            pending += layout.dynamic(fields)
        elif is_plain_namedtuple(cls):
            key += (cls, len(node))
            pending += tuple.__getitem__(node, slice(None, None, -1))
        elif (flat := default_registry.flatten_one_level(node)) is not None:
            children, metadata = [*flat[0]], flat[1]
            if len(pending) + len(children) > max_nodes:
                return None
            mark = _mark(metadata, known_by_address, traced)
            key += (cls, len(children), type(metadata), mark)
            pending += children[::-1]
        elif is_array_leaf(node):
            take(node)
            note(_ARRAY)
        else:
            key += (cls, _mark(node, known_by_address, traced))
    return None


def _add_children(
    children: list[Any], arrays: list[Any], key: list[Hashable], pending: list[Any]
) -> None:
    """Take children, last first, if all are arrays; else leave them to be scanned."""
    if {*map(type, children)} == _ONLY_ARRAYS:
        arrays += children[::-1]
        key.append(_ARRAYS)
    else:
        pending += children


def _common_labels(dicts: Sequence[dict[Any, Any]]) -> list[str]:
    """Return the keys of some dicts, last first, if all have the same; else none."""
    labels = dicts[0].keys()
    if not all(map(labels.__eq__, map(dict.keys, dicts))):
        return []
    # A subclass of `str` is told from it.
    kinds = {*map(type, itertools.chain.from_iterable(dicts))}
    return sorted(labels, reverse=True) if kinds == _ONLY_STRINGS else []


def _mark(
    value: Any, known_by_address: list[Any], traced: TracedObjects | None, depth: int = 0
) -> Hashable:
    """Return what stands in a key for a static value, given its type."""
    kind = type(value)
    if kind in _BY_VALUE or (kind is float and value and value == value):
        return value
    if kind is tuple and len(value) < _FEW and depth < _DEEPEST_MARK:
        of_trace = traced.key_of(value) if traced else None
        if of_trace is not None:
            return of_trace
        kinds = tuple(map(type, value))
        if _BY_VALUE.issuperset(kinds):
            return (kinds, value)
        below = depth + 1
        marks = tuple([_mark(element, known_by_address, traced, below) for element in value])
        return (kinds, marks)
    if kind.__eq__ is not object.__eq__:
        # Their own `==` tells as much as their typed keys.
        return value if is_fixed_dtype(kind) else static_key(value, traced)
    known_by_address.append(value)
    return id(value)


def _column_mark(
    values: tuple[Any, ...], known_by_address: list[Any], traced: TracedObjects | None
) -> Hashable:
    """Return what stands in a key for one static field of several Modules."""
    types = tuple(map(type, values))
    kinds = {*types}
    if kinds <= CONSTANTS:
        return constants_key(values)
    if len(kinds) == 1 and kinds <= _KEYED_TOGETHER:
        # All elements at once, where they are few: a snapshot of each takes longer to compare.
        sizes = tuple(map(len, values))
        if sum(sizes) < _FEW * len(values):
            elements = tuple(itertools.chain.from_iterable(values))
            if kinds == _ONLY_DICTS:
                elements += tuple(itertools.chain.from_iterable(map(dict.values, values)))
            together = constants_key(elements)
            if together is not None:
                return (types[0], sizes, together)
    marks = {id(value): value for value in values}
    for address, value in marks.items():
        marks[address] = _mark(value, known_by_address, traced)
    return (types, tuple([marks[id(value)] for value in values]))


class _Layout(NamedTuple):
    """The fields of a class of Modules.

    - `size`: how many there are.
    - `static`: reads the static ones.
    - `dynamic`: reads the others, last first.
    """

    size: int
    static: Callable[[dict[str, Any]], tuple[Any, ...]]
    dynamic: Callable[[dict[str, Any]], tuple[Any, ...]]


# Of classes of Modules only: the cache would keep others alive.
@functools.lru_cache(maxsize=1024)
def _layout_of(cls: type) -> _Layout | None:
    if not keeps_fields_plainly(cls):
        return None
    static, dynamic = static_fields(cls), dynamic_fields(cls)
    return _Layout(len(static) + len(dynamic), _getter(static), _getter(dynamic[::-1]))


def _getter(names: list[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    if not names:
        return lambda _: ()
    if len(names) == 1:
        [name] = names
        return lambda fields: (fields[name],)
    return operator.itemgetter(*names)
