"""Which array of a pytree is where in a `Packed`, and all that is static about it: one object.

Layouts are interned: pytrees that may serve the same compiled program have the very same one, so
that comparing two `Packed` compares two addresses, however large the trees are.
"""

import collections
import dataclasses
import math
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
from jax.core import Tracer
from jax.tree_util import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

from .._code.text import array_text, short
from .._compat import PyTreeDef, fields_of, flatten_one_level, is_sharded_aval
from .._interruptions import Lock
from .._spec.static import freeze, register_reader
from .._spec.tree import is_array
from .._spec.tree import split as split_tree
from .buffers import Shape, is_computable, is_key, join, key_data_shape, split

# With more, differentiating and compiling takes longer, and a call is hardly faster.
MAX_LEAVES_PER_BUFFER = 24

_SHOWN = 12

_KEY_DATA = np.dtype(np.uint32)


@dataclasses.dataclass(frozen=True)
class LeafType:
    """The abstract value of an array, weak type aside.

    - `impl`: how the random numbers of typed keys are made; None for all other arrays.
    """

    shape: Shape
    dtype: Any
    impl: Any = None

    @classmethod
    def of(cls, leaf: Any) -> "LeafType":
        """Return the type that an array has inside a jitted function."""
        dtype = leaf.dtype
        if is_key(leaf):
            return cls(leaf.shape, dtype, jr.key_impl(leaf))
        if is_computable(dtype):
            # A NumPy array of 64 bits becomes one of 32, unless JAX has x64 switched on.
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return cls(leaf.shape, dtype)

    @property
    def buffer_dtype(self) -> Any:
        return self.dtype if self.impl is None else _KEY_DATA

    @property
    def buffer_shape(self) -> Shape:
        return self.shape if self.impl is None else self.shape + key_data_shape(self.impl)

    @property
    def n_bytes(self) -> int:
        return math.prod(self.buffer_shape) * self.buffer_dtype.itemsize

    def __str__(self) -> str:
        return array_text(self.dtype, self.shape)


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of an array of the tree.

    - `type`: that of the array.
    - `array`: which of the arrays of a `Packed` holds it.
    - `row`: its place in that buffer; None where the array is the leaf itself.
    """

    type: LeafType
    array: int
    row: int | None


class Layout:
    """A pytree without its arrays, and where in a `Packed` these are. Equal to itself alone.

    - `treedef`, `leaves`: the pytree, with a `Slot` in the place of each array.
    - `members`: for each array of a `Packed`, the indices of the leaves in it.
    - `content`: its key, under which it is interned.
    """

    def __init__(self, treedef: PyTreeDef, leaves: tuple[Any, ...], content: "_Content"):
        self.treedef = treedef
        self.leaves = leaves
        self.content = content
        by_array: dict[int, list[int]] = collections.defaultdict(list)
        for index, slot in self.slots():
            by_array[slot.array].append(index)
        self.members = tuple([tuple(by_array[array]) for array in range(len(by_array))])

    def slots(self) -> Iterator[tuple[int, Slot]]:
        """Yield the index of each array among the leaves, and its slot."""
        return ((i, leaf) for i, leaf in enumerate(self.leaves) if type(leaf) is Slot)

    def __copy__(self) -> "Layout":
        return self

    def __deepcopy__(self, memo: Any) -> "Layout":
        # Nothing in it can change, and what is compared by identity would have to be traced anew.
        return self

    @property
    def _skeleton(self) -> Any:
        return tree_unflatten(self.treedef, self.leaves)

    def __reduce__(self) -> Any:
        return (_from_skeleton, (self._skeleton,))

    def __repr__(self) -> str:
        # JAX's errors show it for two structures that differ.
        types = [str(slot.type) for _, slot in self.slots()]
        shown = types[:_SHOWN] + ["..."] * (len(types) > _SHOWN)
        return f"<layout of {len(types)} arrays: {', '.join(shown)}>"

    def has_attribute(self, name: str) -> bool:
        """Return whether a node or a static leaf of the pytree has an attribute of this name."""
        nodes = tree_leaves(self._skeleton, is_leaf=lambda node: hasattr(node, name))
        return any(hasattr(node, name) for node in nodes)

    def gather(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arrays of a `Packed`, from the leaves of a tree; None for those that are."""
        arrays = []
        for indices in self.members:
            slot = self.leaves[indices[0]]
            found = [leaves[index] for index in indices]
            is_whole = slot.row is None or found[0] is None
            arrays.append(found[0] if is_whole else join(found, slot.type.buffer_dtype))
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
        if slots[0].row is None or array is None:
            return [array] * len(slots)
        if not is_array(array):
            raise TypeError(
                f"`unpack` takes apart arrays; this `Packed` holds {short(array)} in place of "
                "one. A function that is mapped over it (`jax.tree.map`) gives one value for all "
                "leaves of a buffer."
            )
        shapes = tuple([slot.type.buffer_shape for slot in slots])
        size = sum(map(math.prod, shapes))
        if array.shape[-1:] != (size,):
            raise ValueError(
                f"`unpack` takes apart arrays whose last axis has the length that was packed, "
                f"{size}; this `Packed` holds one of shape {array.shape}."
            )
        return [
            jr.wrap_key_data(part, impl=slot.type.impl)
            if slot.type.impl is not None and array.dtype == _KEY_DATA
            else part
            for slot, part in zip(slots, split(array, shapes), strict=True)
        ]

    def check(self, leaves: Sequence[Any], treedef: PyTreeDef) -> None:
        """Raise where a tree has another layout, and say where."""
        expected = [leaf.type if type(leaf) is Slot else leaf for leaf in self.leaves]
        found = [LeafType.of(leaf) if is_array(leaf) else leaf for leaf in leaves]
        if _content_spec(treedef, found) == _content_spec(self.treedef, expected):
            return
        path, old, new = _difference(
            "tree", tree_unflatten(self.treedef, expected), tree_unflatten(treedef, found)
        ) or ("tree", "one", "another")
        raise ValueError(
            "`repack` takes a tree of the same structure, shapes and dtypes as the one that was "
            f"packed. There, `{path}` was {old}; here, it is {new}. Pack the tree anew with "
            "`eqxjit.pack` if that is meant."
        )


