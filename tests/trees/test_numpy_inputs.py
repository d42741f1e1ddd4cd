"""A NumPy array may be filled anew as soon as the call returns: its result stays what it was."""

import functools
import time
import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from eqxjit._trees.numpy_inputs import NumpyInputs
from tests.support import inside
from tests.support.helpers import SPECIALIZING, assert_same
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


@both
def test_buffers_beside_those_inside_the_function(filter_jit):
    class Model(eqx.Module):
        weight: np.ndarray

        def __call__(self, x, *others):
            return slow_sum([x, self.weight, *others])

    f = filter_jit(Model(aligned()))
    f.__wrapped__.weight[...] = 1
    check(lambda *buffers: f(jnp.ones((_SIDE, _SIDE)), *buffers), *[aligned() for _ in range(3)])


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
    assert inside.n_specialized(f) == SPECIALIZING


def test_arrays_are_copied_together(monkeypatch):
    """And only once the guards hold; a call doesn't copy what is of JAX's."""
    f = eqxjit.filter_jit(lambda tree, x: [array * x for array in tree])
    tree = [np.ones(3), jnp.ones(3), np.float32(2), *[np.full(2, i) for i in range(20)]]
    for _ in range(CALLS):
        expected = f(tree, 2)
    copied = []
    original = NumpyInputs.own_arrays
    monkeypatch.setattr(NumpyInputs, "own_arrays", lambda *a: copied.append(a[1]) or original(*a))
    g = eqxjit.filter_jit(lambda tree, x: [array * x for array in tree])
    for _ in range(CALLS):
        g(tree, 2)
    copied.clear()
    assert_same(g(tree, 2), expected)
    if eqxjit.native_enabled() and SPECIALIZING:
        assert [[*map(id, arrays)] for arrays in copied] == [
            [id(array) for array in tree if type(array) is np.ndarray]
        ]
        g(tree, 3)
        assert len(copied) == 1


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


@pytest.mark.usefixtures("python_back_end")
def test_where_each_call_waits_nothing_is_copied():
    def warm(**options):
        f = eqxjit.filter_jit(lambda x: x, **options)
        for _ in range(CALLS):
            f(np.ones(3))
        return f

    if SPECIALIZING:
        assert "own_array(" in warm().specialized_source()
        assert "own_array(" not in warm(block=True).specialized_source()


# --- Copying or waiting ------------------------------------------------------------------------

_LARGE = 1_000_000


def allocated_by(call):
    """The most memory that NumPy and Python held for a call, in bytes."""
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize(
    ("fun", "arguments"),
    [
        (lambda x: x[0], lambda x: (x,)),
        (lambda xs: xs[0][0], lambda x: ([x] * 5,)),
        (lambda xs, y: xs[0][0] + y, lambda x: ([x, jnp.ones(()), x, x, x], jnp.ones(()))),
        (lambda pair, n: pair.first[0] * n, lambda x: (Pair(x, x), 3)),
    ],
)
def test_a_large_array_is_not_copied_for_a_short_computation(fun, arguments):
    f = eqxjit.filter_jit(fun)
    args = arguments(np.ones(_LARGE, np.float32))
    for _ in range(CALLS):
        f(*args)
    assert allocated_by(lambda: f(*args)) < _LARGE


def test_a_large_array_inside_the_function_is_not_copied():
    class Model(eqx.Module):
        weight: np.ndarray

        def __call__(self, x):
            return self.weight[0] + x

    f = eqxjit.filter_jit(Model(np.ones(_LARGE, np.float32)))
    for _ in range(CALLS):
        f(jnp.ones(()))
    assert allocated_by(lambda: f(jnp.ones(()))) < _LARGE


def recorded(inputs, leaves):
    """What a jitted function is given, and whether the call waits for its output."""
    given, waited = [], []
    inputs.call(lambda *arrays: given.extend(arrays), leaves, waited.append)
    return given, bool(waited)


def test_copies_are_made_once_a_computation_takes_far_longer_than_they_do(monkeypatch):
    inputs, large = NumpyInputs(), np.ones(_LARGE, np.float32)
    clock = iter([0.0, 1e-3, 0.0, 1.0, 0.0, 1e-3])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    for _ in range(2):
        given, waited = recorded(inputs, [large])
        assert waited
        assert given[0] is large
    given, waited = recorded(inputs, [large])
    assert not waited
    assert given[0] is not large
    np.testing.assert_array_equal(given[0], large)
    # A yet larger one is waited for again.
    assert recorded(inputs, [np.ones(2 * _LARGE, np.float32)])[1]


@pytest.mark.parametrize("kind", [np.float32, np.int8, np.bool_, np.ones])
def test_arrays_of_numpy_take_the_specialised_call(kind):
    f = eqxjit.filter_jit(lambda xs: [x + 1 for x in xs])
    xs = [kind(i) for i in range(6)]
    for _ in range(CALLS):
        out = f(xs)
    jax.tree.map(np.testing.assert_array_equal, out, [x + 1 for x in map(jnp.asarray, xs)])
