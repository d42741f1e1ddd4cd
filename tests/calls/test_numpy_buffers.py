"""A NumPy buffer may be overwritten once the call has returned.

A call waits for its program only where a copy would cost much: on a CPU, for large arrays that XLA
reads in place, while no earlier program runs.
"""

import functools
import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support.sides import CALLS

_SIDE = 250


def slow(tree, side=_SIDE):
    """Return the sum of a tree's arrays, which the program reads long after the call returned."""
    arrays = [x for x in jax.tree.leaves(tree) if eqx.is_array(x)]
    y = jnp.broadcast_to(arrays[0].ravel()[0], (side, side))
    for _ in range(3):
        y = jnp.sin(y @ y.T @ y)
    return sum(jnp.sum(x + 0 * jnp.sum(y)) for x in arrays)


def aligned(shape, offset=0):
    """Return an array that XLA reads in place, unless `offset` moves the start of its memory."""
    n_bytes = int(np.prod(shape)) * 4
    memory = np.empty(n_bytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + n_bytes].view(np.float32).reshape(shape)


FORMS = {
    "aligned": lambda a: a,
    "in Fortran's order": lambda a: a.reshape(a.shape, order="F"),
    "reversed": lambda a: a[::-1],
    "non-contiguous": lambda a: a[:, ::2],
    "transposed": lambda a: a.T,
    "read-only": lambda a: np.broadcast_to(a, a.shape),
    "a subclass": lambda a: a.view(type("Tagged", (np.ndarray,), {})),
    "0-dimensional": lambda a: a[0, 0:1].reshape(()),
}


@pytest.mark.parametrize(
    ("form", "side"),
    [*[(form, _SIDE) for form in FORMS], ("aligned", 1200), ("non-contiguous", 1200)],
)
@pytest.mark.parametrize("donate", ["none", "all"])
def test_a_buffer_of_any_kind_can_be_overwritten(form, side, donate):
    buffer = aligned((side, side))
    view = FORMS[form](buffer)
    f = eqxjit.filter_jit(lambda x: slow(x), donate=donate)
    for i in range(CALLS):
        buffer[...] = i + 1
        result = f(view)
        buffer[...] = 0
        assert float(result) == (i + 1) * view.size


@pytest.mark.parametrize("offset", [0, 4, 16])
@pytest.mark.parametrize(
    "n_bytes", [4, 4_000, 98_000, 98_400, 102_396, 102_400, 102_404, 524_000, 525_000, 4_000_000]
)
def test_a_buffer_of_any_size_can_be_overwritten(n_bytes, offset):
    """JAX itself copies small arrays before its call returns, even if the call compiles."""
    buffer = aligned((n_bytes // 4,), offset)
    f = eqxjit.filter_jit(lambda x: slow([ONE, x]))
    for i in range(CALLS):
        buffer[...] = i + 1
        result = f(buffer)
        buffer[...] = 0
        assert float(result) == 1 + (i + 1) * buffer.size


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64, np.complex128])
@pytest.mark.parametrize("x64", [False, True])
def test_a_buffer_of_a_wide_dtype_can_be_overwritten(dtype, x64):
    buffer = aligned((2, 500_000)).view(dtype).ravel()
    with jax.enable_x64(x64):
        f = eqxjit.filter_jit(lambda x: slow([ONE, jnp.real(x)]))
        for i in range(CALLS):
            buffer[...] = i + 1
            result = f(buffer)
            buffer[...] = 0
            assert float(result) == 1 + (i + 1) * buffer.size


def test_a_mapped_file_can_be_overwritten(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((_SIDE, 4 * _SIDE), np.float32))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r+")
    f = eqxjit.filter_jit(lambda x: slow(x))
    for i in range(CALLS):
        mapped[...] = i + 1
        result = f(mapped)
        mapped[...] = 0
        assert float(result) == (i + 1) * mapped.size


@pytest.mark.parametrize("fun", [lambda x: x, lambda x: x + 1, lambda x: x.at[0].set(5)])
@pytest.mark.parametrize("donate", ["none", "all"])
def test_a_program_neither_writes_a_buffer_nor_returns_it(fun, donate):
    f = eqxjit.filter_jit(fun, donate=donate)
    for _ in range(CALLS):
        buffer = aligned((1_000_000,))
        buffer[...] = 3
        result = f(buffer)
        assert np.all(buffer == 3)
        expected = np.array(result)
        buffer[...] = 0
        assert np.array_equal(result, expected)


def test_a_buffer_that_is_only_returned_can_be_overwritten():
    buffer = aligned((1_000_000,))
    f = eqxjit.filter_jit(lambda x, buffer: (x + 1, buffer))
    for i in range(CALLS):
        buffer[...] = i
        _, result = f(ONE, buffer)
        buffer[...] = 7
        assert np.all(np.asarray(result) == i)


class Pair(eqx.Module):
    """A function with arrays of its own, which it reads between those of its arguments."""

    first: np.ndarray
    second: np.ndarray

    def call(self, x):
        return slow([x, self.first, self.second])

    __call__ = call


ONE = jnp.ones(())