# --- Interning --------------------------------------------------------------------------------


class _Content:
    """The key of a layout: the spec of the pytree, with a `Slot` for each array.

    Interned, so that two of the same tree are one object, which compares by its address.
    """

    __slots__ = ("__weakref__", "_hash", "frozen")

    def __init__(self, frozen: Hashable):
        self.frozen = frozen
        self._hash = hash(frozen)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Content) and other.frozen == self.frozen)


# Layouts by their content. Weak on both sides: entries of jitted functions hold the content.
_contents: weakref.WeakValueDictionary[_Content, _Content] = weakref.WeakValueDictionary()
_layouts: weakref.WeakValueDictionary[_Content, Layout] = weakref.WeakValueDictionary()
_interning = Lock()

register_reader(Layout, lambda layout: layout.content)


def _interned(treedef: PyTreeDef, leaves: tuple[Any, ...]) -> Layout:
    with _interning:
        content = _Content(_content_spec(treedef, leaves))
        content = _contents.setdefault(content, content)
        layout = _layouts.get(content)
        if layout is None:
            layout = _layouts[content] = Layout(treedef, leaves, content)
        return layout


def _from_skeleton(skeleton: Any) -> Layout:
    leaves, treedef = tree_flatten(skeleton)
    return _interned(treedef, tuple(leaves))


def _content_spec(treedef: PyTreeDef, leaves: Iterable[Any]) -> Hashable:
    return split_tree(tree_unflatten(treedef, leaves))[0]


# --- Choosing ---------------------------------------------------------------------------------


