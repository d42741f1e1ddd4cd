"""What a trace in the middle of a warm call is given, and what comes back."""

import sys

import jax
import jax.numpy as jnp
import pytest

import eqxjit
from tests.support.places import JAX_FILES
from tests.support.sides import CALLS


def test_a_trace_in_a_warm_call_has_all_its_arguments():
    f = eqxjit.filter_jit(lambda x, n=1, *rest, scale=1, **more: (x * n * scale, rest, more))
    for size in (2, 2, 3, 4):
        x = jnp.ones(size)
        for out, rest, more in (f(x, n=2, scale=3, k=4), f(x, 2, 4, scale=3)):
            assert out.tolist() == [6.0] * size
            assert (rest, more) in [((), {"k": 4}), ((4,), {})]


def test_calls_of_each_other_are_told_apart():
    @eqxjit.filter_jit
    def inner(x, n):
        return x * n

    @eqxjit.filter_jit
    def outer(x, n, shapes):
        # Warm, and for a new shape, while `outer` itself is traced.
        return [inner(x, 2)] + [inner(jnp.ones(size), n) for size in shapes]

    inner(jnp.ones(2), 2)
    for shapes in ((2,), (2, 3), (4, 2)):
        for _ in range(4):
            first, *others = outer(jnp.ones(2), 5, shapes)
            assert first.tolist() == [2.0, 2.0]
            assert [other.tolist() for other in others] == [[5.0] * size for size in shapes]


def frames_of_jax(call):
    """How many Python functions of JAX's a call runs."""
    called = 0

    def see(frame, event, _):
        nonlocal called
        called += event == "call" and frame.f_code.co_filename.startswith(JAX_FILES)

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return called


def test_warm_calls_are_dispatched_in_c_whatever_was_traced_before():
    """JAX goes on in Python, slowly, with arguments for which a call of it has failed."""
    fails = True

    def fun(x):
        if fails and x.dtype == jnp.int32:
            raise ZeroDivisionError
        return x + 1

    f = eqxjit.filter_jit(fun)
    shapes = [jnp.arange(3.0), jnp.arange(4.0), jnp.ones((2, 2))]
    for x in shapes:
        for _ in range(CALLS):
            f(x)
    with pytest.raises(ZeroDivisionError):
        f(jnp.arange(2))
    fails = False
    f.compile(jax.ShapeDtypeStruct((7,), jnp.float32))
    jax.clear_caches()
    shapes += [jnp.arange(2), jnp.ones(7)]
    for x in shapes * 2:
        f(x)
    fresh = eqxjit.filter_jit(lambda x: x + 1)
    for _ in range(CALLS):
        fresh(shapes[0])
    least = frames_of_jax(lambda: fresh(shapes[0]))
    assert least < 5
    assert [frames_of_jax(lambda x=x: f(x)) for x in shapes] == [least] * len(shapes)
