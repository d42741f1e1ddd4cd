"""What made it retrace? One or two of the many arguments of a training step have changed.

(https://github.com/jax-ml/jax/issues/4274)
"""

import logging

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import eqxjit

optimizer = optax.adam(1e-3)


@eqxjit.filter_jit
def train_step(model, opt_state, batch, step):
    """Take one step of Adam, with a warm-up of the loss."""

    def loss(model):
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2) * jnp.minimum(
            1.0, step / 10
        )

    updates, opt_state = optimizer.update(eqx.filter_grad(loss)(model), opt_state)
    return eqx.apply_updates(model, updates), opt_state


def main() -> None:
    """Print what differs between the steps."""
    logging.basicConfig(format="%(message)s")
    model = eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    batch = {"x": jnp.ones((32, 4)), "y": jnp.ones((32, 1))}
    last_batch = {"x": jnp.ones((20, 4)), "y": jnp.ones((20, 1))}
    with eqxjit.explain_retraces():
        model, opt_state = train_step(model, opt_state, batch, 1)
        model, opt_state = train_step(model, opt_state, batch, 2)
        train_step(model, opt_state, last_batch, 2)


if __name__ == "__main__":
    main()
