"""Which array of a pytree is where in a `Packed`, and all that is static about it: one object.

Layouts are interned: pytrees that may serve the same compiled program have the very same one, so
that comparing two `Packed` compares two addresses, however large the trees are.
"""

import collections
import dataclasses
import math
import operator
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.tree_util import tree_flatten, tree_unflatten

from .._code.text import short
from .._compat import PyTreeDef, is_sharded_aval
from .._diagnostics.description import array_text
from .._interruptions import Lock
from .._spec.static import register_reader
from .._spec.tree import children, is_array
from .._spec.tree import split as split_tree

# With more, differentiating and compiling takes longer, and a call is hardly faster.
MAX_LEAVES_PER_BUFFER = 24

_SHOWN = 12

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of an array of the tree.

    - `type`: that of the array inside a jitted function, weak type aside.
    - `array`: which of the arrays of a `Packed` holds it, or is it.
    """

    type: jax.ShapeDtypeStruct
    array: int

    def __str__(self) -> str:
        return array_text(self.type.dtype, self.type.shape)


class Layout:
    """A pytree without its arrays, and where in a `Packed` these are. Equal to itself alone.

    - `treedef`, `leaves`: the pytree, with a `Slot` in the place of each array.
    - `members`: for each array of a `Packed`, the indices of the leaves in it.
    - `spec`: that of the pytree, with a `Slot` for each array.
    """

    def __init__(self, treedef: PyTreeDef, leaves: tuple[Any, ...], spec: Hashable):
        self.treedef = treedef
        self.leaves = leaves
        self.spec = spec
        by_array: dict[int, list[int]] = collections.defaultdict(list)
        for index, slot in self.slots():
            by_array[slot.array].append(index)
        self.members = tuple([tuple(by_array[array]) for array in range(len(by_array))])

    def slots(self) -> Iterator[tuple[int, Slot]]:
        """Yield the index of each array among the leaves, and its slot."""
        return ((i, leaf) for i, leaf in enumerate(self.leaves) if type(leaf) is Slot)

    def __deepcopy__(self, memo: Any) -> "Layout":
        # Nothing in it can change, and what is compared by identity would have to be traced anew.
        return self

    @property
    def skeleton(self) -> Any:
        """The pytree, with a `Slot` in the place of each array."""
        return tree_unflatten(self.treedef, self.leaves)

    def __reduce__(self) -> Any:
        return (_from_skeleton, (self.skeleton,))

    def __repr__(self) -> str:
        # JAX's errors show it for two structures that differ.
        types = [str(slot) for _, slot in self.slots()]
        shown = types[:_SHOWN] + ["..."] * (len(types) > _SHOWN)
        return f"<layout of {len(types)} arrays: {', '.join(shown)}>"

    def gather(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arrays of a `Packed`, from the leaves of a tree; None for those that are."""
        arrays = []
        for first, *others in self.members:
            found = [leaves[first], *[leaves[index] for index in others]]
            is_whole = not others or found[0] is None
            arrays.append(found[0] if is_whole else _join(found, self.leaves[first].type.dtype))
        return tuple(arrays)

    def tree(self, arrays: Sequence[Any]) -> Any:
        """Return the tree of the arrays of a `Packed`, with None where it has None."""
        leaves = list(self.leaves)
        for indices, array in zip(self.members, arrays, strict=True):
            found = self._leaves_in(array, [self.leaves[index] for index in indices])
            for index, leaf in zip(indices, found, strict=True):
                leaves[index] = leaf
        return tree_unflatten(self.treedef, leaves)

    def _leaves_in(self, array: Any, slots: list[Slot]) -> Sequence[Any]:
        if len(slots) == 1 or array is None:
            return [array] * len(slots)
        size = sum([slot.type.size for slot in slots])
        if not is_array(array) or array.shape[-1:] != (size,):
            raise ValueError(
                f"`unpack` takes apart arrays whose last axis has the length that was packed, "
                f"{size}; this `Packed` holds {short(array)} in place of one. A function that is "
                "mapped over it (`jax.tree.map`) gives one value for all leaves of a buffer."
            )
        shapes = tuple([slot.type.shape for slot in slots])
        if array.dtype == jax.dtypes.float0:
            # A gradient with respect to integers.
            return [np.zeros((*array.shape[:-1], *shape), array.dtype) for shape in shapes]
        return _split(array, shapes)

    def check(self, leaves: Sequence[Any], treedef: PyTreeDef) -> None:
        """Raise where a tree has another layout, and say where."""
        expected = [Slot(leaf.type, 0) if type(leaf) is Slot else leaf for leaf in self.leaves]
        found = [Slot(_type_of(leaf), 0) if is_array(leaf) else leaf for leaf in leaves]
        old, new = tree_unflatten(self.treedef, expected), tree_unflatten(treedef, found)
        of_old, of_new = split_tree(old)[0], split_tree(new)[0]
        if of_old != of_new:
            path, was, is_now = _difference("tree", (of_old, old), (of_new, new))
            raise ValueError(
                "`repack` takes a tree of the same structure, shapes and dtypes as the one that "
                f"was packed. There, `{path}` was {was}; here, it is {is_now}. Pack the tree anew "
                "with `eqxjit.pack` if that is meant."
            )


