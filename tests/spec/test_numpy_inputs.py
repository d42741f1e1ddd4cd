"""A NumPy array may be filled anew as soon as the call returns: its result stays what it was."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support import inside
from tests.support.helpers import SPECIALIZING
from tests.support.sides import CALLS, both

_SIDE = 512

#: Long enough for a call to return before JAX has read its last argument.
_PRODUCTS = 8


class Pair(eqx.Module):
    first: jax.Array
    second: jax.Array
    name: str = eqx.field(static=True, default="pair")


def slow_sum(tree):
    """The sum of all arrays of a tree, each read after a long computation."""
    arrays = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    product = arrays[0]
    for _ in range(_PRODUCTS):
        product = jnp.tanh(product @ arrays[0])
    # One, but the compiler doesn't know.
    scale = jnp.exp(jnp.min(product) * 0)
    return jnp.stack([jnp.sum(array * scale) for array in arrays])


def aligned():
    """An array that JAX reads in place, as it does where NumPy's memory happens to be aligned."""
    memory = np.empty(_SIDE * _SIDE * 4 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + _SIDE * _SIDE * 4].view(np.float32).reshape(_SIDE, _SIDE)


FORMS = {
    "an argument": lambda a, b: ((a, b), {}),
    "a list": lambda a, b: (([a, b],), {}),
    "a list of several": lambda a, b: (([a, b, a, b, a],), {}),
    "a dict": lambda a, b: (({"b": b, "a": a},), {}),
    "keywords": lambda a, b: ((), {"b": b, "a": a}),
    "a Module": lambda a, b: ((Pair(a, b),), {}),
    "Modules": lambda a, b: (([Pair(a, b), Pair(b, a), Pair(a, a)],), {}),
    "beside JAX's": lambda a, b: ((jnp.ones((_SIDE, _SIDE)), b, [jnp.ones(3), a]), {}),
}


def check(call, *buffers):
    """Calls one after the other, the buffers filled anew after each: as with arrays of its own."""
    results = []
    for i in range(2 * CALLS):
        for buffer in buffers:
            buffer[...] = i + 1
        results.append(call(*buffers))
    for buffer in buffers:
        buffer[...] = -1
    for i, result in enumerate(results):
        expected = call(*[np.full_like(buffer, i + 1) for buffer in buffers])
        np.testing.assert_array_equal(result, expected)


@both
@pytest.mark.parametrize("form", FORMS)
def test_a_buffer_can_be_filled_anew(filter_jit, form):
    f = filter_jit(lambda *args, **kwargs: slow_sum((args, kwargs)))

    def call(a, b):
        args, kwargs = FORMS[form](a, b)
        return f(*args, **kwargs)

    check(call, aligned(), aligned())


@both
def test_a_buffer_inside_the_function_can_be_filled_anew(filter_jit):
    class Model(eqx.Module):
        weight: np.ndarray

        def __call__(self, x):
            return slow_sum([x, self.weight])

    weight = aligned()
    f = filter_jit(Model(weight))
    x = jnp.ones((_SIDE, _SIDE))
    results = []
    for i in range(2 * CALLS):
        weight[...] = i
        results.append(f(x)[1])
    weight[...] = -1
    np.testing.assert_array_equal(results, np.arange(2.0 * CALLS) * _SIDE**2)


def test_small_arrays_around_those_inside_the_function():
    class Model(eqx.Module):
        weight: np.ndarray
        bias: np.ndarray

        def __call__(self, first, *others):
            return [*first, self.weight, self.bias, *others]

    f = eqxjit.filter_jit(Model(np.full(3, -1.0), np.full(3, -2.0)))
    for i in range(2 * CALLS):
        given = [np.full(3, 10.0 * i + j) for j in range(5)]
        expected = [10 * i, 10 * i + 1, -1, -2, *range(10 * i + 2, 10 * i + 5)]
        assert [int(array[0]) for array in f(given[:2], *given[2:])] == expected
    # A specialised call that did anything else wouldn't be kept.
    assert inside.n_fast(f) == SPECIALIZING


@pytest.mark.parametrize(
    "make",
    [
        eqxjit.freeze,
        functools.partial(eqxjit.filter_jit, block=True),
        lambda f: eqxjit.filter_jit(f).lower(aligned()).compile(),
    ],
    ids=["freeze", "block", "compiled"],
)
def test_a_buffer_can_be_filled_anew_however_it_is_called(make):
    check(make(lambda x: slow_sum([x])), aligned())
