"""Why does the first call take so long, when compiling seems to take no time at all?

Timing `filter_jit(f)` times nothing: tracing and compiling happen in the first call. The report
says where that call's time goes.
"""

import time

import equinox as eqx
import jax
import jax.numpy as jnp

import eqxjit


def rollout(model: eqx.nn.MLP, state: jax.Array) -> jax.Array:
    """A few hundred steps of a learned dynamics, as a loop in Python."""
    for _ in range(300):
        state = state + 0.01 * model(state)
    return state


def main() -> None:
    """Prints what the first call cost."""
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    state = jnp.ones(4)
    start = time.perf_counter()
    fast_rollout = eqxjit.filter_jit(rollout)
    print(f"filter_jit(rollout): {time.perf_counter() - start:.4f} s")
    with eqxjit.compile_report():
        fast_rollout(model, state)


if __name__ == "__main__":
    main()
