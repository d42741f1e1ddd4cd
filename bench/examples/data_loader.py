"""Trains on batches of a NumPy data loader, which fills one buffer again and again.

A call copies its NumPy inputs and returns before the step is done. So the loader may overwrite the
buffer at once, and prepares the next batch while the device computes.
"""

import argparse
import time
from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from eqxjit import filter_jit

BATCH, SIZE = 128, 28
optimizer = optax.adam(1e-3)


def loader(images: np.ndarray, labels: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield shuffled, augmented batches, all in the same two arrays."""
    rng = np.random.default_rng(0)
    batch = np.empty((BATCH, SIZE, SIZE), np.float32), np.empty(BATCH, np.int32)
    order = rng.permutation(len(images))[: len(images) // BATCH * BATCH]
    for rows in order.reshape(-1, BATCH):
        np.take(images, rows, axis=0, out=batch[0])
        np.take(labels, rows, out=batch[1])
        batch[0][:] = np.roll(batch[0], rng.integers(-2, 3, size=2), axis=(1, 2))
        yield batch


@filter_jit(donate="all-except-first")
def train_step(batch, model: eqx.nn.MLP, state: optax.OptState):
    """Take one step. The batch isn't donated."""
    images, labels = batch

    def loss(model):
        logits = jax.vmap(model)(images.reshape(BATCH, -1))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, gradients = eqx.filter_value_and_grad(loss)(model)
    updates, state = optimizer.update(gradients, state)
    return eqx.apply_updates(model, updates), state, value


def main() -> None:
    """Train on images of a bright quadrant, whose number is the label."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    epochs = parser.parse_args().epochs
    rng = np.random.default_rng(1)
    labels = rng.integers(4, size=4_096, dtype=np.int32)
    images = rng.normal(size=(len(labels), SIZE, SIZE)).astype(np.float32)
    for image, label in zip(images, labels, strict=True):
        image.reshape(2, SIZE // 2, 2, SIZE // 2)[label // 2, :, label % 2] += 0.5
    model = eqx.nn.MLP(SIZE**2, 4, 64, 1, key=jax.random.key(0))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    for epoch in range(epochs):
        start, losses = time.perf_counter(), []
        for batch in loader(images, labels):
            model, state, loss = train_step(batch, model, state)
            losses.append(loss)  # an array: reading it here would wait for the step
        mean = float(jnp.stack(losses).mean())
        seconds = time.perf_counter() - start
        print(f"epoch {epoch + 1}: mean loss {mean:.3f}, {len(losses) / seconds:,.0f} steps/s")


if __name__ == "__main__":
    main()
