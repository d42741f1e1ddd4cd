"""`pack` concatenates the small arrays of a pytree, so that a call passes only a few arrays."""

import collections
import dataclasses
import functools
import math
import operator
import textwrap
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr, tree_leaves, tree_leaves_with_path

from .._compat import ArrayImpl
from .._core.table import split_named
from .._diagnostics.description import array_text, describe_trees
from .._spec.arrays import copy_numpy
from .._spec.static_key import Static
from .._spec.tree import Spec, combine, is_array, split
from .._text import counted, short
from .snapshot import Type, changes, snapshot, type_of

Tree = TypeVar("Tree")
Members = tuple[tuple[int, ...], ...]

#: With more leaves in a buffer, differentiating and compiling it takes longer, and a call is hardly
#: faster.
MAX_LEAVES_PER_BUFFER = 24


class Packed(eqx.Module, Generic[Tree]):
    """A pytree whose small arrays are in flat buffers, as `eqxjit.pack` returns it.

    A `Packed` is itself a pytree, and has few arrays. You can differentiate with respect to a
    `Packed`, pass it to an elementwise optimizer, and pass it to and return it from jitted
    functions.

    - `arrays`: the buffers, and the arrays that are left as they are.
    - `layout`: everything static about the packed pytree. Pytrees of one layout share this object.
    """

    arrays: tuple[Any, ...]
    layout: "Layout" = eqx.field(static=True)

    def unpack(self) -> Tree:
        """Return the tree that was packed, with its current arrays.

        Packed leaves lose their weak types, and packed NumPy arrays become JAX arrays. If a buffer
        in `arrays` is `None`, as in a filtered gradient, all leaves in that buffer are `None`. If a
        buffer has leading axes, as `jax.vmap` adds them, each of its leaves has them, too.

        **Returns:**

        A tree of the structure, static values, shapes and dtypes that were packed.

        **Raises:**

        - `ValueError`, if the last axis of a buffer no longer has the length that was packed.
        """
        layout = self.layout
        leaves: list[Any] = [None] * len(layout.types)
        for indices, array in zip(layout.members, self.arrays, strict=True):
            if len(indices) == 1:
                leaves[indices[0]] = array
            elif array is not None:
                shapes = tuple(layout.types[index].shape for index in indices)
                for index, leaf in zip(indices, _split(array, shapes), strict=True):
                    leaves[index] = leaf
        return layout.combine(leaves)

    def repack(self, tree: Tree) -> "Packed[Tree]":
        """Pack a tree of the same layout, for example after an update that isn't elementwise.

        **Arguments:**

        - `tree`: a tree of the same structure, static values, shapes and dtypes.

        **Raises:**

        - `ValueError`, if the layout differs. The error names the parts that differ.
        """
        layout = self.layout
        spec, arrays, statics = split(tree, is_input=False)
        types = tuple(map(type_of, arrays))
        if (spec, types) != (layout.spec, layout.types):
            old = describe_trees([("tree", layout.spec, layout.combine(layout.types))])
            other = combine(spec, iter(types), iter(statics))
            lines = changes(old, describe_trees([("tree", spec, other)]))
            raise ValueError(
                "`repack` takes a tree of the same structure, shapes and dtypes as the one that "
                "was packed. Pack a different tree with `eqxjit.pack`. The differences:\n    "
                + "\n    ".join(lines)
            )
        return layout.pack(arrays)

    def __repr__(self) -> str:
        n_bytes = sum(getattr(array, "nbytes", 0) for array in self.arrays)
        buffers = counted(len(self.arrays), "buffer")
        return f"Packed({counted(len(self.layout.types), 'array')} in {buffers}, {n_bytes:,} B)"

    def __getattr__(self, name: str) -> Any:
        kind, hint = AttributeError, f"packed.unpack().{name}"
        if name == "inference":
            # Not an `AttributeError`. It would tell `inference_mode` that the Module lacks this
            # field, and `inference_mode` would silently do nothing.
            kind, hint = TypeError, "eqx.nn.inference_mode(packed.unpack())"
        raise kind(f"A `Packed` has no attribute {name!r}; the tree in it may. Write `{hint}`.")


