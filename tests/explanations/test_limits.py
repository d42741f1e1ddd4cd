"""`max_traces`: one trace too many raises what explains it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support.helpers import Counted
from tests.support.places import shown
from tests.support.sides import CALLS

#: What messages call this file.
HERE = shown(__file__)

X = jnp.arange(3.0)
Y = jnp.arange(4.0)


def test_one_trace_too_many_raises_what_explains_it():
    counted = Counted(eqxjit.filter_jit, lambda x, n=1: x * n, max_traces=3)
    f = counted.jitted
    for n in (1, 2, 3):
        for _ in range(CALLS):
            f(X, n)
    before, entries = counted.traces, f.cache_info()
    for bad in ((X, 4), (Y, 3), (X.astype(int), 3)):
        for _ in range(CALLS):
            with pytest.raises(eqxjit.TooManyTracesError) as caught:
                f(*bad)
            message = str(caught.value)
            assert "may be traced 3 times (`max_traces=3`)" in message
            assert f"the call at {HERE}:" in message
            assert "would be trace 4" in message
            assert "Compared with trace 3:\n  - " in message
    assert "dtype: `x` was float32, is int32" in message
    assert counted.traces == before
    assert f.cache_info() == entries
    for n in (1, 2, 3):
        np.testing.assert_array_equal(f(X, n), X * n)
    f.clear_cache()
    f(X, 5)
    assert f.cache_info().traces == 1


def test_the_limit_sees_what_jax_traces_by_itself():
    f = eqxjit.filter_jit(lambda x: x, max_traces=1)
    for _ in range(CALLS):
        f(X)
    jax.clear_caches()
    for _ in range(CALLS):
        with pytest.raises(eqxjit.TooManyTracesError, match=r"jax\.clear_caches\(\)"):
            f(X)
    with pytest.raises(eqxjit.TooManyTracesError, match="jax_enable_x64"), jax.enable_x64(True):
        f(X)
    with pytest.raises(eqxjit.TooManyTracesError):
        f.lower(Y)
