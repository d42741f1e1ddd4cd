"""Errors under eager transformations. eqxjit can't read their programs, so each call waits."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from eqxjit._compat import wrapped_by_tracer
from tests.support.inside import blocks
from tests.support.sides import CALLS


# This test is first, because JAX may run all programs inline once a callback has raised.
@pytest.mark.parametrize("is_warm", [False, True])
def test_a_call_within_a_transformation_waits(is_warm):
    def heavy(x, y):
        for _ in range(8):
            x = x @ x / 1000
        return [x, y]

    f = eqxjit.filter_jit(heavy)
    x = jnp.ones((2, 300, 300))
    for _ in range(CALLS if is_warm else 0):
        jax.block_until_ready((f(x[0], x[0]), jax.vmap(f, (0, None))(x, x[0])))
    ready = []

    def look(x, y):
        out, _ = f(x, y)
        ready.extend(value.is_ready() for value in wrapped_by_tracer(out))
        return out

    for _ in range(5):
        jax.vmap(look, (0, None))(x, x[0])
    assert ready == [True] * 5


def positive(x):
    return eqx.error_if(x, x < 0, "negative")


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_later_output_alone_may_be_transformed(kind):
    f = eqxjit.filter_jit(lambda x: kind([jnp.zeros(()), positive(x)]))
    f(jnp.ones(()))
    f(jnp.ones(()))
    for _ in range(3):
        constant, same = jax.vmap(f)(jnp.arange(3.0))
        assert constant.shape == (3,)
        assert same.tolist() == [0, 1, 2]
    with pytest.raises(Exception, match="negative"):
        jax.vmap(f)(-jnp.ones(3))


@jax.custom_jvp
def careful(x):
    return x * 2


@careful.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return careful(x), eqx.error_if(t, x < 0, "negative: no tangent")


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_rule_that_can_raise_raises_at_the_call(is_warm):
    f = eqxjit.filter_jit(lambda x: careful(x) + 1)
    good, bad = jnp.asarray(1.0), jnp.asarray(-1.0)
    for _ in range(CALLS if is_warm else 0):
        assert f(bad) == -1
    for _ in range(CALLS):
        assert jax.jvp(f, (good,), (good,)) == (3, 1)
        f(bad)
        with pytest.raises(Exception, match="negative: no tangent"):
            jax.jvp(f, (bad,), (good,))
    f(bad)
    # Calls outside of the transformation don't wait.
    assert blocks(f) == [False]
