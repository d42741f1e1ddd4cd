"""Equinox's own examples, condensed. Each yields its losses.

The models and steps follow the examples of https://docs.kidger.site/equinox, but are small and run
on random data.
"""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from ..models.networks import (
    ConvNet,
    Recurrent,
    Transformer,
    batch_forward,
    mean_squared_error,
    small_conv_net,
)

_STEPS = 5


def _gradient_steps(model: Any, loss_of: Callable[..., Any], *batch: Any) -> Iterator[Any]:
    """Yield the loss of each step, then the arrays of the trained model."""

    @eqx.filter_jit
    def make_step(model: Any, *batch: Any) -> Any:
        loss, gradients = eqx.filter_value_and_grad(loss_of)(model, *batch)
        updates = jax.tree.map(lambda g: -0.05 * g, gradients)
        return loss, eqx.apply_updates(model, updates)

    for _ in range(_STEPS):
        loss, model = make_step(model, *batch)
        yield loss
    yield eqx.filter(model, eqx.is_array)


def _cross_entropy(logits: Any, labels: Any) -> Any:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
    return -jnp.mean(chosen)


def rnn() -> Iterator[Any]:
    """Classify sequences by a GRU."""
    xs = jr.normal(jr.key(1), (16, 8, 2))
    ys = (xs.sum((1, 2)) > 0).astype(jnp.float32)

    def loss_of(model: Any, xs: Any, ys: Any) -> Any:
        logits = jax.vmap(model)(xs)[:, 0]
        return jnp.mean(jax.nn.softplus(logits) - ys * logits)

    yield from _gradient_steps(Recurrent(2, 16, 1, key=jr.key(0)), loss_of, xs, ys)


def cnn() -> Iterator[Any]:
    """Classify images by a convolutional network."""
    images, labels = jr.normal(jr.key(1), (8, 1, 8, 8)), jnp.arange(8) % 10

    def loss_of(model: Any, images: Any, labels: Any) -> Any:
        return _cross_entropy(jax.vmap(model)(images), labels)

    yield from _gradient_steps(small_conv_net(key=jr.key(0)), loss_of, images, labels)


class _Encoder(eqx.Module):
    embed: Any
    dropout: eqx.nn.Dropout
    attention: eqx.nn.MultiheadAttention
    blocks: Transformer
    head: eqx.nn.Linear

    def __init__(self, embed: Any, n_classes: int, key: Any):
        keys = jr.split(key, 3)
        self.embed = embed
        self.dropout = eqx.nn.Dropout(0.1)
        self.attention = eqx.nn.MultiheadAttention(2, 8, dropout_p=0.1, key=keys[0])
        self.blocks = Transformer(width=8, depth=2, key=keys[1])
        self.head = eqx.nn.Linear(8, n_classes, key=keys[2])

    def __call__(self, x: Any, key: Any) -> Any:
        keys = jr.split(key)
        x = self.dropout(jax.vmap(self.embed)(x), key=keys[0])
        x = x + self.attention(x, x, x, key=keys[1])
        return self.head(self.blocks(x)[0])


def _encoder_loss(model: Any, x: Any, labels: Any, key: Any) -> Any:
    return _cross_entropy(jax.vmap(model)(x, jr.split(key, len(x))), labels)


def bert() -> Iterator[Any]:
    """Classify sentences by an encoder of tokens, with dropout."""
    keys = jr.split(jr.key(0))
    model = _Encoder(eqx.nn.Embedding(30, 8, key=keys[0]), 2, keys[1])
    tokens = jr.randint(jr.key(1), (8, 6), 0, 30)
    yield from _gradient_steps(model, _encoder_loss, tokens, jnp.arange(8) % 2, jr.key(2))
    # Inference mode is without dropout.
    yield eqx.filter_jit(eqx.nn.inference_mode(model))(tokens[0], jr.key(0))


