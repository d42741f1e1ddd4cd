"""Splits a pytree into its dynamic leaves (arrays, traced) and its static half (with a key)."""

import collections
import itertools
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import tree_flatten, tree_unflatten

from .._compat import ArrayImpl, PyTreeDef, TreedefColumns, fields_of
from .constants import CONSTANTS, constants_key, is_constant
from .key_cache import CONSTANT_METADATA, TracedObjects, columns_key, columns_of, static_key
from .modules import dynamic_fields, is_module_class
from .static_key import identity_suffices


class _Dynamic:
    """The type of `DYNAMIC`, which stands in the static half where an array was."""

    def __repr__(self) -> str:
        return "<array>"


DYNAMIC = _Dynamic()

_KEYED_TOGETHER = CONSTANTS | {_Dynamic}

_HOLDING_NOTHING = CONSTANT_METADATA | {_Dynamic}

# JAX sorts their keys.
SORTED_DICTS = (dict, collections.defaultdict)

NUMPY_SCALARS = frozenset(np.sctypeDict.values())

# The classes of most arrays: to ask `equinox.is_array` takes five times as long.
_ARRAY_TYPES = frozenset({ArrayImpl, np.ndarray}) | NUMPY_SCALARS

# What most leaves are.
_ONLY_ARRAYS = frozenset({ArrayImpl})
_CHILDLESS = _ARRAY_TYPES | CONSTANTS | {types.FunctionType, type}

# So many are only looked through a second time if there are as many, or they go in a circle.
_SUSPICIOUS_NODES = 100_000

# From so many children on, all are asked for their types at once.
_FEW = 8


class StaticTree:
    """A pytree without its arrays.

    - `treedef`: its structure.
    - `leaves`: its leaves, with `DYNAMIC` in the place of each array.
    - `traced`: the large static objects whose keys are told by identity; None if there are none.
    """

    __slots__ = ("__weakref__", "_changeable", "_columns", "_key", "leaves", "traced", "treedef")

    def __init__(
        self,
        treedef: PyTreeDef,
        leaves: tuple[Any, ...],
        key: Hashable = None,
        traced: TracedObjects | None = None,
    ):
        self.treedef = treedef
        self.leaves = leaves
        self._key = key
        self._columns: TreedefColumns | None = None
        self._changeable: list[Any] | None = None
        self.traced = traced

    @property
    def columns(self) -> TreedefColumns:
        """The rows of the treedef, by column; they are read once."""
        if self._columns is None:
            self._columns = columns_of(self.treedef)
        return self._columns

    @property
    def metadata(self) -> Iterator[Any]:
        """The static objects in its nodes, but for the keys of dicts."""
        _, _, metadata, classes = self.columns
        for data, cls in zip(metadata, classes, strict=True):
            if cls is not None and cls is not dict:
                yield from data if type(data) is tuple else (data,)

    @property
    def key(self) -> Hashable:
        """The typed static key of both, as it was when it was first asked for."""
        if self._key is None:
            self._key = self._make_key(self.traced or None)
        return self._key

    def _make_key(self, traced: TracedObjects | None = None) -> Hashable:
        key = constants_key(self.leaves, _KEYED_TOGETHER) or self._key_of_each(traced)
        return (columns_key(self.columns, traced), key)

    def _key_of_each(self, traced: TracedObjects | None) -> Hashable:
        # Many are one object, such as the function of each layer.
        distinct = {id(leaf): leaf for leaf in self.leaves}
        keys = {address: _leaf_key(leaf, traced) for address, leaf in distinct.items()}
        return tuple([keys[id(leaf)] for leaf in self.leaves])

    def prepare_trace(self) -> None:
        """Make the key anew where identity stood for some of it, and note what is traced."""
        if self.traced is not None:
            if self.traced:
                self._key = self.current_key
            self.traced.add(itertools.chain(self.leaves, self.metadata))

    @property
    def current_key(self) -> Hashable:
        """The key that it has now: static objects may have been changed in place."""
        return self._make_key()

    @property
    def changeable(self) -> list[Any]:
        """The static objects in it that can be changed in place, as often as they are there."""
        if self._changeable is None:
            leaves = () if {*map(type, self.leaves)} <= _KEYED_TOGETHER else self.leaves
            values = [v for v in (*self.metadata, *leaves) if type(v) not in _KEYED_TOGETHER]
            distinct = {id(value): value for value in values}
            found = {key for key, value in distinct.items() if not identity_suffices(value)}
            self._changeable = [value for value in values if id(value) in found] if found else []
        return self._changeable

    def holds_only(self, may_hold: Callable[[Any], bool]) -> bool:
        """Return whether it holds constants, tuples of them, and what `may_hold` says alone."""
        _, _, metadata, classes = self.columns
        pending: list[Any] = [self.leaves]
        for data, cls in zip(metadata, classes, strict=True):
            if data is not None:
                is_dict = type(data) is list and (cls is None or cls is dict)
                pending.append(tuple(data) if is_dict else data)
        while pending:
            value = pending.pop()
            if type(value) in _HOLDING_NOTHING or is_constant(value):
                continue
            if type(value) is tuple:
                if not {*map(type, value)} <= _HOLDING_NOTHING:
                    pending += [item for item in value if type(item) not in _HOLDING_NOTHING]
            elif not may_hold(value):
                return False
        return True

    def still_has(self, key: Hashable) -> bool:
        """Return whether it has a key, which it had once: static objects may have been changed."""
        return not self.changeable or self._make_key(self.traced or None) == key

    @property
    def n_arrays(self) -> int:
        """The number of arrays that are left out."""
        # By identity: a static leaf's own `==` may say anything.
        return sum([leaf is DYNAMIC for leaf in self.leaves])

    def combine(self, dynamic: Any) -> Any:
        """Return the pytree that has these arrays; the reverse of `partition`."""
        return tree_unflatten(self.treedef, with_arrays(self.leaves, dynamic))


