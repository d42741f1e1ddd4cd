"""Tools for `jax.jit` and for Equinox's wrapper also work on eqxjit's."""

import functools
import itertools
import warnings

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

    # Chex identifies a function by its source, whichever `filter_jit` wraps it.
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


class Model(eqx.Module):
    @eqxjit.filter_jit
    def step(self, x):
        return x


@pytest.mark.parametrize(
    "jitted",
    [jax.jit(lambda x: x), eqxjit.filter_jit(lambda x: x), Model.step, Model().step],
    ids=["jax.jit", "function", "unbound", "bound"],
)
def test_chex_outside_says_to_swap(jitted):
    """Around a jitted function it would see no trace, and count none."""
    with pytest.raises(ValueError, match="change wrappers ordering"):
        chex.assert_max_traces(jitted, n=1)
    with pytest.raises(ValueError, match="change wrappers ordering"):
        chex.assert_max_traces(n=1)(jitted)


ITERATORS = {
    "zip": lambda: zip((1,), (2,), strict=True),
    "map": lambda: map(abs, [1]),
    "generator": lambda: (i for i in (1,)),
    "filter": lambda: filter(None, [1]),
    "enumerate": lambda: enumerate([1]),
    "iterator of a list": lambda: iter([1]),
    "count": itertools.count,
    "list": lambda: [1],
}


@pytest.mark.parametrize("name", ITERATORS)
@pytest.mark.parametrize("place", ["in", "out"])
def test_jax_warns_of_iterators(name, place):
    """Equinox warns in each call. Here a warm call with the same object is silent."""
    make = ITERATORS[name]

    def warnings_of(filter_jit):
        if place == "in":
            f = functools.partial(filter_jit(lambda x, static: x), X, static := make())
        else:
            static = None
            f = functools.partial(filter_jit(lambda x: (x, make())), X)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            f()
        if static is not None:
            assert next(iter(static)) in (0, 1, (1, 2), (0, 1))
        return {(each.category, str(each.message)) for each in caught}

    assert warnings_of(eqxjit.filter_jit) == warnings_of(eqx.filter_jit)
