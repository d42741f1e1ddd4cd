"""The tasks of `bench training`: models with their optimizers and batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array

from .networks import ConvNet, Recurrent, Transformer, batch_forward, mean_squared_error


@dataclass(frozen=True)
class Task:
    """A model to train.

    - `model`: the model.
    - `optimizer`: its optimizer.
    - `loss`: `loss(model, state, *batch)` returns the loss and the new state.
    - `batch`: the arrays that each step gets.
    - `state`: the state of the model, such as BatchNorm's, which isn't differentiated.
    """

    model: Any
    optimizer: optax.GradientTransformation
    loss: Callable[..., tuple[Array, Any]]
    batch: tuple[Array, ...]
    state: Any = None


def _regression(model: Any, state: Any, x: Array, y: Array) -> tuple[Array, Any]:
    return mean_squared_error(model, x, y), state


def _mlp_task(depth: int, width: int, optimizer: optax.GradientTransformation) -> Task:
    model = eqx.nn.MLP(4, 4, width, depth, key=jr.key(0))
    x = jr.normal(jr.key(1), (8, 4))
    return Task(model, optimizer, _regression, (x, jnp.sin(x)))


def gru() -> Task:
    """Return a GRU of width 32 over 16 time steps, with rmsprop and a batch of 4."""
    x = jr.normal(jr.key(1), (4, 16, 4))
    batch = (x, jnp.sin(x[:, -1]))
    return Task(Recurrent(4, 32, 4, key=jr.key(0)), optax.rmsprop(1e-3), _regression, batch)


def conv_net() -> Task:
    """Return a CNN with BatchNorm, with adam and a batch of 4 images of 8 by 8."""
    model, state = eqx.nn.make_with_state(ConvNet)(key=jr.key(0))

    def loss(
        model: ConvNet, state: eqx.nn.State, images: Array, labels: Array
    ) -> tuple[Array, Any]:
        state, logits = batch_forward(model, state, images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses), state

    batch = (jr.normal(jr.key(1), (4, 1, 8, 8)), jnp.arange(4))
    return Task(model, optax.adam(1e-3), loss, batch, state)


def transformer() -> Task:
    """Return a transformer of 12 small blocks, with adamw and a batch of 2 by 8 tokens."""
    x = jr.normal(jr.key(1), (2, 8, 16))
    return Task(Transformer(key=jr.key(0)), optax.adamw(1e-3), _regression, (x, jnp.sin(x)))


TASKS: dict[str, Callable[[], Task]] = {
    "MLP + adam": lambda: _mlp_task(2, 32, optax.adam(1e-3)),
    "deep MLP + adamw": lambda: _mlp_task(
        20, 32, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    ),
    "GRU + rmsprop": gru,
    "CNN, BatchNorm + adam": conv_net,
    "transformer + adamw": transformer,
    "several MB + adam": lambda: _mlp_task(12, 256, optax.adam(1e-3)),
}