# The spec of what isn't there.
_ABSENT = ..., None


def _difference(path: str, old: tuple[Any, Any], new: tuple[Any, Any]) -> tuple[str, str, str]:
    """Return where two trees, each after its spec, differ first, and what is there in each."""
    if type(old[0]) is type(new[0]) is tuple and old[0][1] is new[0][1]:
        olds, news = (
            {name: (spec, child) for name, spec, child, _ in children(*tree)} for tree in (old, new)
        )
        for name in {**olds, **news}:
            one, other = olds.get(name, _ABSENT), news.get(name, _ABSENT)
            if one[0] != other[0]:
                return _difference(path + name, one, other)
    return path, _text(*old), _text(*new)


def _text(spec: Any, tree: Any) -> str:
    if type(spec) is tuple:
        return f"of type {type(tree).__name__}"
    if type(tree) is Slot:
        return str(tree)
    return "absent" if spec is ... else short(tree)


# --- Interning --------------------------------------------------------------------------------


# By their specs, which entries of jitted functions hold.
_layouts: weakref.WeakValueDictionary[Hashable, Layout] = weakref.WeakValueDictionary()
_interning = Lock()

register_reader(Layout, lambda layout: layout.spec)


def _interned(treedef: PyTreeDef, leaves: tuple[Any, ...]) -> Layout:
    spec = split_tree(tree_unflatten(treedef, leaves))[0]
    with _interning:
        layout = _layouts.get(spec)
        if layout is None:
            layout = _layouts[spec] = Layout(treedef, leaves, spec)
        return layout


def _from_skeleton(skeleton: Any) -> Layout:
    leaves, treedef = tree_flatten(skeleton)
    return _interned(treedef, tuple(leaves))


# --- Choosing ---------------------------------------------------------------------------------


def layout_of(leaves: Sequence[Any], treedef: PyTreeDef, max_leaf_bytes: int) -> Layout:
    """Return the layout in which leaves up to a size share buffers."""
    types = {index: _type_of(leaf) for index, leaf in enumerate(leaves) if is_array(leaf)}
    places = {index: _place(leaves[index]) for index in types}
    counts = collections.Counter([p for p in places.values() if p not in (_ANYWHERE, _APART)])
    # Where most of them are; what isn't anywhere yet follows.
    together = {_ANYWHERE, *[place for place, _ in counts.most_common(1)]}
    by_dtype: dict[Any, list[int]] = collections.defaultdict(list)
    groups: list[list[int]] = []
    for index, kind in types.items():
        is_small = _is_computable(kind.dtype) and kind.size * kind.dtype.itemsize <= max_leaf_bytes
        if is_small and places[index] in together:
            by_dtype[kind.dtype].append(index)
        else:
            groups.append([index])
    groups += [group for indices in by_dtype.values() for group in _bounded(indices, types)]
    described = list(leaves)
    for array, group in enumerate(sorted(groups)):
        for index in group:
            described[index] = Slot(types[index], array)
    return _interned(treedef, tuple(described))


