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


#: A function, arguments that it takes, arguments that fail, and the type of the error.
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
    """Waiting for any output suffices, even if the program returns inputs unchanged."""

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


# --- `jax_debug_nans` and `jax_debug_infs`: JAX's errors, and no trace counts -----------------


GOOD, BAD = jnp.ones(3), jnp.zeros(3)

DEBUGS = {"jax_debug_nans": lambda x: (x - x) / x, "jax_debug_infs": lambda x: jnp.log(x) + 1}


@pytest.fixture(params=DEBUGS)
def divide(request):
    """Return a function that divides by zero while JAX checks for NaNs and infinities."""
    return DEBUGS[request.param]


def debugging(divide):
    # Not `jax.config.update`: JAX ignores it in a thread that ever left one of these contexts.
    [option] = [option for option, fun in DEBUGS.items() if fun is divide]
    return getattr(jax, option.removeprefix("jax_"))(True)


def raises_as_jax_does(f):
    with pytest.raises(FloatingPointError, match=r"encountered in (div|log)"):
        f(BAD)


@pytest.mark.parametrize("when", ["before", "after"])
def test_max_traces_counts_no_search_for_a_nan(divide, when):
    f = eqxjit.filter_jit(lambda x: divide(x), max_traces=1)
    if when == "after":
        for _ in range(CALLS):
            f(GOOD)
    with debugging(divide):
        for _ in range(CALLS):
            raises_as_jax_does(f)
            assert f.cache_info()[:2] == (1, 1)
        for _ in range(CALLS):
            f(GOOD)
            raises_as_jax_does(f)
    f(BAD)
    assert f.cache_info()[:2] == (1, 1)
    assert len(f.traces()) == 1
    with pytest.raises(eqxjit.TooManyTracesError):
        f(jnp.ones(2))


@pytest.mark.parametrize("nested", [False, True])
def test_without_arrays_or_within_another(divide, nested):
    inner = eqxjit.filter_jit(lambda: divide(jnp.zeros(2)), max_traces=1)
    f = eqxjit.filter_jit(lambda: inner() + 1, max_traces=1) if nested else inner
    with debugging(divide):
        for _ in range(CALLS):
            with pytest.raises(FloatingPointError, match=r"encountered in (div|log)"):
                f()
    assert f.cache_info().entries == 1
