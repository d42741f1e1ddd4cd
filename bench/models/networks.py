"""The Equinox models and functions that the benchmarks call."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, PRNGKeyArray

LossFn = Callable[..., Array]


def call(model: Callable[..., Any], x: Array) -> Any:
    """Call the model on one example."""
    return model(x)


def batched(model: Callable[[Array], Array], x: Array) -> Array:
    """Call the model on a batch."""
    return jax.vmap(model)(x)


def small_mlp(width: int = 32) -> eqx.nn.MLP:
    """Return an MLP of three layers, with 4 inputs and 4 outputs."""
    return eqx.nn.MLP(4, 4, width, depth=2, key=jr.key(0))


def mean_squared_error(model: Callable[..., Array], x: Array, y: Array) -> Array:
    """Return the mean squared error of a batch."""
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def training_step(
    optimizer: optax.GradientTransformation, loss: LossFn = mean_squared_error
) -> Callable[..., Any]:
    """Return a training step `(model, opt_state, x, y) -> (model, opt_state, loss)`."""

    def step(model: Any, opt_state: Any, x: Array, y: Array) -> tuple[Any, Any, Array]:
        out, gradients = eqx.filter_value_and_grad(loss)(model, x, y)
        parameters = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(gradients, opt_state, parameters)
        return eqx.apply_updates(model, updates), opt_state, out

    return step


class Block(eqx.Module):
    """A pre-norm transformer block: 7 Modules and 12 arrays."""

    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    qkv: eqx.nn.Linear
    project: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, *, key: PRNGKeyArray) -> None:
        keys = jr.split(key, 4)
        self.norm1 = eqx.nn.LayerNorm(width)
        self.norm2 = eqx.nn.LayerNorm(width)
        self.qkv = eqx.nn.Linear(width, 3 * width, key=keys[0])
        self.project = eqx.nn.Linear(width, width, key=keys[1])
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[2])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[3])
        self.heads = heads

    def __call__(self, x: Array) -> Array:
        """Take and return an array of shape (length, width)."""
        q, k, v = jnp.split(jax.vmap(self.qkv)(jax.vmap(self.norm1)(x)), 3, axis=-1)
        x = x + jax.vmap(self.project)(attention(q, k, v, self.heads))
        hidden = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x)))
        return x + jax.vmap(self.down)(hidden)


def attention(q: Array, k: Array, v: Array, heads: int) -> Array:
    """Apply multi-head attention to arrays of shape (length, width)."""
    q, k, v = (a.reshape(a.shape[0], heads, -1) for a in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v).reshape(q.shape[0], -1)


class Transformer(eqx.Module):
    """A stack of blocks; by default 12, with 85 Modules and 144 arrays in all."""

    blocks: list[Block]

    def __init__(
        self, width: int = 16, heads: int = 2, depth: int = 12, *, key: PRNGKeyArray
    ) -> None:
        self.blocks = [Block(width, heads, key=k) for k in jr.split(key, depth)]

    def __call__(self, x: Array) -> Array:
        """Take and return an array of shape (length, width)."""
        for block in self.blocks:
            x = block(x)
        return x


class ConvNet(eqx.Module):
    """Two convolutions with BatchNorm, averaged over the image. It takes one image at a time."""

    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    norm1: eqx.nn.BatchNorm
    norm2: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, *, key: PRNGKeyArray) -> None:
        keys = jr.split(key, 3)
        self.conv1 = eqx.nn.Conv2d(1, 4, 3, padding=1, key=keys[0])
        self.conv2 = eqx.nn.Conv2d(4, 8, 3, padding=1, key=keys[1])
        self.norm1 = eqx.nn.BatchNorm(4, "batch", mode="batch")
        self.norm2 = eqx.nn.BatchNorm(8, "batch", mode="batch")
        self.head = eqx.nn.Linear(8, 10, key=keys[2])

    def __call__(self, x: Array, state: eqx.nn.State) -> tuple[Array, eqx.nn.State]:
        """Take an image of shape (1, height, width), and return 10 logits."""
        x, state = self.norm1(self.conv1(x), state)
        x, state = self.norm2(self.conv2(jax.nn.relu(x)), state)
        return self.head(jnp.mean(jax.nn.relu(x), axis=(1, 2))), state


def batch_forward(model: ConvNet, state: eqx.nn.State, images: Array) -> tuple[eqx.nn.State, Array]:
    """Call a model with state on a batch, in training mode."""
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    logits, state = batched(images, state)
    return state, logits


def small_conv_net(*, key: PRNGKeyArray) -> eqx.nn.Sequential:
    """Return two convolutions and a linear layer, from shape (1, 8, 8) to 10 logits."""
    keys = jr.split(key, 3)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 8, 3, padding=1, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Conv2d(8, 16, 3, stride=2, padding=1, key=keys[1]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(16 * 4 * 4, 10, key=keys[2]),
        ]
    )


class Recurrent(eqx.Module):
    """A GRU over a sequence, followed by a linear layer on its last state."""

    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, inputs: int, width: int, outputs: int, *, key: PRNGKeyArray) -> None:
        keys = jr.split(key)
        self.cell = eqx.nn.GRUCell(inputs, width, key=keys[0])
        self.head = eqx.nn.Linear(width, outputs, key=keys[1])

    def __call__(self, xs: Array) -> Array:
        """Take a sequence of shape (length, inputs), and return the outputs."""
        start = jnp.zeros(self.cell.hidden_size)
        last, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), start, xs)
        return self.head(last)


class DropoutNet(eqx.Module):
    """An MLP with dropout, whose structure differs between training and evaluation."""

    first: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, width: int = 32, *, key: PRNGKeyArray) -> None:
        keys = jr.split(key)
        self.first = eqx.nn.Linear(4, width, key=keys[0])
        self.dropout = eqx.nn.Dropout(0.1)
        self.last = eqx.nn.Linear(width, 4, key=keys[1])

    def __call__(self, x: Array, key: PRNGKeyArray) -> Array:
        """Take and return 4 features."""
        return self.last(self.dropout(jax.nn.relu(self.first(x)), key=key))


class Affine(eqx.Module):
    """The Module in the trees of `tree_of`."""

    weight: Any
    bias: Any
    name: str = eqx.field(static=True)


def tree_of(leaves: int) -> Any:
    """Return a nested tree with this many scalar arrays, all different.

    Levels alternate between dicts and lists with at most ten children. At the bottom, two leaves
    form a Module, as a weight and a bias would. A tree of 1,000 leaves has 500 Modules in 111
    containers, and is four levels deep.
    """
    values = iter(jnp.arange(leaves, dtype=jnp.float32))

    def grow(count: int, depth: int) -> Any:
        if count == 1:
            return next(values)
        if count == 2:
            return Affine(next(values), next(values), name=f"level {depth}")
        parts = min(10, count) if count > 10 else (count + 1) // 2
        sizes = [count // parts + (i < count % parts) for i in range(parts)]
        children = [grow(size, depth + 1) for size in sizes]
        if depth % 2:
            return children
        return {f"branch{i}": child for i, child in enumerate(children)}

    return grow(leaves, 0)


def sample_of(tree: Any) -> Array:
    """Return the sum of ten leaves spread over the tree."""
    leaves = jax.tree.leaves(tree)
    return sum(leaves[:: max(1, len(leaves) // 10)], start=jnp.zeros(()))
