"""`jax_debug_nans` and `jax_debug_infs`: JAX's errors, and no trace counts."""

import jax
import jax.numpy as jnp
import pytest

import eqxjit
from tests.support.sides import CALLS

GOOD, BAD = jnp.ones(3), jnp.zeros(3)

DEBUGS = {"jax_debug_nans": lambda x: (x - x) / x, "jax_debug_infs": lambda x: jnp.log(x) + 1}


@pytest.fixture(params=DEBUGS)
def divide(request):
    """A function that makes a NaN or an infinity of zeros, while JAX looks for those."""
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


def test_arguments_that_were_donated():
    """JAX can't run them again: still a `FloatingPointError`, and not one about deleted arrays."""
    f = eqxjit.filter_jit(lambda x: jnp.log(x) + 1, donate="all", max_traces=1)
    with debugging(DEBUGS["jax_debug_infs"]):
        for _ in range(CALLS):
            with pytest.raises(FloatingPointError, match="without `donate`"):
                f(BAD + 0)
            f(GOOD + 0)
        deleted = GOOD + 0
        f(deleted)
        with pytest.raises((RuntimeError, ValueError), match="`x` has been deleted"):
            f(deleted)
