"""The rows of `bench shapes`: one function, called with several shapes or dtypes."""

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
    """Shapes that a function knows before others are traced.

    - `build`: the cases of so many shapes: those known, then others.
    - `known`: how many shapes are.
    """

    build: Callable[[int], list[Cases]]
    known: int = 3


def _inputs(count: int) -> list[Array]:
    """Batches of different sizes."""
    return [jr.normal(jr.key(size), (size, 4)) for size in range(FIRST_BATCH, FIRST_BATCH + count)]


def _mlp_over(inputs: list[Array]) -> list[Cases]:
    model = small_mlp()
    return jitted_over(batched, [{"model": model, "x": x} for x in inputs])


def mlp(shapes: int) -> list[Cases]:
    """An MLP of three layers."""
    return _mlp_over(_inputs(shapes))


def gru(shapes: int) -> list[Cases]:
    """A GRU step on a batch, the hidden states fed back."""
    cell = eqx.nn.GRUCell(4, 32, key=jr.key(0))

    def step(cell: eqx.nn.GRUCell, x: Array, h: Array) -> Array:
        return jax.vmap(cell)(x, h)

    examples = [{"cell": cell, "x": x, "h": jnp.zeros((len(x), 32))} for x in _inputs(shapes)]
    return jitted_over(step, examples, ("h",))


def training(shapes: int) -> list[Cases]:
    """An adam step; model and optimizer state donated and fed back."""
    model, optimizer = small_mlp(), optax.adam(1e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    examples = [
        {"model": model, "opt_state": state, "x": x, "y": jnp.sin(x)} for x in _inputs(shapes)
    ]
    outputs = ("model", "opt_state", "loss")
    return jitted_over(training_step(optimizer), examples, outputs, donate="all")


def transformer(shapes: int) -> list[Cases]:
    """A transformer of 12 small blocks: for first calls alone, as each trace takes seconds."""
    model = Transformer(key=jr.key(0))
    xs = [jnp.ones((FIRST_BATCH + i, 16)) for i in range(shapes)]
    return jitted_over(call, [{"model": model, "x": x} for x in xs])


def dtypes(shapes: int) -> list[Cases]:
    """An MLP, given a batch of each dtype; what else is traced has another size."""
    first, *others = _inputs(1 + shapes - len(DTYPES))
    return _mlp_over([*((10 * first).astype(dtype) for dtype in DTYPES), *others])


ROWS: Mapping[str, Row] = {
    "MLP": Row(mlp),
    "GRU step": Row(gru),
    "MLP + adam, donated": Row(training),
    "4 dtypes": Row(dtypes, known=len(DTYPES)),
    "8 batch sizes": Row(mlp, known=8),
}