#: A jitted function, and a call of it that passes two buffers.
WAYS = {
    "a list": (eqxjit.filter_jit(lambda t: slow(t)), lambda f, a, b: f([a, ONE, b]) - 1),
    "keywords": (eqxjit.filter_jit(lambda **t: slow(t)), lambda f, a, b: f(b=b, a={"a": a})),
    "Modules": (eqxjit.filter_jit(lambda t: slow(t)), lambda f, a, b: f([Pair(a, b)] * 2) / 2),
    "the function": (eqxjit.filter_jit, lambda jit, a, b: jit(Pair(a, b))(ONE) - 1),
    "a method": (eqxjit.filter_jit, lambda jit, a, b: jit(Pair(a, b).call)(ONE) - 1),
    "frozen": (eqxjit.freeze(slow), lambda f, a, b: f([a, b])),
    "block": (eqxjit.filter_jit(slow, block=True), lambda f, a, b: f([a, b])),
    "compiled": (
        eqxjit.filter_jit(slow).lower([aligned((_SIDE, _SIDE))] * 2).compile(),
        lambda f, a, b: f([a, b]),
    ),
}


@pytest.mark.parametrize(("f", "call"), WAYS.values(), ids=WAYS)
def test_buffers_can_be_overwritten_wherever_they_are(f, call):
    a, b = (aligned((_SIDE, _SIDE)) for _ in range(2))
    results = []
    for i in range(2 * CALLS):
        a[...], b[...] = i, 2 * i
        results.append(call(f, a, b))
    a[...] = b[...] = -1
    found = [float(result) / _SIDE**2 for result in results]
    np.testing.assert_allclose(found, [3 * i for i in range(2 * CALLS)], atol=1e-3)


def test_buffers_that_were_frozen_or_packed_can_be_overwritten():
    for _ in range(2 * CALLS):
        a, b = aligned((1000, 1000)), aligned((3,))
        a[...] = b[...] = 1
        frozen = eqxjit.freeze(lambda a: a, a)
        # One array isn't ready yet when the other arrays are read.
        packed = eqxjit.pack([b, slow([ONE])], optimizer=None)
        repacked = packed.repack([b, slow([ONE])])
        a[...] = b[...] = 0
        assert np.all(frozen() == 1)
        assert np.all(packed.unpack()[0] == 1)
        assert np.all(repacked.unpack()[0] == 1)


def test_a_byte_swapped_array_is_refused_by_name():
    # `jax.jit` computes wrong numbers if an array in native byte order was passed before.
    f = eqxjit.filter_jit(lambda x: x + 1)
    for _ in range(CALLS):
        with pytest.raises(TypeError, match="`x` can't be traced: Dtype >f4"):
            f(np.ones(3, ">f4"))
        f(np.ones(3, "f4"))


def ones(n, offset):
    array = aligned((n,), offset)
    array[...] = 1
    return array


SIDE_OF_A_LONG_PROGRAM = 800 if jax.default_backend() == "cpu" else 4000


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(ones(4, 0), id="small"),
        pytest.param(ones(100_000, 0), id="aligned, medium"),
        pytest.param(ones(1_000_000, 16), id="not aligned"),
        pytest.param(np.ones(1_000_000), id="converted"),
        pytest.param(ones(2_000_000, 0)[::2], id="not contiguous"),
        pytest.param(jax.random.key(0), id="key"),
    ],
)
def test_no_call_waits_for_an_argument(other):
    """The call returns or reads an argument that isn't ready yet."""

    def fun(x, other):
        is_key = jnp.issubdtype(other.dtype, jax.dtypes.prng_key)
        return slow(x, SIDE_OF_A_LONG_PROGRAM), other if is_key else slow(x) + other[0]

    f, blocking = (eqxjit.filter_jit(fun, block=block) for block in (False, True))
    for _ in range(CALLS):
        jax.block_until_ready(f(ONE, other))
        assert blocking(ONE, other)[0].is_ready()
    assert not f(ONE, other)[0].is_ready()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="nothing else reads NumPy's memory")
def test_a_call_waits_for_memory_that_is_read_in_place_unless_an_earlier_program_runs():
    f = eqxjit.filter_jit(lambda x, other: slow(x, SIDE_OF_A_LONG_PROGRAM) * 0 + other[0])
    other = ones(1_000_000, 0)
    x = ONE
    for i in range(2 * CALLS):
        first = f(x, other)
        assert first.is_ready(), i
        running = f(x, np.ones(10, np.float32))
        assert not running.is_ready(), i
        second = f(running, other)
        assert not second.is_ready(), i
        other[...] = 0
        assert second == 1
        other[...] = 1


def copied_bytes(f, *args):
    """Return how many bytes of memory NumPy had at most in a call, beside what it has already."""
    tracemalloc.start()
    try:
        f(*args)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("offset", [0, 4])
def test_a_buffer_that_the_program_does_not_use_is_not_copied(offset):
    batch = {"seen": aligned((250_000,), offset), "unseen": aligned((1_000_000,), offset)}
    f = eqxjit.filter_jit(lambda batch: batch["seen"].sum())
    for _ in range(CALLS):
        f(batch)
    assert copied_bytes(f, batch) < 2_000_000