def pack(tree: Tree, *, optimizer: Any, max_leaf_bytes: int = 4096) -> Packed[Tree]:
    """Pack the small arrays of a pytree into flat buffers, after checking that an optimizer fits.

    Each array that a jitted function takes or returns costs some microseconds. Together they take
    most of the time of a small model's training step. But an optimizer that looks at whole leaves,
    their shapes or their names doesn't fit a buffer. Examples are LAMB, LARS, Muon, Adafactor,
    clipping leaf by leaf, and weight decay with a mask.

    **Arguments:**

    - `tree`: any pytree of arrays, such as a model. Static lists and dicts in it are copied.
    - `optimizer`: an `optax.GradientTransformation`, or another object with the methods `init` and
        `update`. `pack` tries it on the tree and on the `Packed`, with pseudo-random weights and
        gradients, which takes about as long as compiling it for both. It calls
        `update(grads, opt_state, params)`, so bind further arguments by `functools.partial`.
        `None` skips the check.
    - `max_leaf_bytes`: arrays above this size (4 KiB by default) stay the same objects, because
        copying them would cost more than it saves. Typed keys and sharded arrays stay the same
        objects, too. Arrays on different devices share no buffer.

    **Returns:**

    A `Packed`.

    **Raises:**

    - `ValueError`, if the optimizer updates the `Packed` differently from the tree, beyond
        rounding. The error names the leaf whose updates differ most, and says what to write
        instead.
    - `TypeError`, for an array that JAX doesn't accept, such as one of strings.
    - `AttributeError`, if `optimizer` has no `init` or no `update`.

    !!! example

        ```python
        >>> import equinox as eqx, jax, jax.numpy as jnp, optax
        >>> import eqxjit
        >>> model = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
        >>> params = eqxjit.pack(model, optimizer=optax.adam(1e-2))
        >>> grad = eqxjit.filter_jit(eqx.filter_grad(lambda p, x: jnp.sum(p.unpack()(x) ** 2)))
        >>> grad(params, jnp.ones(2))
        Packed(4 arrays in 1 buffer, 132 B)
        >>> eqxjit.pack(model, optimizer=optax.lamb(1e-2))
        Traceback (most recent call last):
        ValueError: This optimizer doesn't fit a `Packed`: its updates of `tree...` differ...

        ```
    """
    if optimizer is not None and not all(hasattr(optimizer, name) for name in ("init", "update")):
        raise AttributeError(
            "`optimizer` must have the methods `init` and `update`, like `optax.adam(1e-3)`, or be "
            f"None; got {short(optimizer)}."
        )
    spec, arrays, statics = split_named(tree, lambda: [("tree", tree)], False)
    types = tuple(map(type_of, arrays))
    members = _members(arrays, types, max_leaf_bytes)
    layout = _from_skeleton(snapshot(spec, types, statics), members)
    if optimizer is not None:
        # `pack` may be called while a program is traced, and the check is no part of that program.
        with jax.ensure_compile_time_eval():
            _check_optimizer(optimizer, layout)
    return layout.pack(arrays)


# --- Which array is where ---------------------------------------------------------------------


@dataclasses.dataclass(unsafe_hash=True)
class Layout:
    """A pytree without its arrays, and the places of these arrays in a `Packed`.

    - `key`: equal for pytrees that one program can serve.
    - `spec`, `statics`: the pytree without its arrays, as `split` returns it.
    - `types`: the types of the arrays inside a jitted function, without weak types.
    - `members`: for each array of a `Packed`, the indices of the pytree's arrays in it.
    """

    key: Hashable = dataclasses.field(repr=False)
    spec: Spec = dataclasses.field(compare=False, repr=False)
    statics: Sequence[Any] = dataclasses.field(compare=False)
    types: tuple[Type, ...] = dataclasses.field(compare=False)
    members: Members = dataclasses.field(compare=False)

    def __deepcopy__(self, memo: Any) -> "Layout":
        # Nothing in a layout can change, and the copy of a static object that compares by identity
        # would cause a new trace.
        return self

    def __reduce__(self) -> Any:
        # A spec holds weak references, which can't be pickled.
        return (_from_skeleton, (self.combine(self.types), self.members))

    def __repr__(self) -> str:
        # JAX's errors about two structures that differ show this text.
        texts = ", ".join([array_text(kind.dtype, kind.shape) for kind in self.types])
        return f"<layout of {len(self.types)} arrays: {textwrap.shorten(texts, 200)}>"

    def combine(self, arrays: Iterable[Any]) -> Any:
        """Return the tree with these arrays, or with other values in their places."""
        return combine(self.spec, iter(arrays), iter(self.statics))

    def pack(self, arrays: Sequence[Any]) -> Packed[Any]:
        """Return the `Packed` of a tree's arrays. A buffer whose first array is None is None."""
        packed: list[Any] = []
        for indices in self.members:
            leaves = [arrays[index] for index in indices]
            if len(leaves) > 1 and leaves[0] is not None:
                # JAX reads NumPy arrays in the background, and their owner may overwrite them.
                copies = [copy_numpy(a) if isinstance(a, np.ndarray) else a for a in leaves]
                leaves = [_join(copies, self.types[indices[0]].dtype)]
            packed.append(leaves[0])
        return Packed(tuple(packed), self)