def vision_transformer() -> Iterator[Any]:
    """Classify images, cut into patches."""
    keys = jr.split(jr.key(0))
    model = _Encoder(eqx.nn.Linear(16, 8, key=keys[0]), 10, keys[1])
    images = jr.normal(jr.key(1), (8, 12, 12))
    patches = images.reshape(8, 3, 4, 3, 4).swapaxes(2, 3).reshape(8, 9, 16)
    yield from _gradient_steps(model, _encoder_loss, patches, jnp.arange(8), jr.key(2))


def score_based_diffusion() -> Iterator[Any]:
    """Learn a score, then sample by the reverse equation."""
    model = eqx.nn.MLP(3, 2, 16, 2, key=jr.key(0))
    data = jr.normal(jr.key(1), (16, 2)) * 0.5 + 1

    def loss_of(model: Any, data: Any, key: Any) -> Any:
        def single(y: Any, key: Any) -> Any:
            keys = jr.split(key)
            t = jr.uniform(keys[0])
            noise = jr.normal(keys[1], y.shape)
            std = jnp.sqrt(jnp.maximum(1 - jnp.exp(-t), 1e-5))
            predicted = model(jnp.append(y * jnp.exp(-0.5 * t) + std * noise, t))
            return (1 - jnp.exp(-t)) * jnp.mean((predicted + noise / std) ** 2)

        return jnp.mean(jax.vmap(single)(data, jr.split(key, len(data))))

    yield from _gradient_steps(model, loss_of, data, jr.key(2))

    @eqx.filter_jit
    def sample(model: Any, key: Any) -> Any:
        def step(y: Any, t: Any) -> Any:
            return y + 0.05 * 0.5 * (y + model(jnp.append(y, t))), None

        return jax.lax.scan(step, jr.normal(key, (2,)), jnp.linspace(1, 0, 20))[0]

    for seed in range(_STEPS):
        yield sample(model, jr.key(seed))


def stateful() -> Iterator[Any]:
    """Train a network with batch normalisation, which passes its state from step to step."""
    model, state = eqx.nn.make_with_state(ConvNet)(key=jr.key(0))
    images, labels = jr.normal(jr.key(1), (8, 1, 8, 8)), jnp.arange(8)

    @eqx.filter_jit
    def make_step(model: Any, state: Any, images: Any) -> Any:
        def loss_of(model: Any, state: Any) -> Any:
            state, logits = batch_forward(model, state, images)
            return _cross_entropy(logits, labels), state

        (loss, state), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(model, state)
        return loss, eqx.apply_updates(model, jax.tree.map(lambda g: -0.05 * g, grads)), state

    for _ in range(_STEPS):
        loss, model, state = make_step(model, state, images)
        yield loss
    inference = eqx.nn.inference_mode(model)
    yield eqx.filter_jit(lambda m, s: jax.vmap(lambda x: m(x, s)[0])(images))(inference, state)


def parallelism() -> Iterator[Any]:
    """Train on a batch that is sharded over all devices; `bench downstream` sets eight."""
    mesh = jax.make_mesh(
        (jax.device_count(),), ("batch",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    by_batch = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    yield jax.device_count()
    model = eqx.filter_shard(eqx.nn.MLP(4, 1, 16, 2, key=jr.key(0)), everywhere)
    x = jr.normal(jr.key(1), (16, 4))
    x, y = eqx.filter_shard((x, x.sum(1, keepdims=True)), by_batch)

    @eqx.filter_jit(donate="all-except-first")
    def make_step(batch: Any, model: Any) -> Any:
        batch, model = eqx.filter_shard(batch, by_batch), eqx.filter_shard(model, everywhere)
        loss, gradients = eqx.filter_value_and_grad(mean_squared_error)(model, *batch)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.05 * g, gradients))
        return loss, eqx.filter_shard(model, everywhere)

    for _ in range(_STEPS):
        loss, model = make_step((x, y), model)
        yield loss
    yield eqx.filter(model, eqx.is_array)


EXAMPLES: dict[str, Callable[[], Iterator[Any]]] = {
    fun.__name__: fun
    for fun in (rnn, cnn, bert, vision_transformer, score_based_diffusion, stateful, parallelism)
}