@pytest.mark.parametrize("way", ["call", "compile", "another wrapper"])
def test_a_buffer_that_another_program_uses_can_be_overwritten(way):
    def read(x, buffer):
        return slow([x, buffer]) if x.shape == (2,) else slow(x)

    buffer = aligned((1_000_000,))
    f = eqxjit.filter_jit(read)
    buffer[...] = 0
    for _ in range(CALLS):
        f(ONE, buffer)
    if way == "compile":
        f.lower(jnp.ones(2), buffer).compile()
    if way == "another wrapper":
        eqxjit.filter_jit(read)(jnp.ones(2), buffer)
    for i in range(CALLS):
        buffer[...] = i
        result = f(jnp.ones(2), buffer)
        buffer[...] = 7
        assert float(result) == 2 + i * buffer.size
        buffer[...] = i
        assert float(f(ONE, buffer)) == 1


@pytest.mark.parametrize("n_bytes", [80_000, 400_000])
def test_many_buffers_together_are_not_copied(n_bytes):
    buffers = [aligned((n_bytes // 4,)) for _ in range(30)]
    f = eqxjit.filter_jit(slow)
    for _ in range(CALLS):
        f(buffers)
    assert copied_bytes(f, buffers) < 1_000_000
    for i in range(CALLS):
        for buffer in buffers:
            buffer[...] = i
        result = f(buffers)
        for buffer in buffers:
            buffer[...] = 7
        assert float(result) == sum([i * buffer.size for buffer in buffers])


def test_an_array_is_copied_once_however_many_structures_are_tried():
    n_copies = 0

    class Counted(np.ndarray):
        def __array_finalize__(self, obj):
            nonlocal n_copies
            n_copies += obj is not None

    f = eqxjit.filter_jit(lambda x, n: x * n)
    array = np.ones(3, np.float32).view(Counted)
    for _ in range(CALLS):
        for n in range(5):
            n_copies = 0
            f(array, n)
            # JAX also reads the array when it traces.
            assert n_copies <= 2
    for n in (3, 1, 4):
        n_copies = 0
        f({"array": array}["array"], n)
        assert n_copies == 1


ONES = np.ones((_SIDE, _SIDE), np.float32)

TRANSFORMED = {
    "vmap": lambda f, a: jax.vmap(f)(a[None])[0],
    "unbatched": lambda f, a: eqx.filter_vmap(lambda x, y: f(x), in_axes=(None, 0))(a, ONES[:2])[0],
    "jvp": lambda f, a: jax.jvp(f, (a,), (ONES,)),
    "value_and_grad": lambda f, a: jax.value_and_grad(f)(a),
    "vmap of grad": lambda f, a: jax.vmap(jax.value_and_grad(f))(a[None]),
}


@pytest.mark.parametrize("way", TRANSFORMED)
def test_a_buffer_below_a_transformation_can_be_overwritten(way):
    transformed = TRANSFORMED[way]
    data = np.random.default_rng(0).standard_normal((_SIDE, _SIDE)).astype(np.float32)
    f = eqxjit.filter_jit(slow)
    expected = jax.tree.map(np.asarray, transformed(eqx.filter_jit(slow), jnp.asarray(data)))
    for _ in range(CALLS):
        buffer = aligned(data.shape)
        buffer[...] = data
        result = transformed(f, buffer)
        buffer[...] = 0
        for got, want in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
        # A call without a transformation comes in between.
        f(jnp.asarray(data))


def test_a_buffer_can_be_overwritten_between_the_passes():
    f = eqxjit.filter_jit(lambda x: jnp.sum(x * x))
    for i in range(CALLS):
        buffer = aligned((3,))
        buffer[...] = i
        _, pull = jax.vjp(f, buffer)
        buffer[...] = 9
        assert pull(jnp.ones(()))[0].tolist() == [2 * i] * 3


#: Transformations that read the other arguments of a function again, after its call.
LATER = {
    "vjp": lambda f: lambda: jax.vjp(f, ONE)[1],
    "linearize": lambda f: lambda: jax.linearize(f, ONE)[1],
    "jaxpr": lambda f: (
        lambda: functools.partial(
            jax.core.eval_jaxpr, (closed := jax.make_jaxpr(f)(ONE)).jaxpr, closed.consts
        )
    ),
    "jit": lambda f: lambda: jax.jit(f).lower(ONE).compile(),
}


@pytest.mark.parametrize("way", LATER)
@pytest.mark.parametrize(("size", "offset"), [(3, 16), (3, 0), (200_000, 16), (200_000, 0)])
def test_a_buffer_beside_a_tracer_can_be_overwritten(way, size, offset):
    f = eqxjit.filter_jit(lambda w, x: jnp.mean(w * x))
    for i in range(CALLS):
        buffer = aligned((size,), offset)
        buffer[...] = i
        later = LATER[way](lambda w, buffer=buffer: f(w, buffer))()
        buffer[...] = 9
        [result] = jax.tree.leaves(later(ONE))
        np.testing.assert_allclose(result, i, rtol=1e-5)
