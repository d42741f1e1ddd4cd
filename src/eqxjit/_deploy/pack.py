"""`pack`: a pytree's small arrays in flat buffers, so that a call hands over a few arrays only."""

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
from .._text import counted
from .freeze import snapshot
from .saved import Type, changes, type_of

Tree = TypeVar("Tree")
Members = tuple[tuple[int, ...], ...]

#: With more, differentiating and compiling takes longer, and a call is hardly faster.
MAX_LEAVES_PER_BUFFER = 24


class Packed(eqx.Module, Generic[Tree]):
    """A pytree whose small arrays are in flat buffers; made by `eqxjit.pack`.

    It is a pytree itself, of a few arrays: differentiate with respect to it, hand it to an
    elementwise optimizer, pass it to jitted functions and return it from them.

    - `arrays`: the buffers, and the arrays that are left as they are.
    - `layout`: everything static about the pytree. Equal pytrees share one.
    """

    arrays: tuple[Any, ...]
    layout: "Layout" = eqx.field(static=True)

    def unpack(self) -> Tree:
        """Return the tree that was packed, with its current arrays.

        Packed leaves lose their weak types, and packed NumPy arrays become JAX arrays. Where an
        array here is `None`, so are the leaves that were in it. Leading axes, as `jax.vmap` adds
        them, are added to each leaf.
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
        """Pack another tree of the same layout, for example after an update that isn't elementwise.

        Raises a `ValueError` that says where the structure, a static value, a shape or a dtype
        differs.
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
                "was packed. If another one is meant, pack it with `eqxjit.pack`. The "
                "differences:\n    " + "\n    ".join(lines)
            )
        return layout.pack(arrays)

    def __repr__(self) -> str:
        n_bytes = sum(getattr(array, "nbytes", 0) for array in self.arrays)
        buffers = counted(len(self.arrays), "buffer")
        return f"Packed({counted(len(self.layout.types), 'array')} in {buffers}, {n_bytes:,} B)"

    def __getattr__(self, name: str) -> Any:
        kind, hint = AttributeError, f"packed.unpack().{name}"
        if name == "inference":
            # At an `AttributeError`, Equinox would find nothing to switch, and say nothing.
            kind, hint = TypeError, "eqx.nn.inference_mode(packed.unpack())"
        raise kind(f"A `Packed` has no attribute {name!r}; the tree in it may. Write `{hint}`.")


