"""Trains a neural ODE by Diffrax on spirals, interrupts, and continues from a checkpoint.

`equinox.tree_serialise_leaves` writes the checkpoint; nothing in it refers to eqxjit.
"""

import argparse
import pathlib
import tempfile

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from eqxjit import filter_jit

TIMES = jnp.linspace(0.0, 1.0, 8)
optimizer = optax.adam(3e-3)


class NeuralODE(eqx.Module):
    """A differential equation whose vector field is a network."""

    field: eqx.nn.MLP

    def __call__(self, start: jax.Array) -> jax.Array:
        """Solve the equation from a point, and return the points at `TIMES`."""
        term = diffrax.ODETerm(lambda t, y, args: self.field(y))
        # Without `throw=False` the program holds a callback, so that each call waits.
        span, save = (TIMES[0], TIMES[-1], 0.1), diffrax.SaveAt(ts=TIMES)
        solved = diffrax.diffeqsolve(term, diffrax.Tsit5(), *span, start, saveat=save, throw=False)
        assert solved.ys is not None
        return solved.ys


@filter_jit(donate="all-except-first")
def train_step(batch, model: NeuralODE, state: optax.OptState):
    """Take one step. The batch isn't donated."""

    def loss(model):
        return jnp.mean((jax.vmap(model)(batch[:, 0]) - batch) ** 2)

    value, gradients = eqx.filter_value_and_grad(loss)(model)
    updates, state = optimizer.update(gradients, state)
    return eqx.apply_updates(model, updates), state, value


def start() -> tuple[NeuralODE, optax.OptState]:
    """Return a new model and optimizer state. Loading a checkpoint also needs them."""
    model = NeuralODE(eqx.nn.MLP(2, 2, 16, 2, jax.nn.softplus, key=jax.random.key(0)))
    return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))


def main() -> None:
    """Train, save, load, and continue."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    angles = jax.random.uniform(jax.random.key(1), (32, 1), maxval=2 * jnp.pi) + 3 * TIMES
    radii = jnp.exp(-TIMES)[:, None]
    spirals = radii * jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint.eqx"
    model, state = start()
    for step in range(steps):
        if step == steps // 2:
            eqx.tree_serialise_leaves(path, (model, state))
            model, state = eqx.tree_deserialise_leaves(path, start())
        model, state, loss = train_step(spirals, model, state)
        if step in (0, steps // 2, steps - 1):
            print(f"step {step + 1}: loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
