"""Trains an MLP with adam to classify the UCI digits that scikit-learn bundles."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from .networks import training_step

Data = tuple[np.ndarray, np.ndarray]  # images and their labels

BATCH = 32


@dataclass(frozen=True)
class Epoch:
    """The results of one epoch of a run."""

    model: eqx.nn.MLP
    losses: list[np.ndarray]
    microseconds: float  # per step


def train(filter_jit: Callable[..., Any], data: Data, epochs: int) -> Iterator[Epoch]:
    """Train, and yield the results of each epoch. Only `filter_jit` differs between the runs."""
    images, labels = data
    model = eqx.nn.MLP(64, 10, 32, depth=2, key=jr.key(0))
    optimizer = optax.adam(2e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    step = filter_jit(training_step(optimizer, loss))
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        order = rng.permutation(len(labels))[: len(labels) // BATCH * BATCH]
        batches = [
            (jnp.asarray(images[i]), jnp.asarray(labels[i])) for i in order.reshape(-1, BATCH)
        ]
        losses = []
        start = time.perf_counter()
        for x, y in batches:
            model, state, value = step(model, state, x, y)
            losses.append(value)
        jax.block_until_ready(losses)
        seconds = time.perf_counter() - start
        yield Epoch(model, [np.asarray(value) for value in losses], seconds / len(batches) * 1e6)


def loss(model: eqx.nn.MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of a batch."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y))


def accuracy(model: eqx.nn.MLP, data: Data) -> float:
    """Return the fraction of images that the model classifies correctly."""
    images, labels = data
    predicted = jnp.argmax(jax.vmap(model)(jnp.asarray(images)), axis=-1)
    return float(np.mean(np.asarray(predicted) == labels))


def digits() -> tuple[Data, Data]:
    """Return 1,437 images for training and 360 for testing, each with 8x8 pixels from 0 to 1."""
    images, labels = load_digits(return_X_y=True)
    images = np.asarray(images / 16, dtype=np.float32)
    split = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = map(np.asarray, split)
    return (train_images, train_labels), (test_images, test_labels)
