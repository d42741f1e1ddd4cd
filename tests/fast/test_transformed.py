"""Calls under an eager transformation, and the call after them; errors of comparisons."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit


def positive(x):
    return eqx.error_if(x, x < 0, "negative")


def test_a_call_with_arrays_waits_after_transformed_ones():
    f = eqxjit.filter_jit(positive)
    for _ in range(3):
        jax.vmap(f)(jnp.ones(3))
        jax.jvp(f, (jnp.ones(()),), (jnp.ones(()),))
    with pytest.raises(Exception, match="negative"):
        f(-jnp.ones(()))


@pytest.mark.parametrize("is_list", [False, True])
def test_a_later_output_alone_may_be_transformed(is_list):
    @eqxjit.filter_jit
    def f(x, is_list):
        outputs = jnp.zeros(()), positive(x)
        return list(outputs) if is_list else outputs

    f(jnp.ones(()), is_list)
    f(jnp.ones(()), is_list)
    for _ in range(3):
        constant, same = jax.vmap(lambda x: f(x, is_list))(jnp.arange(3.0))
        assert constant.shape == (3,)
        assert same.tolist() == [0, 1, 2]
    with pytest.raises(Exception, match="negative"):
        jax.vmap(lambda x: f(x, is_list))(-jnp.ones(3))


def test_a_key_error_of_a_comparison_is_raised_at_once():
    compared = []

    class Name:
        def __init__(self, name):
            self.name = name

        def __hash__(self):
            return 0

        def __eq__(self, other):
            compared.append({self.name, other.name})
            return {"a": True}[self.name] and {"a": True}[other.name]

    f = eqxjit.filter_jit(lambda x, name: x + 1)
    for _ in range(3):
        f(jnp.ones(()), Name("a"))
    compared.clear()
    with pytest.raises(KeyError, match="b"):
        f(jnp.ones(()), Name("b"))
    assert compared == [{"a", "b"}]
