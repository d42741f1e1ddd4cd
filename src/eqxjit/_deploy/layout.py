"""Which array of a pytree is where in a `Packed`, and all that is static about it: one object."""

import collections
import dataclasses
import functools
import itertools
import math
import textwrap
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from .._compat import is_sharded_aval
from .._diagnostics.description import array_text, describe_trees
from .._diagnostics.differences import differences, listed
from .._interruptions import Lock
from .._spec.static_key import Static, register_reader
from .._spec.tree import Spec, combine, is_array, split
from .._text import short

# With more, differentiating and compiling takes longer, and a call is hardly faster.
MAX_LEAVES_PER_BUFFER = 24

Type = jax.ShapeDtypeStruct
Members = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(eq=False)
class Layout:
    """A pytree without its arrays, and where in a `Packed` these are. Equal to itself alone.

    - `types`: those of its arrays inside a jitted function, weak types aside.
    - `members`: for each array of a `Packed`, the indices of the pytree's arrays in it.
    """

    spec: Spec
    statics: Sequence[Any]
    types: tuple[Type, ...]
    members: Members

    def __post_init__(self) -> None:
        # Equal for pytrees that may serve the same program. Hashed here, because where a layout
        # dies, a type's hash in Python might fail or be interrupted.
        self.key: Hashable = Static((self.spec, self.types, self.members))

    def __deepcopy__(self, memo: Any) -> "Layout":
        # Nothing in it can change, and what is compared by identity would have to be traced anew.
        return self

    def __reduce__(self) -> Any:
        # A spec can't be pickled, since it refers to objects weakly.
        skeleton = self.combine(itertools.repeat(PLACEHOLDER))
        return (_from_skeleton, (skeleton, self.types, self.members))

    def __repr__(self) -> str:
        # JAX's errors show it for two structures that differ.
        texts = ", ".join([array_text(kind.dtype, kind.shape) for kind in self.types])
        texts = textwrap.shorten(texts, 200, placeholder=" ...")
        return f"<layout of {len(self.types)} arrays: {texts}>"

    def combine(self, arrays: Iterable[Any]) -> Any:
        """Return the tree of its arrays, or of what stands in their places."""
        return combine(self.spec, iter(arrays), iter(self.statics))

    def gather(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arrays of a `Packed`, from those of a tree; None for those that are."""
        return tuple(
            [
                arrays[first]
                if not others or arrays[first] is None
                else _join([arrays[index] for index in (first, *others)], self.types[first].dtype)
                for first, *others in self.members
            ]
        )

    def tree(self, gathered: Sequence[Any]) -> Any:
        """Return the tree of the arrays of a `Packed`, with None where it has None."""
        arrays: list[Any] = [None] * len(self.types)
        for indices, array in zip(self.members, gathered, strict=True):
            shapes = tuple([self.types[index].shape for index in indices])
            size = sum(map(math.prod, shapes))
            if len(shapes) == 1 or array is None:
                found = [array] * len(shapes)
            elif not is_array(array) or array.shape[-1:] != (size,):
                raise ValueError(
                    "`unpack` takes apart arrays whose last axis has the length that was packed, "
                    f"{size}; this `Packed` holds {short(array)} in place of one. A function that "
                    "is mapped over it (`jax.tree.map`) gives one value for all leaves of a buffer."
                )
            else:
                found = _split(array, shapes)
            for index, leaf in zip(indices, found, strict=True):
                arrays[index] = leaf
        return self.combine(arrays)

    def arrays_of(self, tree: Any) -> list[Any]:
        """Return the arrays of a tree of this layout; raise for another one, and say where."""
        spec, arrays, statics = split(tree, is_input=False)
        types = tuple(map(type_of, arrays))
        if (spec, types) != (self.spec, self.types):
            old, new = (
                describe_trees([("tree", layout.spec, layout.combine(layout.types))])
                for layout in (self, Layout(spec, statics, types, ()))
            )
            # Trees of very many parts aren't described.
            found = listed(differences(old, new)) or ["somewhere in a large tree"]
            raise ValueError(
                "`repack` takes a tree of the same structure, shapes and dtypes as the one that "
                "was packed. If another one is meant, pack it anew with `eqxjit.pack`. The "
                "differences:\n    " + "\n    ".join(found)
            )
        return arrays


# --- Interning --------------------------------------------------------------------------------

# Pytrees that may serve the same program have the very same layout: comparing two `Packed` compares
# two addresses then, however large the trees are. Entries of jitted functions hold the keys.
_layouts: weakref.WeakValueDictionary[Hashable, Layout] = weakref.WeakValueDictionary()
_interning = Lock()

register_reader(Layout, lambda layout: layout.key)

#: In the place of each array in what is pickled or saved.
PLACEHOLDER = np.zeros(0)


def _interned(layout: Layout) -> Layout:
    with _interning:
        return _layouts.setdefault(layout.key, layout)


def _from_skeleton(skeleton: Any, types: tuple[Type, ...], members: Members) -> Layout:
    spec, _, statics = split(skeleton, is_input=False)
    return _interned(Layout(spec, statics, types, members))


# --- Choosing ---------------------------------------------------------------------------------


def layout_of(
    spec: Spec, arrays: Sequence[Any], statics: Sequence[Any], max_leaf_bytes: int
) -> Layout:
    """Return the layout in which arrays of a tree up to a size share buffers."""
    types = tuple(map(type_of, arrays))
    groups: dict[Hashable, list[int]] = collections.defaultdict(list)
    for index, (kind, array) in enumerate(zip(types, arrays, strict=True)):
        is_small = _is_computable(kind.dtype) and kind.size * kind.dtype.itemsize <= max_leaf_bytes
        is_joined = is_small and not _is_sharded(array)
        groups[(kind.dtype, _device(array)) if is_joined else index].append(index)
    members = [
        tuple(group[i : i + MAX_LEAVES_PER_BUFFER])
        for group in groups.values()
        for i in range(0, len(group), MAX_LEAVES_PER_BUFFER)
    ]
    return _interned(Layout(spec, statics, types, tuple(sorted(members))))


def type_of(leaf: Any) -> Type:
    """Return the type of an array inside a jitted function, weak types aside."""
    # A NumPy array of 64 bits becomes one of 32, unless JAX has x64 switched on.
    computable = _is_computable(leaf.dtype)
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype) if computable else leaf.dtype
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


def _is_computable(dtype: Any) -> bool:
    """Return whether JAX computes with a dtype: not with text or dates, nor with typed keys."""
    return isinstance(dtype, np.dtype) and (dtype.kind == "b" or jnp.issubdtype(dtype, jnp.number))


def _is_sharded(leaf: Any) -> bool:
    if isinstance(leaf, Tracer):
        return is_sharded_aval(jax.typeof(leaf))
    single = jax.sharding.SingleDeviceSharding
    return isinstance(leaf, jax.Array) and not isinstance(leaf.sharding, single)


def _device(leaf: Any) -> Hashable:
    """Return where an array was put by its user, and must stay; None for anywhere."""
    is_put = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed
    return leaf.sharding if is_put else None


# --- Buffers ----------------------------------------------------------------------------------

# Inlined, because XLA and JAX's transpose don't look into another program.
_inlined = functools.partial(jax.jit, static_argnums=1, inline=True)


@_inlined
def _join(leaves: Sequence[Any], dtype: np.dtype) -> jax.Array:
    """Return one flat array of this dtype, strongly typed, with the elements of all leaves."""
    flat = [lax.convert_element_type(lax.reshape(leaf, (leaf.size,)), dtype) for leaf in leaves]
    return lax.concatenate(flat, 0)


@_inlined
def _split(buffer: Any, shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    """Return the arrays of which a buffer was made; its leading axes, if any, are theirs, too."""
    # Not by indexing, whose transpose is a sum of as many arrays as there are leaves, each as long
    # as the whole buffer: that of `lax.split` is one concatenation.
    *leading, _ = buffer.shape
    parts = lax.split(buffer, [math.prod(shape) for shape in shapes], axis=len(leading))
    pairs = zip(parts, shapes, strict=True)
    return [lax.reshape(part, (*leading, *shape)) for part, shape in pairs]