def layout_of(leaves: Sequence[Any], treedef: PyTreeDef, max_leaf_bytes: int) -> Layout:
    """Return the layout in which leaves up to a size share buffers."""
    types = {index: LeafType.of(leaf) for index, leaf in enumerate(leaves) if is_array(leaf)}
    places = {index: _place(leaves[index]) for index in types}
    # Most of them; what isn't anywhere yet follows.
    counts = collections.Counter([p for p in places.values() if p not in (_ANYWHERE, _APART)])
    most = [place for place, _ in counts.most_common(1)]
    by_dtype: dict[Any, list[int]] = {}
    groups: list[list[int]] = []
    for index, kind in types.items():
        if (
            places[index] in (_ANYWHERE, *most)
            and (kind.impl is not None or is_computable(kind.dtype))
            and kind.n_bytes <= max_leaf_bytes
        ):
            by_dtype.setdefault(kind.buffer_dtype, []).append(index)
        else:
            groups.append([index])
    shapes = {index: kind.buffer_shape for index, kind in types.items()}
    groups += [group for indices in by_dtype.values() for group in _bounded(indices, shapes)]
    described = list(leaves)
    for array, group in enumerate(sorted(groups)):
        for row, index in enumerate(group):
            described[index] = Slot(types[index], array, row if len(group) > 1 else None)
    return _interned(treedef, tuple(described))


def _bounded(indices: list[int], shapes: Mapping[int, Shape]) -> Iterator[list[int]]:
    """Split what could share a buffer so that buffers of equal layers are alike.

    XLA compiles a computation once for all leaves that have the same shape and the same offset.
    """
    if len(indices) <= MAX_LEAVES_PER_BUFFER:
        return iter([indices])
    counts = collections.Counter([shapes[index] for index in indices])
    # What occurs once would shift the offsets of all that follows.
    indices = sorted(indices, key=lambda index: counts[shapes[index]] == 1)
    of = [shapes[index] for index in indices]

    def alike(length: int) -> tuple[int, int, int]:
        pairs = list(zip(of, of[length:], strict=False))
        repeats = sum([one == other for one, other in pairs]) / len(pairs)
        return round(2 * repeats), -math.ceil(len(of) / length), -length

    lengths = range(3 * MAX_LEAVES_PER_BUFFER // 4, MAX_LEAVES_PER_BUFFER + 1)
    length = max(lengths, key=alike)
    return (indices[start : start + length] for start in range(0, len(of), length))


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


# --- Comparing --------------------------------------------------------------------------------

_ABSENT = object()


def _difference(path: str, old: Any, new: Any) -> tuple[str, str, str] | None:
    """Return where two trees differ first, with what is there in each; None if they don't."""
    differs = path, _text(old), _text(new)
    if type(old) is not type(new):
        return differs
    olds, news = _one_level(old), _one_level(new)
    if olds is None or news is None:
        return differs if freeze(old) != freeze(new) else None
    for key in {**olds, **news}:
        found = _difference(path + key, olds.get(key, _ABSENT), news.get(key, _ABSENT))
        if found is not None:
            return found
    _, *metadata = flatten_one_level(old) or ((),)
    _, *others = flatten_one_level(new) or ((),)
    if freeze(metadata) != freeze(others):
        return path, _text(old), "of that type, with other metadata"
    return None


def _one_level(node: Any) -> dict[str, Any] | None:
    """Return the children of a node by their keys, also the static ones of a Module."""
    if isinstance(node, eqx.Module):
        values = fields_of(node)
        names = [field.name for field in dataclasses.fields(type(node))]
        return {f".{name}": values[name] for name in names if name in values}
    keyed, treedef = tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    if treedef.node_data() is None:
        return None
    return {keystr(path): child for path, child in keyed}


def _text(node: Any) -> str:
    if node is _ABSENT:
        return "absent"
    if node is None or isinstance(node, LeafType):
        return str(node)
    return short(node) if _one_level(node) is None else f"of type {type(node).__name__}"