def pack(tree: Tree, *, optimizer: Any, max_leaf_bytes: int = 4096) -> Packed[Tree]:
    """Pack the small arrays of a pytree into flat buffers, after a check that an optimizer fits.

    Each array that a jitted function takes or returns costs some microseconds, which is most of a
    training step of a small model. But an optimizer that looks at whole leaves, their shapes or
    their names doesn't fit a buffer: LAMB, LARS, Muon, Adafactor, clipping leaf by leaf, weight
    decay with a mask.

    **Arguments:**

    - `tree`: any pytree of arrays, such as a model. Static lists and dicts in it are copied.
    - `optimizer`: an `optax.GradientTransformation`, or another object with its `init` and
        `update`, called as `update(grads, opt_state, params)`: bind by `functools.partial` what
        else it takes. `pack` tries it on the tree and on the `Packed`, with pseudo-random weights
        and gradients. That takes about as long as compiling it for both. `None` opts out.
    - `max_leaf_bytes`: larger arrays (than 4 KiB by default) stay the same objects, because copying
        them would cost more than it saves. So do typed keys and sharded arrays. Arrays on different
        devices share no buffer.

    **Raises:**

    - `ValueError`, if the optimizer's updates of the `Packed` aren't those of the tree, to
        rounding. It names the leaf whose updates differ most, and says what to write instead.
    - `TypeError`, for an array that JAX doesn't take, as of text.

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
    spec, arrays, statics = split_named(tree, lambda: [("tree", tree)], False)
    types = tuple(map(type_of, arrays))
    members = _members(arrays, types, max_leaf_bytes)
    layout = _from_skeleton(snapshot(spec, types, statics), members)
    if optimizer is not None:
        # Within a trace, too: the check is no part of the program.
        with jax.ensure_compile_time_eval():
            _check_optimizer(optimizer, layout)
    return layout.pack(arrays)


# --- Which array is where ---------------------------------------------------------------------


@dataclasses.dataclass(unsafe_hash=True)
class Layout:
    """A pytree without its arrays, and where in a `Packed` these are.

    - `key`: equal for pytrees that may serve the same program.
    - `types`: those of its arrays inside a jitted function, weak types aside.
    - `members`: for each array of a `Packed`, the indices of the pytree's arrays in it.
    """

    key: Hashable = dataclasses.field(repr=False)
    spec: Spec = dataclasses.field(compare=False, repr=False)
    statics: Sequence[Any] = dataclasses.field(compare=False)
    types: tuple[Type, ...] = dataclasses.field(compare=False)
    members: Members = dataclasses.field(compare=False)

    def __deepcopy__(self, memo: Any) -> "Layout":
        # Nothing in it can change, and copies of what compares by identity would be traced again.
        return self

    def __reduce__(self) -> Any:
        # A spec can't be pickled, since it refers to objects weakly.
        return (_from_skeleton, (self.combine(self.types), self.members))

    def __repr__(self) -> str:
        # JAX's errors show it for two structures that differ.
        texts = ", ".join([array_text(kind.dtype, kind.shape) for kind in self.types])
        return f"<layout of {len(self.types)} arrays: {textwrap.shorten(texts, 200)}>"

    def combine(self, arrays: Iterable[Any]) -> Any:
        """Return the tree of its arrays, or of what stands in their places."""
        return combine(self.spec, iter(arrays), iter(self.statics))

    def pack(self, arrays: Sequence[Any]) -> Packed[Any]:
        """Return the `Packed` of a tree's arrays; None for those that are."""
        packed: list[Any] = []
        for indices in self.members:
            leaves = [arrays[index] for index in indices]
            if len(leaves) > 1 and leaves[0] is not None:
                # JAX reads a NumPy array in the background, when its owner may have overwritten it.
                copies = [copy_numpy(a) if isinstance(a, np.ndarray) else a for a in leaves]
                leaves = [_join(copies, self.types[indices[0]].dtype)]
            packed.append(leaves[0])
        return Packed(tuple(packed), self)


# Pytrees that may serve the same program share a layout: comparing two `Packed` compares two
# addresses then, however large the trees are.
_layouts: weakref.WeakValueDictionary[Hashable, Layout] = weakref.WeakValueDictionary()


def _from_skeleton(tree: Any, members: Members) -> Layout:
    spec, types, statics = split(tree, False, (Type,))
    key = Static((spec, tuple(types), members))
    return _layouts.setdefault(key, Layout(key, spec, statics, tuple(types), members))


def _members(arrays: Sequence[Any], types: Sequence[Type], max_leaf_bytes: int) -> Members:
    """Return which arrays share a buffer: those of one dtype up to a size."""
    groups: dict[Hashable, list[int]] = collections.defaultdict(list)
    for index, (kind, array) in enumerate(zip(types, arrays, strict=True)):
        # Its user has put it on a device, or on several, where it must stay.
        place = array.sharding if type(array) is ArrayImpl and array.committed else None
        is_joined = (
            # No typed key.
            (jnp.issubdtype(kind.dtype, jnp.number) or kind.dtype == bool)
            # Copying a leaf above 4 KiB costs more than passing it along: with its matrix of 12 KiB
            # in the buffer, a GRU's step took 1.04 of the time of that on the tree, 0.87 without.
            and kind.size * kind.dtype.itemsize <= max_leaf_bytes
            and (place is None or isinstance(place, jax.sharding.SingleDeviceSharding))
        )
        groups[(kind.dtype, place) if is_joined else index].append(index)
    return tuple(
        tuple(group[i : i + MAX_LEAVES_PER_BUFFER])
        for group in groups.values()
        for i in range(0, len(group), MAX_LEAVES_PER_BUFFER)
    )


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
    sizes = [math.prod(shape) for shape in shapes]
    if buffer.shape[-1:] != (sum(sizes),):
        raise ValueError(
            "`unpack` takes apart arrays whose last axis has the length that was packed, "
            f"{sum(sizes)}; this `Packed` holds one of shape {buffer.shape}. A function that is "
            "mapped over it (`jax.tree.map`) gives one value for all leaves of a buffer."
        )
    *leading, _ = buffer.shape
    # Not by indexing, whose transpose is a sum of as many arrays as there are leaves, each as long
    # as the whole buffer: that of `lax.split` is one concatenation.
    parts = lax.split(buffer, sizes, axis=len(leading))
    pairs = zip(parts, shapes, strict=True)
    return [lax.reshape(part, (*leading, *shape)) for part, shape in pairs]


