"""Functions and classes whose names are no identifiers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from tests.support.sides import CALLS

X = jnp.ones(2)

NAMES = ["nul\0byte", "two\nlines", "", "class", "<lambda>", "µ", "a b"]


@pytest.mark.parametrize("name", NAMES)
def test_a_function_of_any_name_can_be_called(name):
    def fun(x, n=1):
        return x * n

    fun.__name__ = fun.__qualname__ = name
    f = eqxjit.filter_jit(fun)
    for n in range(1, 3):
        for _ in range(CALLS):
            assert (f(X, n) == n).all()
    with pytest.raises(TypeError):
        f()


# Python makes no class whose name has a NUL.
@pytest.mark.parametrize("name", NAMES[1:])
def test_a_class_of_any_name_can_be_passed(name):
    class Base(eqx.Module):
        x: jax.Array

    Odd = type(Base)(name, (Base,), {})
    f = eqxjit.filter_jit(lambda odd: odd)
    for _ in range(CALLS):
        assert type(f(Odd(X))) is Odd
