"""Why does the second call compile once more?

The first state is made of a Python number, so its type is weak; the second is what the step
returned.
"""

import logging

import jax
import jax.numpy as jnp

import eqxjit


@eqxjit.filter_jit
def step(velocity: jax.Array, gain: jax.Array) -> jax.Array:
    """One step of a loop whose state goes round."""
    return velocity * jnp.asarray(0.9, dtype=jnp.float32) + gain


def main() -> None:
    """Prints why the second call is traced again."""
    logging.basicConfig(format="%(message)s")
    velocity = jnp.asarray(0.0)
    gain = jnp.asarray(0.1)
    with eqxjit.explain_retraces():
        for _ in range(5):
            velocity = step(velocity, gain)


if __name__ == "__main__":
    main()
