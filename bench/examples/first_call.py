"""Why does the first call take so long, when compiling seems to take no time at all?

`filter_jit(f)` doesn't trace or compile anything. The first call does both. The report says where
the time of that call goes.
"""

import time

import equinox as eqx
import jax
import jax.numpy as jnp

import eqxjit


def rollout(model: eqx.nn.MLP, state: jax.Array) -> jax.Array:
    """Simulate a few hundred steps of learned dynamics, by a loop in Python."""
    for _ in range(300):
        state = state + 0.01 * model(state)
    return state


def main() -> None:
    """Print what the first call costs."""
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    state = jnp.ones(4)
    start = time.perf_counter()
    fast_rollout = eqxjit.filter_jit(rollout)
    print(f"filter_jit(rollout): {time.perf_counter() - start:.4f} s")
    with eqxjit.compile_report():
        fast_rollout(model, state)


if __name__ == "__main__":
    main()
