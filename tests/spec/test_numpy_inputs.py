"""A NumPy array may be filled anew as soon as the call returns: its result stays what it was."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
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


class Model(eqx.Module):
    """A function that holds buffers between those of its arguments."""

    weight: np.ndarray
    bias: np.ndarray

    def __call__(self, first, *others):
        return slow_sum([*first, self.weight, self.bias, *others])


@both
def test_a_buffer_inside_the_function_can_be_filled_anew(filter_jit):
    buffers = [aligned() for _ in range(2)]
    f = filter_jit(Model(*buffers))
    others = [jnp.full((_SIDE, _SIDE), 10.0 * i) for i in range(3)]
    results = []
    for i in range(2 * CALLS):
        for n, buffer in enumerate(buffers):
            buffer[...] = i + n
        results.append(f(others[:2], *others[2:]))
    for buffer in buffers:
        buffer[...] = -1
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result / _SIDE**2, [0, 10, i, i + 1, 20])


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
