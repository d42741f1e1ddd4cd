"""The rows of `bench shapes`. In each row one function is called with several shapes or dtypes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array

from ..harness.competitors import Cases, jitted_over
from .networks import Transformer, batched, call, small_mlp, training_step

FIRST_BATCH = 8
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32)


@dataclass(frozen=True)
class Row:
    """One row.

    - `build`: returns the cases of this many shapes, the known shapes first.
    - `known`: how many shapes the function is warm with, before it is traced for the others.
    """

    build: Callable[[int], list[Cases]]
    known: int = 3


def _inputs(count: int) -> list[Array]:
    """Return this many batches of different sizes."""
    return [jr.normal(jr.key(size), (size, 4)) for size in range(FIRST_BATCH, FIRST_BATCH + count)]


def _mlp_over(inputs: list[Array]) -> list[Cases]:
    model = small_mlp()
    return jitted_over(batched, [{"model": model, "x": x} for x in inputs])


def mlp(shapes: int) -> list[Cases]:
    """Call an MLP of three layers on batches."""
    return _mlp_over(_inputs(shapes))


def gru(shapes: int) -> list[Cases]:
    """Take a GRU step on a batch. Each call gets the hidden states of the call before."""
    cell = eqx.nn.GRUCell(4, 32, key=jr.key(0))

    def step(cell: eqx.nn.GRUCell, x: Array, h: Array) -> Array:
        return jax.vmap(cell)(x, h)

    examples = [{"cell": cell, "x": x, "h": jnp.zeros((len(x), 32))} for x in _inputs(shapes)]
    return jitted_over(step, examples, ("h",))


def training(shapes: int) -> list[Cases]:
    """Take an adam step. Each call donates its model and optimizer state, and returns new ones."""
    model, optimizer = small_mlp(), optax.adam(1e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    examples = [
        {"model": model, "opt_state": state, "x": x, "y": jnp.sin(x)} for x in _inputs(shapes)
    ]
    outputs = ("model", "opt_state", "loss")
    return jitted_over(training_step(optimizer), examples, outputs, donate="all")


def transformer(shapes: int) -> list[Cases]:
    """Call a transformer of 12 small blocks. `bench startup` alone uses it, as traces take long."""
    model = Transformer(key=jr.key(0))
    xs = [jnp.ones((FIRST_BATCH + i, 16)) for i in range(shapes)]
    return jitted_over(call, [{"model": model, "x": x} for x in xs])


def dtypes(shapes: int) -> list[Cases]:
    """Call an MLP on a batch of each dtype. All further shapes are batches of other sizes."""
    first, *others = _inputs(1 + shapes - len(DTYPES))
    return _mlp_over([*((10 * first).astype(dtype) for dtype in DTYPES), *others])


ROWS: Mapping[str, Row] = {
    "MLP": Row(mlp),
    "GRU step": Row(gru),
    "MLP + adam, donated": Row(training),
    "4 dtypes": Row(dtypes, known=len(DTYPES)),
    "8 batch sizes": Row(mlp, known=8),
}
