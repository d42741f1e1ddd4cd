"""`pack`: a pytree's small arrays in flat buffers, so that a call hands over a few arrays only."""

import itertools
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves

from .._core.errors import with_argument_errors
from .._interruptions import raise_if_interruption
from .._spec.tree import is_array, leaf_paths, split
from .._text import counted, short
from .freeze import snapshot
from .layout import Layout, layout_of

Tree = TypeVar("Tree")

_MISTAKEN = "A `Packed` {}; the tree in it may. Write `packed.unpack(){}`, in the jitted function."


class Packed(eqx.Module, Generic[Tree]):
    """A pytree whose small arrays are in flat buffers; made by `eqxjit.pack`.

    It is a pytree itself, of a few arrays: differentiate with respect to it, hand it to an
    elementwise optimizer, pass it to jitted functions and return it from them.

    - `arrays`: the buffers, and the arrays that are left as they are.
    - `layout`: everything static about the pytree. Equal pytrees share one.
    """

    arrays: tuple[Any, ...]
    layout: Layout = eqx.field(static=True)

    def unpack(self) -> Tree:
        """Return the tree that was packed, with its current arrays.

        **Returns:**

        A tree of the same structure, static values, shapes and dtypes. Packed leaves lose their
        weak types, and packed NumPy arrays become JAX arrays. Where an array here is `None`, so are
        the leaves that were in it. Leading axes, as `jax.vmap` and `jax.lax.scan` add them, are
        added to each leaf.

        **Raises:**

        - `ValueError`, if an array here was replaced by something else, or has another length.

        !!! example

            ```python
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import eqxjit
            >>> packed = eqxjit.pack({"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}, optimizer=None)
            >>> packed
            Packed(2 arrays in 1 buffer, 36 B)
            >>> jax.grad(lambda packed: packed.unpack()["w"].sum())(packed).unpack()["w"].shape
            (2, 3)

            ```
        """
        return self.layout.tree(self.arrays)

    def repack(self, tree: Tree) -> "Packed[Tree]":
        """Pack another tree of the same layout: say, after an update that isn't elementwise.

        **Arguments:**

        - `tree`: a tree such as `unpack` returns, of any values.

        **Returns:**

        A `Packed` of the same layout; `self` isn't changed.

        **Raises:**

        - `ValueError`, which says where the structure, a static value, a shape or a dtype differs.

        !!! example

            ```python
            >>> import jax.numpy as jnp
            >>> import eqxjit
            >>> packed = eqxjit.pack([jnp.zeros(3), jnp.zeros(())], optimizer=None)
            >>> packed.repack([jnp.ones(3), jnp.ones(())]).unpack()[0].sum()
            Array(3., dtype=float32)
            >>> packed.repack([jnp.ones(4), jnp.ones(())])
            Traceback (most recent call last):
            ValueError: ...shape: `tree[0]` was float32[3], is float32[4]...

            ```
        """
        return Packed(self.layout.gather(self.layout.arrays_of(tree)), self.layout)

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

    def _refuse(self, other: Any) -> Any:
        raise TypeError(_MISTAKEN.format("isn't an array, and can't be computed with", ""))

    __add__ = __sub__ = __mul__ = __truediv__ = __pow__ = __matmul__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rpow__ = __rmatmul__ = _refuse

    # Equinox prints Modules by it, field by field otherwise.
    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        shared = [members for members in self.layout.members if len(members) > 1]
        n_shared, n_alone = sum(map(len, shared)), len(self.layout.members) - len(shared)
        parts = [f"{counted(n_shared, 'array')} in {counted(len(shared), 'buffer')}"]
        if n_alone:
            parts.append(f"{n_alone} as {'it is' if n_alone == 1 else 'they are'}")
        parts.append(f"{sum([getattr(array, 'nbytes', 0) for array in self.arrays]):,} B")
        return wl.TextDoc(f"Packed({', '.join(parts)})")


