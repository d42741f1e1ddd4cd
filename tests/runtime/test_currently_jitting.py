"""`currently_jitting()` gives the answers of Equinox's own, and runs nothing to find them."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from equinox._misc import currently_jitting as upstreams

import eqxjit
from tests.support.hiding import LOOKED_AT_FOR_STAGING, needs
from tests.support.sides import CALLS


def _at_compile_time(f):
    def inner(x):
        with jax.ensure_compile_time_eval():
            f(x)
        return x

    return inner


def _while(f, x):
    return jax.lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, f(s[1])), (0, x))


def _custom_jvp(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (f(*primals), *tangents))
    return g


X = jnp.ones(3)

CONTEXTS = {
    "outside": lambda f: f(X),
    "jit": lambda f: jax.jit(f)(X),
    "vmap": lambda f: jax.vmap(f)(X),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "linearize": lambda f: jax.linearize(f, X),
    "vjp": lambda f: jax.vjp(f, X),
    "jacfwd": lambda f: jax.jacfwd(f)(X),
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum())(X),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0, X),
    "cond": lambda f: jax.lax.cond(X[0] > 0, f, lambda x: x, X),
    "while_loop": lambda f: _while(f, X),
    "map": lambda f: jax.lax.map(f, X),
    "checkpoint": lambda f: jax.checkpoint(f)(X),
    "custom_jvp": lambda f: jax.jvp(_custom_jvp(f), (X,), (X,)),
    "eval_shape": lambda f: jax.eval_shape(f, X),
    "make_jaxpr": lambda f: jax.make_jaxpr(f)(X),
    "ensure_compile_time_eval": lambda f: _at_compile_time(f)(X),
    "jit, ensure_compile_time_eval": lambda f: jax.jit(_at_compile_time(f))(X),
    "jit, vmap, ensure_compile_time_eval": lambda f: jax.jit(jax.vmap(_at_compile_time(f)))(X),
    "jit, ensure_compile_time_eval, vmap": lambda f: jax.jit(_at_compile_time(jax.vmap(f)))(X),
    "jit, ensure_compile_time_eval, jit": lambda f: jax.jit(_at_compile_time(jax.jit(f)))(X),
    "jit, vmap": lambda f: jax.jit(jax.vmap(f))(X),
    "vmap, jit": lambda f: jax.vmap(jax.jit(f))(X),
    "jit, grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))(X),
    "grad, jit": lambda f: jax.grad(lambda x: jax.jit(f)(x).sum())(X),
    "grad, vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum())(X),
    "vmap, scan": lambda f: jax.vmap(lambda x: jax.lax.scan(lambda c, _: (f(c), 0), x, None, 2))(X),
    "scan, vmap, jvp": lambda f: jax.lax.scan(
        lambda c, _: (c, jax.vmap(lambda x: jax.jvp(f, (x,), (x,)))(X)), 0, None, 2
    ),
    "disable_jit": lambda f: _without_jit(f),
    "equinox.filter_jit": lambda f: eqx.filter_jit(f)(X),
    "eqxjit.filter_jit": lambda f: eqxjit.filter_jit(f)(X),
    "vmap, eqxjit.filter_jit, grad": lambda f: jax.vmap(eqxjit.filter_jit(jax.grad(f)))(X),
    "filter_vmap": lambda f: eqx.filter_vmap(f)(X),
    "filter_grad": lambda f: eqx.filter_grad(lambda x: f(x).sum())(X),
    "filter_closure_convert": lambda f: eqx.filter_closure_convert(f, X),
    "pure_callback": lambda f: jax.jit(
        lambda x: jax.pure_callback(f, jax.ShapeDtypeStruct((3,), jnp.float32), x)
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
        return x

    CONTEXTS[name](f)
    assert answers
    assert all(ours is theirs for ours, theirs in answers)
    assert eqxjit.currently_jitting() is False


def test_both_answers_occur():
    """The contexts above include staged and eager ones, else their agreement would say little."""
    answers = set()

    def f(x):
        answers.add(eqxjit.currently_jitting())
        return x

    jax.jit(f)(X)
    assert answers == {True}
    jax.vmap(f)(X)
    assert answers == {True, False}


def test_it_is_false_again_after_a_failed_trace():
    def f(x):
        raise KeyError

    for _ in range(CALLS):
        with pytest.raises(KeyError):
            jax.jit(f)(X)
        assert eqxjit.currently_jitting() is False


@needs(*LOOKED_AT_FOR_STAGING, why="this asks by an addition, too")
def test_it_adds_nothing_to_the_program():
    """Upstream asks by an addition, which it has traced."""

    def f(answer, x):
        return x * (2 if answer() else 3)

    jaxpr = jax.make_jaxpr(functools.partial(f, eqxjit.currently_jitting))(X)
    assert [equation.primitive.name for equation in jaxpr.eqns] == ["mul"]
