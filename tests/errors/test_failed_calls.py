"""Calls that fail leave nothing behind: neither arrays nor a path that fails again."""

import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from tests.support.sides import CALLS, since_jax_0_9


class _Refused(Exception):
    pass


@jax.tree_util.register_pytree_node_class
class _Node:
    def __init__(self, x, fails=False):
        self.x = x
        self.fails = fails

    def tree_flatten(self):
        if self.fails:
            raise _Refused
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


class _Unequal:
    def __init__(self, fails):
        self.fails = fails

    def __hash__(self):
        return 1

    def __eq__(self, other):
        if self.fails or other.fails:
            raise _Refused
        return True


def _deleted(i):
    array = jnp.ones(3) + i
    array.delete()
    return (array,)


def _ones(i):
    return jnp.ones(3) + i


#: The function, arguments that it takes, those that fail, and with what.
FAILURES = {
    "shape": (jnp.add, lambda: (_ones(0), _ones(0)), lambda i: (_ones(i), jnp.ones(5)), TypeError),
    "the user's": (
        lambda x, n: x / (1 // n),
        lambda: (_ones(0), 1),
        lambda i: (_ones(i), 0),
        ZeroDivisionError,
    ),
    "error_if": (
        lambda x: eqx.error_if(x, x[0] < 0, "negative"),
        lambda: (_ones(0),),
        lambda i: (-_ones(i),),
        RuntimeError,
    ),
    "deleted": (lambda x: x * 2, lambda: (_ones(0),), _deleted, RuntimeError),
    "flatten": (
        lambda node, x: node.x + x,
        lambda: (_Node(_ones(0)), _ones(0)),
        lambda i: (_Node(_ones(i), True), _ones(i)),
        _Refused,
    ),
    "comparison": (
        lambda x, value: x * 2,
        lambda: (_ones(0), _Unequal(False)),
        lambda i: (_ones(i), _Unequal(True)),
        (_Refused, ValueError),
    ),
}


@since_jax_0_9
@pytest.mark.parametrize("kind", FAILURES)
def test_arrays_of_failed_calls_are_freed_at_once(kind):
    body, good, bad, expected = FAILURES[kind]
    f = eqxjit.filter_jit(body)
    for _ in range(CALLS):
        f(*good())
    gc.collect()
    gc.disable()
    try:
        refs = []
        for i in range(CALLS):
            arguments = bad(i)
            refs += [weakref.ref(a) for a in arguments if isinstance(a, jax.Array)]
            try:
                f(*arguments)
            except expected:
                pass
            else:
                pytest.fail("it didn't raise")
            del arguments
        assert not any(ref() is not None for ref in refs)
    finally:
        gc.enable()
    f(*good())


def test_one_output_tells_that_a_program_has_failed():
    """Whichever is waited for, also where inputs are passed through."""

    def fun(x, y):
        checked = eqx.error_if(jnp.sin(x @ x), y[0] < 0, "negative")
        return y, x, checked.sum(), [y + 1]

    f = eqxjit.filter_jit(fun)
    x = jnp.ones((300, 300))
    for _ in range(CALLS):
        f(x, jnp.ones(2))
    for _ in range(CALLS):
        with pytest.raises(RuntimeError, match="negative"):
            f(x, -jnp.ones(2))
    f(x, jnp.ones(2))
