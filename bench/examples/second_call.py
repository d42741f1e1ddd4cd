"""Why does the second call compile once more?

The first state is created from a Python number, so its type is weak. The second state comes from
the step, whose type isn't.
"""

import logging

import jax
import jax.numpy as jnp

import eqxjit


@eqxjit.filter_jit
def step(velocity: jax.Array, gain: jax.Array) -> jax.Array:
    """Take one step of a loop that passes its state on."""
    return velocity * jnp.asarray(0.9, dtype=jnp.float32) + gain


def main() -> None:
    """Print why the second call is traced again."""
    logging.basicConfig(format="%(message)s")
    velocity = jnp.asarray(0.0)
    gain = jnp.asarray(0.1)
    with eqxjit.explain_retraces():
        for _ in range(5):
            velocity = step(velocity, gain)


if __name__ == "__main__":
    main()