def with_arrays(static: tuple[Any, ...], arrays: Iterable[Any]) -> list[Any]:
    """Return leaves with an array in the place of each `DYNAMIC`."""
    remaining = iter(arrays)
    return [next(remaining) if leaf is DYNAMIC else leaf for leaf in static]


class CyclicPytree(ValueError):
    """A pytree contains itself; `cycle` is the node that does."""

    def __init__(self, cycle: Any):
        super().__init__("a pytree contains itself")
        self.cycle = cycle


def is_array_leaf(leaf: Any) -> bool:
    """Return what `equinox.is_array` does, faster."""
    return type(leaf) in _ARRAY_TYPES or eqx.is_array(leaf)


def has_tracers(leaves: Collection[Any]) -> bool:
    """Return whether some transformation passes its tracers in the place of arrays."""
    return not {*map(type, leaves)} <= _ARRAY_TYPES and any(
        isinstance(leaf, Tracer) for leaf in leaves
    )


def partition(pytree: Any, traced: TracedObjects | None = None) -> tuple[list[Any], StaticTree]:
    """Split a pytree into its arrays, as `equinox.is_array` has it, and its `StaticTree`.

    Raises as `check_tree` does; that tree's `key` may raise what hashing a static value raises.
    """
    check_tree(pytree)
    leaves, treedef = tree_flatten(pytree)
    dynamic, static = split_leaves(leaves)
    return dynamic, StaticTree(treedef, static, None, traced)


