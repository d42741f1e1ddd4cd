"""`pack`: a pytree's small arrays in flat buffers, so that a call hands over a few arrays only."""

import collections
import dataclasses
import functools
import itertools
import math
import textwrap
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves

from .._compat import is_sharded_aval
from .._core.table import split_named
from .._diagnostics.description import array_text, describe_trees
from .._diagnostics.differences import differences, listed
from .._spec.static_key import Static
from .._spec.tree import Spec, combine, copy_numpy, is_array, split
from .._text import counted, short
from .freeze import snapshot
from .saved import PLACEHOLDER, Type, is_computable, type_of

Tree = TypeVar("Tree")
Members = tuple[tuple[int, ...], ...]

#: With more, differentiating and compiling takes longer, and a call is hardly faster.
MAX_LEAVES_PER_BUFFER = 24

_MISTAKEN = "A `Packed` {}; the tree in it may. Write `packed.unpack(){}`, in the jitted function."


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

        !!! example

            ```python
            >>> import jax, jax.numpy as jnp, eqxjit
            >>> packed = eqxjit.pack({"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}, optimizer=None)
            >>> packed
            Packed(2 arrays in 1 buffer, 36 B)
            >>> jax.grad(lambda packed: packed.unpack()["w"].sum())(packed).unpack()["w"].shape
            (2, 3)

            ```
        """
        return self.layout.combine(self.layout.take_apart(self.arrays))

    def repack(self, tree: Tree) -> "Packed[Tree]":
        """Pack another tree of the same layout, for example after an update that isn't elementwise.

        Raises a `ValueError` that says where the structure, a static value, a shape or a dtype
        differs.
        """
        return Packed(self.layout.gather(self.layout.arrays_of(tree)), self.layout)

    def __repr__(self) -> str:
        shared = [members for members in self.layout.members if len(members) > 1]
        n_shared, n_alone = sum(map(len, shared)), len(self.layout.members) - len(shared)
        parts = [f"{counted(n_shared, 'array')} in {counted(len(shared), 'buffer')}"]
        if n_alone:
            parts.append(f"{n_alone} as {'it is' if n_alone == 1 else 'they are'}")
        parts.append(f"{sum(getattr(array, 'nbytes', 0) for array in self.arrays):,} B")
        return f"Packed({', '.join(parts)})"

    def __getattr__(self, name: str) -> Any:
        if name == "inference":
            tree = self.layout.combine(self.layout.types)
            nodes = tree_leaves(tree, is_leaf=lambda node: hasattr(node, name))
            if any(hasattr(node, name) for node in nodes):
                # Without it, Equinox would find nothing to switch, and say nothing.
                raise TypeError(
                    "`equinox.nn.inference_mode` doesn't see what is in a `Packed`. Write "
                    "`eqx.nn.inference_mode(packed.unpack())`."
                )
        raise AttributeError(_MISTAKEN.format(f"has no attribute {name!r}", f".{name}"))

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(_MISTAKEN.format("can't be indexed or iterated over", f"[{key!r}]"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(_MISTAKEN.format("can't be called", "(...)"))


def pack(tree: Tree, *, optimizer: Any, max_leaf_bytes: int = 4096) -> Packed[Tree]:
    """Pack the small arrays of a pytree into flat buffers, after a check that an optimizer fits.

    Each array that a jitted function takes or returns costs some microseconds, which is most of a
    training step of a small model. A packed model consists of a few arrays.

    An optimizer that looks at whole leaves, their shapes or their names doesn't fit a buffer: LAMB,
    LARS, Muon, Adafactor, clipping leaf by leaf, weight decay with a mask.

    **Arguments:**

    - `tree`: any pytree of arrays, such as a model. It isn't changed, and static lists and dicts
        in it are copied.
    - `optimizer`: an `optax.GradientTransformation`, or another object with its `init` and
        `update`, called as `update(grads, opt_state, params)`. `pack` tries it on the tree and on
        the `Packed`, with pseudo-random weights, for some steps with pseudo-random gradients and
        some with none. That takes about as long as compiling it for both. `None` opts out.
    - `max_leaf_bytes`: larger arrays (than 4 KiB by default) stay the same objects, because copying
        them would cost more than it saves. So do typed keys and sharded arrays. Arrays on different
        devices share no buffer.

    **Raises:**

    - `ValueError`, if the optimizer's updates of the `Packed` aren't those of the tree, to
        rounding. It names the leaf whose updates differ most, and says what to write instead.
    - `ValueError`, if there is no array among the leaves of the tree, or if it holds a `Packed`.

    !!! example

        ```python
        >>> import equinox as eqx, jax, jax.numpy as jnp, optax
        >>> import eqxjit
        >>> model = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
        >>> params = eqxjit.pack(model, optimizer=optax.adam(1e-2))
        >>> @eqxjit.filter_jit(donate="all")
        ... def sgd_step(params, x):
        ...     grads = eqx.filter_grad(lambda p: jnp.sum(p.unpack()(x) ** 2))(params)
        ...     return eqx.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads))
        >>> params = sgd_step(params, jnp.ones(2))
        >>> eqxjit.pack(params.unpack(), optimizer=optax.lamb(1e-2))
        Traceback (most recent call last):
        ValueError: This optimizer doesn't fit a `Packed`: its updates of `tree...` differ...

        ```
    """
    spec, arrays, statics = split_named(tree, lambda: [("tree", tree)], False)
    leaves, _ = tree_flatten_with_path(tree, is_leaf=lambda node: type(node) is Packed)
    for path, leaf in leaves:
        if type(leaf) is Packed:
            name = f"tree{keystr(path)}"
            raise ValueError(f"`{name}` is packed already. To pack it again, `unpack` it first.")
    # An optimizer without a state has none.
    if not arrays and tree_leaves(tree):
        raise ValueError(f"`pack` takes a pytree of arrays, and there is none in {short(tree)}.")
    layout = _layout_of(*snapshot(spec, arrays, statics), max_leaf_bytes)
    if optimizer is not None:
        # Within a trace, too: the check is no part of the program.
        with jax.ensure_compile_time_eval():
            _check_optimizer(optimizer, layout)
    return Packed(layout.gather(arrays), layout)


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
            arrays[first]
            if not others or arrays[first] is None
            else _join([_copied(arrays[i]) for i in (first, *others)], self.types[first].dtype)
            for first, *others in self.members
        )

    def take_apart(self, gathered: Sequence[Any]) -> list[Any]:
        """Return the arrays of the tree, from those of a `Packed`; None for those that are."""
        arrays: list[Any] = [None] * len(self.types)
        for indices, array in zip(self.members, gathered, strict=True):
            shapes = tuple(self.types[index].shape for index in indices)
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
        return arrays

    def arrays_of(self, tree: Any) -> list[Any]:
        """Return the arrays of a tree of this layout; raise for another one, and say where."""
        spec, arrays, statics = split(tree, is_input=False)
        types = tuple(map(type_of, arrays))
        if (spec, types) != (self.spec, self.types):
            old = describe_trees([("tree", self.spec, self.combine(self.types))])
            other = combine(spec, iter(types), iter(statics))
            new = describe_trees([("tree", spec, other)])
            # Trees of very many parts aren't described.
            found = listed(differences(old, new)) or ["somewhere in a large tree"]
            raise ValueError(
                "`repack` takes a tree of the same structure, shapes and dtypes as the one that "
                "was packed. If another one is meant, pack it with `eqxjit.pack`. The "
                "differences:\n    " + "\n    ".join(found)
            )
        return arrays


# Pytrees that may serve the same program share a layout: comparing two `Packed` compares two
# addresses then, however large the trees are.
_layouts: weakref.WeakValueDictionary[Hashable, Layout] = weakref.WeakValueDictionary()


def _shared_layout(
    spec: Spec, statics: Sequence[Any], types: tuple[Type, ...], members: Members
) -> Layout:
    key = Static((spec, types, members))
    return _layouts.setdefault(key, Layout(key, spec, statics, types, members))


def _from_skeleton(skeleton: Any, types: tuple[Type, ...], members: Members) -> Layout:
    spec, _, statics = split(skeleton, is_input=False)
    return _shared_layout(spec, statics, types, members)


def _layout_of(
    spec: Spec, arrays: Sequence[Any], statics: Sequence[Any], max_leaf_bytes: int
) -> Layout:
    """Return the layout in which arrays of a tree up to a size share buffers."""
    types = tuple(map(type_of, arrays))
    groups: dict[Hashable, list[int]] = collections.defaultdict(list)
    for index, (kind, array) in enumerate(zip(types, arrays, strict=True)):
        # Copying a leaf above 4 KiB costs more than passing it along: with its matrix of 12 KiB in
        # the buffer, a GRU's step took 1.04 of the time of that on the tree, and 0.87 without.
        is_small = is_computable(kind.dtype) and kind.size * kind.dtype.itemsize <= max_leaf_bytes
        is_joined = is_small and not _is_sharded(array)
        # Its user has put it on a device, where it must stay.
        is_put = not isinstance(array, Tracer) and getattr(array, "committed", False)
        key = (kind.dtype, array.sharding if is_put else None) if is_joined else index
        groups[key].append(index)
    members = [
        tuple(group[i : i + MAX_LEAVES_PER_BUFFER])
        for group in groups.values()
        for i in range(0, len(group), MAX_LEAVES_PER_BUFFER)
    ]
    return _shared_layout(spec, statics, types, tuple(sorted(members)))


def _is_sharded(leaf: Any) -> bool:
    if isinstance(leaf, Tracer):
        return is_sharded_aval(jax.typeof(leaf))
    single = jax.sharding.SingleDeviceSharding
    return isinstance(leaf, jax.Array) and not isinstance(leaf.sharding, single)


def _copied(leaf: Any) -> Any:
    # JAX reads a NumPy array in the background, when its owner may have overwritten it.
    return copy_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf


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


# --- Optimizers -------------------------------------------------------------------------------

# So many are waited for until two of them have moved the weights: gradients may be accumulated, and
# a learning rate may begin at zero.
_MAX_STEPS = 128
_N_MOVES = 2

# What an optimizer may raise that meets a buffer, or not its leaves. A timeout, say, isn't its own.
_ERRORS = AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError

_INSTEAD = (
    "Pack without it, and show it trees: `opt_state = optimizer.init(eqx.filter(model, "
    "eqx.is_inexact_array))`, in the step `updates, opt_state = optimizer.update("
    "eqx.filter(grads.unpack(), eqx.is_inexact_array), opt_state, eqx.filter(params.unpack(), "
    "eqx.is_inexact_array))`, and after it `params = params.repack(eqx.apply_updates("
    "params.unpack(), updates))`."
)


def _check_optimizer(optimizer: Any, layout: Layout) -> None:
    """Raise if an optimizer's updates of a `Packed` aren't those of the tree, to rounding."""
    # Without `jit`, a hundred steps would take longer than compiling one.
    update = eqx.filter_jit(optimizer.update)

    def steps(wrap: Callable[[list[Any]], Any], size: float) -> Iterator[Any]:
        """Yield the updates of each step, for gradients of a size; `wrap` is given arrays."""
        weights = wrap(random_arrays(layout.types, 0, 1.0))
        state = optimizer.init(weights)
        for number in itertools.count(1):
            gradients = wrap(random_arrays(layout.types, number, size))
            try:
                updates, state = update(gradients, state, weights)
            except TypeError as error:
                error.add_note(
                    "`pack` tries the optimizer by `optimizer.update(gradients, state, params)`. "
                    "If it takes more, bind that by `functools.partial`, or pass `optimizer=None`."
                )
                raise
            weights = eqx.apply_updates(weights, updates)
            yield updates

    n_steps = _MAX_STEPS
    # Without gradients there is nothing that hides the decay of weights, however small it is.
    for size in (1.0, 0.0):
        n_moves = 0
        steps_of_tree = steps(lambda arrays: eqx.filter(layout.combine(arrays), is_array), size)
        steps_of_packed = steps(lambda arrays: Packed(layout.gather(arrays), layout), size)
        for number, updates in enumerate(steps_of_tree, 1):
            expected = eqx.filter(updates, is_array)
            try:
                found = eqx.filter(next(steps_of_packed).unpack(), is_array)
                relative = jax.tree.map(_difference, expected, found)
            except _ERRORS as error:
                raise ValueError(
                    "This optimizer doesn't fit a `Packed`: it takes the tree, but raises an error "
                    f"for the `Packed`. {_INSTEAD}"
                ) from error
            pairs = tree_flatten_with_path(relative)[0]
            path, worst = max(pairs, key=lambda pair: pair[1], default=((), 0.0))
            leaves = tree_leaves(expected)
            if worst > _rounding(leaves, layout):
                raise ValueError(
                    "This optimizer doesn't fit a `Packed`: its updates of `tree"
                    f"{keystr(path)}` differ by {100 * worst:.3g} % from those of the tree itself, "
                    f"as a buffer hides leaves, their shapes and their names. {_INSTEAD}"
                )
            n_moves += any(map(np.any, leaves))
            if n_moves == _N_MOVES or number == n_steps:
                n_steps = number
                break


def random_arrays(types: Sequence[Type], step: int, size: float) -> list[Any]:
    """Return pseudo-random arrays, the same for the same step; None for what isn't trained."""
    arrays: list[Any] = []
    for index, kind in enumerate(types):
        generator = np.random.default_rng((step, index))
        # Of many sizes, and above what clipping of leaves lets pass.
        scale = size * (10 ** (generator.uniform() + step % 2) if step else 1.0)
        real, imaginary = generator.standard_normal((2, *kind.shape))
        is_complex = jnp.issubdtype(kind.dtype, jnp.complexfloating)
        values = scale * (real + 1j * imaginary if is_complex else real)
        is_trained = jnp.issubdtype(kind.dtype, jnp.inexact)
        arrays.append(jax.device_put(values.astype(kind.dtype)) if is_trained else None)
    return arrays


def _difference(of_tree: Any, of_packed: Any) -> float:
    """Return the mean difference of two arrays, in proportion to their mean size."""
    one, other = (np.asarray(array).astype(np.complex128) for array in (of_tree, of_packed))
    # What overflows on the tree has nothing to be compared with.
    one, other = one[np.isfinite(one)], other[np.isfinite(one)]
    if not np.all(np.isfinite(other)):
        return 1.0
    size = max(np.abs(one).sum(), np.abs(other).sum())
    return float(np.abs(one - other).sum() / size) if size else 0.0


def _rounding(updates: list[Any], layout: Layout) -> float:
    """Return how large a difference may be due to rounding, in the coarsest dtype."""
    dtypes = [array.dtype for array in (*updates, *layout.types)]
    inexact = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    return 1e-4 + 8 * max((float(jnp.finfo(dtype).eps) for dtype in inexact), default=0.0)
