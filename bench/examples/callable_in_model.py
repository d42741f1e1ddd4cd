"""Why does a model that holds a callable compile again each time that it is created?

`jax.jit(...)` and `lambda` create a new object each time, and callables compare by identity
(https://github.com/patrick-kidger/equinox/issues/686).
"""

import logging
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp

import eqxjit


class Layer(eqx.Module):
    """A linear layer with an activation of its own."""

    linear: eqx.nn.Linear
    activation: Callable[[jax.Array], jax.Array]

    def __init__(self, key: jax.Array):
        self.linear = eqx.nn.Linear(4, 4, key=key)
        self.activation = lambda x: jax.nn.leaky_relu(x, 0.1)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layer."""
        return self.activation(self.linear(x))


@eqxjit.filter_jit
def forward(model: Layer, x: jax.Array) -> jax.Array:
    """Call the model."""
    return model(x)


def main() -> None:
    """Print why the call with the second model is traced again."""
    logging.basicConfig(format="%(message)s")
    with eqxjit.explain_retraces():
        for seed in range(2):
            forward(Layer(jax.random.key(seed)), jnp.ones(4))


if __name__ == "__main__":
    main()