# Pytrees that one program can serve share a layout. Two `Packed` are then compared by the addresses
# of their layouts, however large the trees are.
_layouts: weakref.WeakValueDictionary[Hashable, Layout] = weakref.WeakValueDictionary()


def _from_skeleton(tree: Any, members: Members) -> Layout:
    """Return the layout of a tree that has types in the places of its arrays."""
    spec, types, statics = split(tree, False, (Type,))
    # The native `Static` computes the hash of its key only once.
    key = Static((spec, tuple(types), members))
    return _layouts.setdefault(key, Layout(key, spec, statics, tuple(types), members))


def _members(arrays: Sequence[Any], types: Sequence[Type], max_leaf_bytes: int) -> Members:
    """Return the indices of the arrays in each buffer: small arrays of one dtype and device."""
    groups: dict[Hashable, list[int]] = collections.defaultdict(list)
    for index, (kind, array) in enumerate(zip(types, arrays, strict=True)):
        # An array that the user has put on a device, or on several, must stay there.
        place = array.sharding if type(array) is ArrayImpl and array.committed else None
        is_joined = (
            # Typed keys have a dtype of their own kind, and are left alone.
            (jnp.issubdtype(kind.dtype, jnp.number) or kind.dtype == bool)
            # Copying a leaf above 4 KiB costs more than passing it. A GRU step took 1.04 times the
            # unpacked time with its 12 KiB matrix packed, and 0.87 times without.
            and kind.size * kind.dtype.itemsize <= max_leaf_bytes
            and (place is None or isinstance(place, jax.sharding.SingleDeviceSharding))
        )
        groups[(kind.dtype, place) if is_joined else index].append(index)
    return tuple(
        tuple(group[i : i + MAX_LEAVES_PER_BUFFER])
        for group in groups.values()
        for i in range(0, len(group), MAX_LEAVES_PER_BUFFER)
    )


# Inlined, because neither XLA nor JAX's transpose looks into a nested program.
_inlined = functools.partial(jax.jit, static_argnums=1, inline=True)


@_inlined
def _join(leaves: Sequence[Any], dtype: np.dtype) -> jax.Array:
    """Return one flat array of this dtype, not weakly typed, with the elements of all leaves."""
    flat = [lax.convert_element_type(lax.reshape(leaf, (leaf.size,)), dtype) for leaf in leaves]
    return lax.concatenate(flat, 0)


