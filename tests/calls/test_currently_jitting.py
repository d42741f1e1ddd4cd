"""`currently_jitting()` gives the answers of Equinox's own, and runs nothing to find them."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from equinox._misc import currently_jitting as upstreams

import eqxjit
from tests.support.transformations import TRANSFORMATIONS, points


def _at_compile_time(f):
    def inner(x):
        with jax.ensure_compile_time_eval():
            f(x)
        return x

    return inner


X = jnp.ones(3)

CONTEXTS = TRANSFORMATIONS | {
    "outside": lambda f, _: f(X),
    "ensure_compile_time_eval alone": lambda f, _: _at_compile_time(f)(X),
    "vmap, at compile time": lambda f, _: jax.jit(jax.vmap(_at_compile_time(f)))(X),
    "at compile time, jit": lambda f, _: jax.jit(_at_compile_time(jax.jit(f)))(X),
    "scan, vmap, jvp": lambda f, _: jax.lax.scan(
        lambda c, _: (c, jax.vmap(lambda x: jax.jvp(f, (x,), (x,)))(X)), 0, None, 2
    ),
    "disable_jit": lambda f, _: _without_jit(f),
    "vmap, eqxjit.filter_jit, grad": lambda f, _: jax.vmap(eqxjit.filter_jit(jax.grad(f)))(X),
    "filter_closure_convert": lambda f, _: eqx.filter_closure_convert(f, X),
    "pure_callback": lambda f, _: jax.jit(
        lambda x: jax.pure_callback(f, jax.ShapeDtypeStruct((), jnp.float32), x)
    )(X),
}


def _without_jit(f):
    with jax.disable_jit():
        return jax.jit(f)(X)


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_answer_is_upstreams(name):
    answers = []

    def f(x):
        answers.append((eqxjit.currently_jitting(), upstreams()))
        return x.sum()

    CONTEXTS[name](f, points())
    assert answers
    assert all(ours is theirs for ours, theirs in answers)
    assert eqxjit.currently_jitting() is False


def test_it_adds_nothing_to_the_program():
    """Upstream asks by an addition, which it has traced."""

    def f(answer, x):
        return x * (2 if answer() else 3)

    jaxpr = jax.make_jaxpr(functools.partial(f, eqxjit.currently_jitting))(X)
    assert [equation.primitive.name for equation in jaxpr.eqns] == ["mul"]
