"""How do I count compilations, and forbid further ones?

(https://github.com/patrick-kidger/equinox/issues/151)
"""

import equinox as eqx
import jax
import jax.numpy as jnp

import eqxjit


@eqxjit.filter_jit(max_traces=2)
def predict(model: eqx.nn.Linear, x: jax.Array) -> jax.Array:
    """Apply a model to a batch."""
    return jax.vmap(model)(x)


def main() -> None:
    """Print the counts, and the error for the third batch size."""
    model = eqx.nn.Linear(4, 2, key=jax.random.key(0))
    for batch_size in (32, 32, 7):
        predict(model, jnp.ones((batch_size, 4)))
    # Type checkers see a plain function without this line.
    assert isinstance(predict, eqxjit.types.JitFunction)
    print(predict.cache_info())
    for trace in predict.traces():
        print(trace)
    try:
        predict(model, jnp.ones((5, 4)))
    except eqxjit.TooManyTracesError as error:
        print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