@_inlined
def _split(buffer: Any, shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    """Return the arrays in a buffer. Each has the leading axes of the buffer, if there are any."""
    sizes = [math.prod(shape) for shape in shapes]
    if buffer.shape[-1:] != (sum(sizes),):
        raise ValueError(
            "`unpack` takes buffers whose last axis has the length that was packed, "
            f"{sum(sizes)}; this `Packed` has a buffer of shape {buffer.shape}. A function that "
            "`jax.tree.map` applies to a `Packed` gets whole buffers, not the leaves in them."
        )
    *leading, _ = buffer.shape
    # Not by indexing, because its transpose adds one array as long as the buffer for each leaf. The
    # transpose of `lax.split` is one concatenation.
    parts = lax.split(buffer, sizes, axis=len(leading))
    pairs = zip(parts, shapes, strict=True)
    return [lax.reshape(part, (*leading, *shape)) for part, shape in pairs]


# --- Optimizers -------------------------------------------------------------------------------

# Run at most this many steps until two have changed the weights, because an optimizer may
# accumulate gradients, or begin with a learning rate of zero.
_MAX_STEPS = 128

# The scales of the gradients that are tried. Large gradients reveal clipping. Gradients of zero
# reveal the decay of weights, however small it is.
_SIZES = 10.0, 0.0

# The errors that an optimizer may raise about a buffer, or about leaves that it doesn't know. Other
# errors, such as a timeout, aren't about the optimizer.
_ERRORS = AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError

_INSTEAD = (
    "If it doesn't fit, pass `optimizer=None`, and give it trees: `optimizer.update("
    "grads.unpack(), opt_state, params.unpack())`, each filtered by `eqx.is_inexact_array`, and "
    "then `params.repack(eqx.apply_updates(params.unpack(), updates))`. Bind what else `update` "
    "takes by `functools.partial`."
)


def _check_optimizer(optimizer: Any, layout: Layout) -> None:
    """Raise an error if an optimizer updates a `Packed` differently from the tree."""
    # Without `jit`, a hundred steps would take longer than compiling one.
    update = eqx.filter_jit(optimizer.update)
    n_steps = _MAX_STEPS
    for size in _SIZES:
        try:
            run = functools.partial(_run, optimizer.init, update, layout.types, size)
            n_steps, of_tree = run(lambda a: eqx.filter(layout.combine(a), is_array), n_steps)
            _, of_packed = run(layout.pack, n_steps)
            path, worst = _largest_difference(of_tree, eqx.filter(of_packed.unpack(), is_array))
        except _ERRORS as error:
            error.add_note(
                "`pack` tries `optimizer.update(gradients, state, params)` on the tree, then on "
                f"the `Packed`. {_INSTEAD}"
            )
            raise
        if worst > _rounding(layout.types):
            raise ValueError(
                f"This optimizer doesn't fit a `Packed`: its updates of `tree{keystr(path)}` "
                f"differ by {100 * worst:.3g} % from those of the tree itself, because a buffer "
                f"hides leaves, their shapes and their names. {_INSTEAD}"
            )


def _run(
    init: Callable[[Any], Any],
    update: Callable[[Any, Any, Any], Any],
    types: Sequence[Type],
    size: float,
    wrap: Callable[[list[Any]], Any],
    n_steps: int,
) -> tuple[int, Any]:
    """Run an optimizer until two steps have changed the weights, or `n_steps` steps have run.

    `wrap(arrays)` returns a tree or a `Packed` with these arrays. Returns the number of steps, and
    the sum of the updates.
    """
    weights = wrap(random_arrays(types, 0, 1.0))
    total = wrap(random_arrays(types, 0, 0.0))
    state = init(weights)
    number = 0
    n_moves = 0
    while number < n_steps and n_moves < 2:
        number += 1
        gradients = wrap(random_arrays(types, number, size))
        updates, state = update(gradients, state, weights)
        if any(map(np.any, tree_leaves(updates))):
            weights = eqx.apply_updates(weights, updates)
            total = eqx.apply_updates(total, updates)
            n_moves += 1
    return number, total


def _rounding(types: Sequence[Type]) -> float:
    """Return the relative difference that rounding may explain, for arrays of these types."""
    inexact = [kind.dtype for kind in types if jnp.issubdtype(kind.dtype, jnp.inexact)]
    return 1e-4 + 8 * max((float(jnp.finfo(dtype).eps) for dtype in inexact), default=0.0)


def _largest_difference(of_tree: Any, of_packed: Any) -> tuple[Any, float]:
    """Return the path of the leaf that differs most between two trees, and its difference."""
    relative = jax.tree.map(_difference, of_tree, of_packed)
    pairs = tree_leaves_with_path(relative)
    return max(pairs, key=operator.itemgetter(1), default=((), 0.0))


def random_arrays(types: Sequence[Type], step: int, size: float) -> list[Any]:
    """Return pseudo-random arrays, which depend on `step`; None for types that aren't trained."""
    random = np.random.default_rng(step)
    # Cubes, because optimizers should meet numbers of many orders of magnitude.
    return [
        jnp.asarray(size * random.standard_normal(kind.shape) ** 3, kind.dtype)
        if jnp.issubdtype(kind.dtype, jnp.inexact)
        else None
        for kind in types
    ]


def _difference(of_tree: Any, of_packed: Any) -> float:
    """Return the mean difference of two arrays, relative to the mean size of their elements."""
    arrays = [np.asarray(array).astype(np.complex128) for array in (of_tree, of_packed)]
    # Ignore infinities, because an update that overflows can't be compared.
    one, other = (np.nan_to_num(array, posinf=0.0, neginf=0.0) for array in arrays)
    size = max(np.abs(one).sum(), np.abs(other).sum())
    return float(np.abs(one - other).sum() / size) if size else 0.0