# --- Optimizers -------------------------------------------------------------------------------

# So many are waited for until two of them have moved the weights: gradients may be accumulated, and
# a learning rate may begin at zero.
_MAX_STEPS = 128

# What an optimizer may raise that meets a buffer, or not its leaves. A timeout, say, isn't its own.
_ERRORS = AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError

_INSTEAD = (
    "If it doesn't fit, pass `optimizer=None`, and show it trees: `optimizer.update("
    "grads.unpack(), opt_state, params.unpack())`, each filtered by `eqx.is_inexact_array`, and "
    "then `params.repack(eqx.apply_updates(params.unpack(), updates))`. Bind what else `update` "
    "takes by `functools.partial`."
)


def _check_optimizer(optimizer: Any, layout: Layout) -> None:
    """Raise if an optimizer's updates of a `Packed` aren't those of the tree, to rounding."""
    # Without `jit`, a hundred steps would take longer than compiling one.
    update = eqx.filter_jit(optimizer.update)

    def run(wrap: Callable[[Any], Any], size: float, n_steps: int) -> tuple[int, Any]:
        """Return how many steps it takes to move the weights, and the sum of the updates."""
        weights, total = (wrap(random_arrays(layout.types, 0, scale)) for scale in (1.0, 0.0))
        state, number, n_moves = optimizer.init(weights), 0, 0
        while number < n_steps and n_moves < 2:
            number += 1
            gradients = wrap(random_arrays(layout.types, number, size))
            updates, state = update(gradients, state, weights)
            if any(map(np.any, tree_leaves(updates))):
                weights, total = (eqx.apply_updates(each, updates) for each in (weights, total))
                n_moves += 1
        return number, total

    inexact = [kind.dtype for kind in layout.types if jnp.issubdtype(kind.dtype, jnp.inexact)]
    rounding = 1e-4 + 8 * max((float(jnp.finfo(dtype).eps) for dtype in inexact), default=0.0)
    n_steps = _MAX_STEPS
    # Without gradients there is nothing that hides the decay of weights, however small it is; with
    # large ones, all that is clipped shows.
    for size in (10.0, 0.0):
        try:
            n_steps, of_tree = run(lambda a: eqx.filter(layout.combine(a), is_array), size, n_steps)
            _, of_packed = run(layout.pack, size, n_steps)
            relative = jax.tree.map(_difference, of_tree, eqx.filter(of_packed.unpack(), is_array))
        except _ERRORS as error:
            error.add_note(
                "`pack` tries `optimizer.update(gradients, state, params)` on the tree, then on "
                f"the `Packed`. {_INSTEAD}"
            )
            raise
        pairs = tree_leaves_with_path(relative)
        path, worst = max(pairs, key=operator.itemgetter(1), default=((), 0.0))
        if worst > rounding:
            raise ValueError(
                f"This optimizer doesn't fit a `Packed`: its updates of `tree{keystr(path)}` "
                f"differ by {100 * worst:.3g} % from those of the tree itself, as a buffer hides "
                f"leaves, their shapes and their names. {_INSTEAD}"
            )


def random_arrays(types: Sequence[Type], step: int, size: float) -> list[Any]:
    """Return pseudo-random arrays, the same for the same step; None for what isn't trained."""
    random = np.random.default_rng(step)
    # Cubes of normal numbers are of many sizes.
    return [
        jnp.asarray(size * random.standard_normal(kind.shape) ** 3, kind.dtype)
        if jnp.issubdtype(kind.dtype, jnp.inexact)
        else None
        for kind in types
    ]


def _difference(of_tree: Any, of_packed: Any) -> float:
    """Return the mean difference of two arrays, in proportion to their mean size."""
    arrays = [np.asarray(array).astype(np.complex128) for array in (of_tree, of_packed)]
    # What overflows on the tree has nothing to be compared with.
    one, other = (np.nan_to_num(array, posinf=0.0, neginf=0.0) for array in arrays)
    size = max(np.abs(one).sum(), np.abs(other).sum())
    return float(np.abs(one - other).sum() / size) if size else 0.0