def pack(tree: Tree, *, optimizer: Any, max_leaf_bytes: int = 4096) -> Packed[Tree]:
    """Pack the small arrays of a pytree into flat buffers. Check that an optimizer fits them.

    An optimizer that looks at whole leaves, their shapes or their names doesn't: LAMB, LARS, Muon,
    Adafactor, clipping leaf by leaf, weight decay with a mask.

    Each array that a jitted function takes or returns costs some microseconds, which is most of a
    training step of a small model. A packed model consists of a few arrays.

    **Arguments:**

    - `tree`: any pytree of arrays, such as a model. It isn't changed, and static lists and dicts
        in it are copied.
    - `optimizer`: an `optax.GradientTransformation`, or another object with its `init` and
        `update`, called as `update(grads, opt_state, params)`. (Bind what else it takes, such as
        `value=1.0`, by `functools.partial`.) `pack` tries it on the tree and on the `Packed`, with
        pseudo-random weights, for some steps with pseudo-random gradients and some with none. That
        takes about as long as compiling it for both. None opts out of the check.
    - `max_leaf_bytes`: arrays of more bytes (4 KiB by default) are left as they are, the same
        objects, because copying them would cost more than it saves. So are typed keys of random
        numbers, and sharded arrays. Arrays on different devices share no buffer.

    **Returns:**

    A `Packed`.

    **Raises:**

    - `ValueError`, if the optimizer's updates of the `Packed` aren't those of the tree, to
        rounding. It names the leaf whose updates differ most, and says what to write instead.
    - `ValueError`, if there is no array among the leaves of the tree, or if it is, or holds, a
        `Packed`.
    - `TypeError`, if `max_leaf_bytes` isn't an integer, or `optimizer` no optimizer.

    !!! example

        ```python
        >>> import equinox as eqx
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
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
    if isinstance(max_leaf_bytes, bool) or not isinstance(max_leaf_bytes, int):
        raise TypeError(f"`max_leaf_bytes` must be an integer; got {max_leaf_bytes!r}.")
    spec, arrays, statics = with_argument_errors(
        lambda: split(tree, is_input=False), lambda: [("tree", tree)]
    )
    if any(type(static) is Layout for static in statics):
        found = [path for path, _, value in leaf_paths(spec, tree, "tree") if type(value) is Layout]
        path = found[0].removesuffix(".layout")
        raise ValueError(f"`{path}` is packed already. To pack it anew, `unpack` it first.")
    # An optimizer without a state has none.
    if not arrays and tree_leaves(tree):
        raise ValueError(f"`pack` takes a pytree of arrays, and there is none in {short(tree)}.")
    # Copying a leaf above 4 KiB costs more than passing it along: with its matrix of 12 KiB in the
    # buffer, a GRU's step took 1.04 of the time of that on the tree, and 0.87 without.
    layout = layout_of(*snapshot(spec, arrays, statics), max_leaf_bytes)
    if optimizer is not None:
        # Within a trace, too: the check is no part of the program.
        with jax.ensure_compile_time_eval():
            _check_optimizer(optimizer, layout)
    return Packed(layout.gather(arrays), layout)


# --- Optimizers -------------------------------------------------------------------------------

# So many are waited for until two of them have moved the weights: gradients may be accumulated, and
# a learning rate may begin at zero.
_MAX_STEPS = 128
_N_MOVES = 2

_INSTEAD = (
    "Pack without it, and show it trees: `opt_state = optimizer.init(eqx.filter(model, "
    "eqx.is_inexact_array))`, in the step `updates, opt_state = optimizer.update("
    "eqx.filter(grads.unpack(), eqx.is_inexact_array), opt_state, eqx.filter(params.unpack(), "
    "eqx.is_inexact_array))`, and after it `params = params.repack(eqx.apply_updates("
    "params.unpack(), updates))`."
)


def _check_optimizer(optimizer: Any, layout: Layout) -> None:
    """Raise if an optimizer's updates of a `Packed` aren't those of the tree, to rounding."""
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise TypeError(
            "`optimizer` must have `init` and `update`, as an `optax.GradientTransformation` has; "
            f"got {short(optimizer)}."
        )
    # Without `jit`, a hundred steps would take longer than compiling one.
    update = eqx.filter_jit(optimizer.update)

    def steps(wrap: Any, unwrap: Any, size: float) -> Iterator[Any]:
        """Yield the updates of each step with gradients of a size."""
        weights = wrap(_drawn(layout, 0, 1.0))
        state = optimizer.init(weights)
        for number in itertools.count(1):
            updates, state = update(wrap(_drawn(layout, number, size)), state, weights)
            weights = eqx.apply_updates(weights, updates)
            yield eqx.filter(unwrap(updates), is_array)

    of_tree = lambda arrays: eqx.filter(layout.combine(arrays), is_array), lambda tree: tree
    of_packed = lambda arrays: Packed(layout.gather(arrays), layout), Packed.unpack
    weights = [kind for kind in layout.types if jnp.issubdtype(kind.dtype, jnp.inexact)]
    n_steps = _MAX_STEPS
    # Without gradients there is nothing that hides the decay of weights, however small it is.
    for size in (1.0, 0.0):
        n_moves, packed_steps = 0, steps(*of_packed, size)
        for number, expected in enumerate(steps(*of_tree, size), 1):
            try:
                differences = jax.tree.map(_difference, expected, next(packed_steps))
            except Exception as error:
                # The user's optimizer: a mask, say, that is a tree of the model.
                again = itertools.islice(steps(*of_packed, size), number)
                raise_if_interruption(error, lambda again=again: [*again])
                raise ValueError(
                    "This optimizer doesn't fit a `Packed`: it takes the tree, but raises an error "
                    f"for the `Packed`. {_INSTEAD}"
                ) from error
            # What may be due to rounding, in the coarsest dtype.
            leaves = jax.tree.leaves(expected)
            epsilons = [jnp.finfo(leaf.dtype).eps for leaf in (*leaves, *weights)]
            pairs = tree_flatten_with_path(differences)[0]
            path, worst = max(pairs, key=lambda pair: pair[1], default=((), 0.0))
            if worst > 1e-4 + 8 * float(max(epsilons, default=0)):
                raise ValueError(
                    "This optimizer doesn't fit a `Packed`: its updates of `tree"
                    f"{keystr(path)}` differ by {100 * worst:.3g} % from those of the tree itself, "
                    f"as a buffer hides leaves, their shapes and their names. {_INSTEAD}"
                )
            n_moves += any(map(np.any, leaves))
            if n_moves == _N_MOVES or number == n_steps:
                n_steps = number
                break


def _drawn(layout: Layout, step: int, size: float) -> list[Any]:
    """Return pseudo-random arrays, the same for the same step; None for what isn't trained."""
    arrays: list[Any] = []
    for index, kind in enumerate(layout.types):
        draw = np.random.default_rng((step, index))
        # Of many sizes, and above what clipping of leaves lets pass.
        scale = size * (10 ** (draw.uniform() + step % 2) if step else 1.0)
        real, imaginary = draw.standard_normal((2, *kind.shape))
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