def with_structs_as_arrays(leaves: list[Any], static: StaticTree) -> tuple[list[Any], StaticTree]:
    """Take each `jax.ShapeDtypeStruct` among the static leaves for the array that it stands for."""
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in static.leaves):
        return leaves, static
    arrays = iter(leaves)
    leaves = [
        next(arrays) if leaf is DYNAMIC else _canonical(leaf)
        for leaf in static.leaves
        if leaf is DYNAMIC or isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    kept = tuple(
        [DYNAMIC if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in static.leaves]
    )
    return leaves, StaticTree(static.treedef, kept, None, static.traced)


def _canonical(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the same with the dtype of its arrays: without x64, float32 for float64."""
    if jnp.issubdtype(struct.dtype, jax.dtypes.extended):
        raise TypeError(f"Pass an array instead of {struct}: its dtype is JAX's own.")
    return struct.update(dtype=jax.dtypes.canonicalize_dtype(struct.dtype))


def split_leaves(leaves: list[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """Return the arrays among the leaves, and all leaves with `DYNAMIC` for each array."""
    if {*map(type, leaves)} <= _ONLY_ARRAYS:
        return leaves, (DYNAMIC,) * len(leaves)
    dynamic: list[Any] = []
    static = list(leaves)
    for index in [i for i, leaf in enumerate(leaves) if type(leaf) not in CONSTANTS]:
        if is_array_leaf(leaves[index]):
            dynamic.append(leaves[index])
            static[index] = DYNAMIC
    return dynamic, tuple(static)


def _leaf_key(leaf: Any, traced: TracedObjects | None) -> Hashable:
    if leaf is DYNAMIC:
        return DYNAMIC
    # Upstream refuses what can't be hashed, and so it can't be changed unseen after the call.
    hash(leaf)
    return static_key(leaf, traced)


def check_tree(pytree: Any) -> None:
    """Raise where flattening a pytree would harm the interpreter.

    When JAX's `tree_flatten` raises, it doesn't give back the recursion depth that it took (jaxlib
    0.10.2). For a pytree that contains itself that is all there is; for a dict whose keys can't be
    sorted, as much as it is deep, each time. The error is a `CyclicPytree`, or that of sorting.
    """
    if _is_suspicious(pytree):
        _check_closely(pytree)


def _is_suspicious(pytree: Any) -> bool:
    """Return whether a pytree has very many nodes, or dicts of mixed keys."""
    # Depth first, or what contains itself twice would double with each level.
    pending: list[Any] = [pytree]
    pop, push = pending.pop, pending.append
    for _ in range(_SUSPICIOUS_NODES):
        if not pending:
            return False
        node = pop()
        kind = type(node)
        children: Collection[Any]
        if kind is tuple or kind is list:
            children = node
        elif kind in SORTED_DICTS:
            if len({*map(type, node)}) > 1:
                return True
            children = node.values()
        elif is_module_class(kind):
            names = dynamic_fields(kind)
            fields = fields_of(node)
            for name in names:
                child = fields.get(name)
                if type(child) not in _CHILDLESS:
                    push(child)
            continue
        else:
            # Not asked how many there are: a static value's class may refuse to say.
            for child in _children(node):
                if type(child) not in _CHILDLESS:
                    push(child)
            continue
        if len(children) > _SUSPICIOUS_NODES - len(pending):
            return True
        if len(children) < _FEW or not {*map(type, children)} <= _CHILDLESS:
            for child in children:
                if type(child) not in _CHILDLESS:
                    push(child)
    return True


def _check_closely(pytree: Any) -> None:
    ancestors: set[int] = set()
    # A node is visited twice: before its children (True) and after them (False).
    pending = [(pytree, True)]
    while pending:
        node, entering = pending.pop()
        if not entering:
            ancestors.discard(id(node))
            continue
        if id(node) in ancestors:
            raise CyclicPytree(node)
        if type(node) in SORTED_DICTS:
            sorted(node)
        ancestors.add(id(node))
        pending.append((node, False))
        pending.extend((child, True) for child in _children(node))


def _children(node: Any) -> Collection[Any]:
    kind = type(node)
    if issubclass(kind, (tuple, list)):
        return node
    if issubclass(kind, dict):
        return node.values()
    if is_module_class(kind):
        values = fields_of(node)
        return [values[name] for name in dynamic_fields(kind) if name in values]
    return ()
