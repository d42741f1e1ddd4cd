"""The tools that users know keep working: on upstream's wrapper, on `jax.jit`, and on ours."""

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from tests.support.sides import CALLS, both

X = jnp.arange(3.0)


@both
def test_equinox_counts_traces_inside(filter_jit):
    @filter_jit
    @eqx.debug.assert_max_traces(max_traces=2)
    def f(x, n):
        return x * n

    for n in (1, 2):
        for _ in range(CALLS):
            f(X, n)
    assert eqx.debug.get_num_traces(f) == 2
    with pytest.raises(RuntimeError, match="can only be traced 2 times"):
        f(X, 3)
    if filter_jit is eqxjit.filter_jit:
        assert f.cache_info().traces == len(f.traces()) == 2


@both
def test_chex_counts_traces_inside(filter_jit):
    def f(x, n):
        return x * n

    # It goes by a function's source, whichever `filter_jit` is around it.
    chex.clear_trace_counter()
    f = filter_jit(chex.assert_max_traces(f, n=2))
    for n in (1, 2):
        for _ in range(CALLS):
            f(X, n)
    with pytest.raises(AssertionError, match="traced > 2 times"):
        f(X, 3)


@both
@pytest.mark.parametrize("warm", [1, CALLS])
def test_no_tracing(filter_jit, warm):
    f = filter_jit(lambda x: x * 2)
    for _ in range(warm):
        f(X)
    with jax.no_tracing():
        for _ in range(CALLS):
            assert f(X).tolist() == [0, 2, 4]
        with pytest.raises(RuntimeError, match="no_tracing"):
            f(X[:2])
    assert f(X[:2]).tolist() == [0, 2]
