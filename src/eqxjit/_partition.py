"""Splits a pytree into its dynamic leaves (arrays, traced) and its static half (with a key)."""

import collections
import dataclasses
from collections.abc import Collection, Hashable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import tree_flatten, tree_unflatten

from ._compat import ArrayImpl, PyTreeDef, fields_of
from ._key_cache import static_key, treedef_key


class _Dynamic:
    """Stands in the static half where an array was."""

    def __repr__(self) -> str:
        return "<array>"


DYNAMIC = _Dynamic()

# JAX sorts their keys.
SORTED_DICTS = (dict, collections.defaultdict)

NUMPY_SCALARS = frozenset(np.sctypeDict.values())

# The classes of most arrays: to ask `equinox.is_array` takes five times as long.
_ARRAY_TYPES = frozenset({ArrayImpl, np.ndarray}) | NUMPY_SCALARS

# What most leaves are.
_CHILDLESS = _ARRAY_TYPES | {int, str, bool, float, type(None)}

# More nesting than any model has, and far less than the interpreter's recursion limit.
_SUSPICIOUS_DEPTH = 200


class StaticHalf(NamedTuple):
    """What is left of a pytree without its arrays.

    - `treedef`: its structure.
    - `leaves`: its leaves, with `DYNAMIC` in the place of each array.
    - `key`: the typed static key of both.
    """

    treedef: PyTreeDef
    leaves: tuple[Any, ...]
    key: Hashable

    @property
    def current_key(self) -> Hashable:
        """The key that it has now: static objects may have been changed in place."""
        return _key(self.treedef, self.leaves)

    @property
    def n_arrays(self) -> int:
        """How many arrays are missing."""
        # By identity: a static leaf's own `==` may say anything.
        return sum([leaf is DYNAMIC for leaf in self.leaves])

    def combine(self, dynamic: Any) -> Any:
        """The pytree that has these arrays; the reverse of `partition`."""
        arrays = iter(dynamic)
        leaves = [next(arrays) if leaf is DYNAMIC else leaf for leaf in self.leaves]
        return tree_unflatten(self.treedef, leaves)


class CyclicPytree(ValueError):
    """A pytree contains itself; `cycle` is the node that does."""

    def __init__(self, cycle: Any):
        super().__init__("a pytree contains itself")
        self.cycle = cycle


def is_array_leaf(leaf: Any) -> bool:
    """Return what `equinox.is_array` does, faster."""
    return type(leaf) in _ARRAY_TYPES or eqx.is_array(leaf)


def has_tracers(leaves: Collection[Any]) -> bool:
    """Whether some transformation passes its tracers in the place of arrays."""
    return any(isinstance(leaf, Tracer) for leaf in leaves)


def partition(pytree: Any) -> tuple[list[Any], StaticHalf]:
    """Splits a pytree by `equinox.is_array`.

    **Arguments:**

    - `pytree`: any pytree.

    **Returns:**

    Its arrays, in the order of `jax.tree_util.tree_flatten`, and its `StaticHalf`.

    **Raises:**

    - `CyclicPytree`, if it contains itself.
    - `TypeError`, if a static leaf can't be hashed.
    - Whatever flattening a custom node, or the `__hash__` of a static value, raises.
    """
    check_tree(pytree)
    leaves, treedef = tree_flatten(pytree)
    dynamic, static = split_leaves(leaves)
    return dynamic, StaticHalf(treedef, static, _key(treedef, static))


def _key(treedef: PyTreeDef, leaves: Iterable[Any]) -> Hashable:
    return (treedef_key(treedef), tuple([_leaf_key(leaf) for leaf in leaves]))


def with_structs_as_arrays(leaves: list[Any], static: StaticHalf) -> tuple[list[Any], StaticHalf]:
    """Takes each `jax.ShapeDtypeStruct` among the static leaves for an array, which it stands for.

    **Raises:**

    - `TypeError`, for one that has no array to stand for.
    """
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
    return leaves, StaticHalf(static.treedef, kept, _key(static.treedef, kept))


def _canonical(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The same with the dtype that an array of it has: without x64, float64 becomes float32."""
    if jnp.issubdtype(struct.dtype, jax.dtypes.extended):
        raise TypeError(f"Pass an array instead of {struct}: its dtype is JAX's own.")
    return struct.update(dtype=jax.dtypes.canonicalize_dtype(struct.dtype))


def split_leaves(leaves: list[Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """The arrays among the leaves, and all leaves with `DYNAMIC` in the place of each array."""
    dynamic = [leaf for leaf in leaves if is_array_leaf(leaf)]
    if len(dynamic) == len(leaves):
        return dynamic, (DYNAMIC,) * len(leaves)
    return dynamic, tuple([DYNAMIC if is_array_leaf(leaf) else leaf for leaf in leaves])


def _leaf_key(leaf: Any) -> Hashable:
    if leaf is DYNAMIC:
        return DYNAMIC
    # Upstream refuses what can't be hashed, and so it can't be changed unseen after the call.
    hash(leaf)
    return static_key(leaf)


def check_tree(pytree: Any) -> None:
    """Raises where flattening a pytree would harm the interpreter.

    When JAX's `tree_flatten` raises, it doesn't give back the recursion depth that it took (jaxlib
    0.10.2). For a pytree that contains itself that is all there is; for a dict whose keys can't be
    sorted, as much as it is deep, each time.

    **Raises:**

    - `CyclicPytree`, or the `TypeError` of sorting a dict's keys.
    """
    if _is_suspicious(pytree):
        _check_closely(pytree)


def _is_suspicious(pytree: Any) -> bool:
    """Whether a pytree is very deep or has dicts of mixed keys, static fields included."""
    # Depth first, or what contains itself twice would double with each level.
    pending: list[tuple[Collection[Any], int]] = [((pytree,), 0)]
    while pending:
        nodes, depth = pending.pop()
        if depth > _SUSPICIOUS_DEPTH:
            return True
        for node in nodes:
            kind = type(node)
            if kind in _CHILDLESS:
                continue
            if kind in SORTED_DICTS and len({*map(type, node)}) > 1:
                return True
            is_module = issubclass(kind, eqx.Module)
            # Not asked whether there are any: a static value's class may refuse to say.
            pending.append((fields_of(node).values() if is_module else _items(node), depth + 1))
    return False


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
        is_module = issubclass(type(node), eqx.Module)
        ancestors.add(id(node))
        pending.append((node, False))
        children = _dynamic_fields(node) if is_module else _items(node)
        pending.extend((child, True) for child in children)


def _dynamic_fields(module: Any) -> list[Any]:
    values = fields_of(module)
    return [
        values[field.name]
        for field in dataclasses.fields(module)
        if field.name in values and not field.metadata.get("static", False)
    ]


def _items(node: Any) -> Collection[Any]:
    if issubclass(type(node), (tuple, list)):
        return node
    if issubclass(type(node), dict):
        return node.values()
    return ()
