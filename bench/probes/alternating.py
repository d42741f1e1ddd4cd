"""`python -m bench.probes.alternating`: structures in turn that differ only in their last leaf.

A fast path that doesn't match is found out only at the leaf that differs. So each call compares
much of its argument with many fast paths. The limit is described on the page about differences.
"""

import collections
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import eqxjit

_N_ROUNDS = 12


def _microseconds(f: Callable[[Any], jax.Array], arguments: list[Any]) -> float:
    """Return the microseconds of a call, over one call of each argument."""
    begun = time.perf_counter()
    results = [f(each) for each in arguments]
    jax.block_until_ready(results)
    return (time.perf_counter() - begun) / len(arguments) * 1e6


def _compare(name: str, arguments: list[Any]) -> None:
    def function(_: Any) -> jax.Array:
        return jnp.zeros(())

    compiled = eqx.filter_jit(function), eqxjit.filter_jit(function)
    # The first round compiles.
    rounds = [[_microseconds(f, arguments) for f in compiled] for _ in range(1 + _N_ROUNDS)][1:]
    equinox, ours = map(min, zip(*rounds, strict=True))
    print(f"{name}: Equinox {equinox:,.0f} us, eqxjit {ours:,.0f} us, {ours / equinox:.2f} times")


if __name__ == "__main__":
    x = jnp.arange(3.0)
    mapping = collections.OrderedDict((f"key{i}", x) for i in range(50))
    mlps = [eqx.nn.MLP(2, 2, 4, 3, key=jax.random.key(0)) for _ in range(50)]
    for text, large, n in (
        ("an OrderedDict of 50 arrays", mapping, 8),
        ("an OrderedDict of 50 arrays", mapping, 20),
        ("10 MLPs", mlps[:10], 48),
        ("50 MLPs", mlps, 48),
    ):
        _compare(f"{n} pairs of {text} and an int", [(large, i) for i in range(n)])
        _compare(f"{n} pairs of an int and {text}", [(i, large) for i in range(n)])