def _bounded(indices: list[int], types: dict[int, jax.ShapeDtypeStruct]) -> Iterator[list[int]]:
    """Split what could share a buffer so that buffers of equal layers are alike.

    XLA compiles a computation once for all leaves that have the same shape and the same offset.
    """
    length = len(indices)
    if length > MAX_LEAVES_PER_BUFFER:
        counts = collections.Counter([types[index].shape for index in indices])
        # What occurs once would shift the offsets of all that follows.
        indices = sorted(indices, key=lambda index: counts[types[index].shape] == 1)
        of = [types[index].shape for index in indices]

        def repeated(length: int) -> tuple[int, int]:
            # In halves, because a longer buffer is worth more than a few repeats.
            n_equal = sum(map(operator.eq, of, of[length:]))
            return round(2 * n_equal / (len(of) - length)), length

        lengths = range(3 * MAX_LEAVES_PER_BUFFER // 4, MAX_LEAVES_PER_BUFFER + 1)
        length = max(lengths, key=repeated)
    return (indices[i : i + length] for i in range(0, len(indices), length))


def _type_of(leaf: Any) -> jax.ShapeDtypeStruct:
    # A NumPy array of 64 bits becomes one of 32, unless JAX has x64 switched on.
    computable = _is_computable(leaf.dtype)
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype) if computable else leaf.dtype
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


def _is_computable(dtype: Any) -> bool:
    """Return whether JAX computes with a dtype: not with text or dates, nor with typed keys."""
    return isinstance(dtype, np.dtype) and (dtype.kind == "b" or jnp.issubdtype(dtype, jnp.number))


# Where an array is, if not on a device: on none yet, or where it can't share a buffer.
_ANYWHERE = "anywhere"
_APART = "apart"


def _place(leaf: Any) -> Hashable:
    if isinstance(leaf, Tracer):
        return _APART if is_sharded_aval(jax.typeof(leaf)) else _ANYWHERE
    if not isinstance(leaf, jax.Array):
        return _ANYWHERE
    sharding = leaf.sharding
    if not isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return _APART
    return (*sharding.device_set, sharding.memory_kind)


# --- Buffers ----------------------------------------------------------------------------------


def _join(leaves: Sequence[Any], dtype: np.dtype) -> jax.Array:
    """Return one flat array of this dtype, strongly typed, with the elements of all leaves."""
    # In a trace not as a separate program, through which XLA and JAX's transpose don't look.
    is_traced = any(isinstance(leaf, Tracer) for leaf in leaves)
    return (_concatenate if is_traced else _jitted_concatenate)(leaves, dtype)


def _split(buffer: Any, shapes: tuple[Shape, ...]) -> list[jax.Array]:
    """Return the arrays of which a buffer was made; its leading axes, if any, are theirs, too."""
    return (_take_apart if isinstance(buffer, Tracer) else _jitted_take_apart)(buffer, shapes)


def _concatenate(leaves: Sequence[Any], dtype: np.dtype) -> jax.Array:
    flat = [lax.convert_element_type(lax.reshape(leaf, (leaf.size,)), dtype) for leaf in leaves]
    return lax.concatenate(flat, 0)


def _take_apart(buffer: Any, shapes: tuple[Shape, ...]) -> list[jax.Array]:
    # Not by indexing, whose transpose is a sum of as many arrays as there are leaves, each as long
    # as the whole buffer: that of `lax.split` is one concatenation.
    *leading, _ = buffer.shape
    parts = lax.split(buffer, [math.prod(shape) for shape in shapes], axis=len(leading))
    pairs = zip(parts, shapes, strict=True)
    return [lax.reshape(part, (*leading, *shape)) for part, shape in pairs]


_jitted_concatenate = jax.jit(_concatenate, static_argnums=1)
_jitted_take_apart = jax.jit(_take_apart, static_argnums=1)
