"""What a trace in the middle of a warm call is given, and what comes back."""

import jax.numpy as jnp

import eqxjit


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
