"""A call in flight is found by its entry, however calls are nested."""

import jax.numpy as jnp

import eqxjit
from eqxjit._core.calls import in_flight
from tests.support.inside import entries


def test_the_call_in_flight_is_that_of_the_entry():
    never_called_meanwhile = eqxjit.filter_jit(lambda x: x - 1)
    never_called_meanwhile(jnp.ones(2))
    found = []

    @eqxjit.filter_jit
    def inner(x, n):
        for f in (inner, outer, never_called_meanwhile):
            call = in_flight(entries(f)[0])
            found.append(None if call is None else call.args)
        found.append(in_flight().args)
        return x * n

    @eqxjit.filter_jit
    def outer(x):
        return inner(x, 2) + 1

    x = jnp.ones(2)
    assert outer(x).tolist() == [3.0, 3.0]
    of_inner, of_outer, of_none, of_any = found
    assert (of_inner[1], of_any[1]) == (2, 2)
    assert len(of_outer) == 1
    assert of_outer[0] is x
    assert of_none is None


def test_a_trace_in_a_warm_call_has_all_its_arguments():
    f = eqxjit.filter_jit(lambda x, n=1, *rest, scale=1, **more: (x * n * scale, rest, more))
    for size in (2, 2, 3, 4):
        x = jnp.ones(size)
        for out, rest, more in (f(x, n=2, scale=3, k=4), f(x, 2, 4, scale=3)):
            assert out.tolist() == [6.0] * size
            assert (rest, more) in [((), {"k": 4}), ((4,), {})]
