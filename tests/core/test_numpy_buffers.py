"""A NumPy buffer may be overwritten once the call has returned, and no call waits for that."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support.sides import CALLS

_SIDE = 400


def slow(x):
    y = x
    for _ in range(3):
        y = jnp.sin(y @ y.T @ y)
    # Read last, when the call has long returned.
    return jnp.sum(x + 0 * y)


def aligned(shape):
    """An array that XLA would read in place."""
    n_bytes = int(np.prod(shape)) * 4
    memory = np.empty(n_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + n_bytes].view(np.float32).reshape(shape)


class _Tagged(np.ndarray):
    pass


def _read_only(array):
    array.flags.writeable = False
    return array


FORMS = {
    "aligned": lambda a: a,
    "non-contiguous": lambda a: a[:, ::2][:, : _SIDE // 2],
    "transposed": lambda a: a.T,
    "read-only": lambda a: _read_only(a.view()),
    "a subclass": lambda a: a.view(_Tagged),
    "0-dimensional": lambda a: a[0, 0:1].reshape(()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("donate", ["none", "all"])
def test_a_buffer_of_any_kind_can_be_overwritten(form, donate):
    buffer = aligned((_SIDE, _SIDE))
    view = FORMS[form](buffer)

    def fun(x):
        return slow(x if x.ndim else jnp.broadcast_to(x, (_SIDE, 3)))

    f = eqxjit.filter_jit(fun, donate=donate)
    n = view.size if view.ndim else 3 * _SIDE
    for i in range(CALLS):
        buffer[...] = i + 1
        result = f(view)
        buffer[...] = 0
        assert float(result) == (i + 1) * n


def test_a_byte_swapped_array_is_refused_by_name():
    # Under `jax.jit` it gives wrong numbers once an array of native bytes was passed.
    f = eqxjit.filter_jit(lambda x: x + 1)
    for _ in range(CALLS):
        with pytest.raises(TypeError, match="`x` has dtype >f4"):
            f(np.ones(3, ">f4"))
        f(np.ones(3, "f4"))


def test_a_mapped_file_can_be_overwritten(tmp_path):
    mapped = np.memmap(tmp_path / "data", np.float32, "w+", shape=(_SIDE, _SIDE))
    f = eqxjit.filter_jit(slow)
    for i in range(CALLS):
        mapped[...] = i + 1
        result = f(mapped)
        mapped[...] = 0
        assert float(result) == (i + 1) * _SIDE**2


@pytest.mark.parametrize("n", [4, 100_000, 4_000_000])
def test_no_call_waits_for_a_numpy_array(n):
    def fun(x, y):
        return slow(x) + slow(x.T) + y[0]

    f = eqxjit.filter_jit(fun)
    x, y = jnp.ones((1000, 1000)), np.ones(n, np.float32)
    for _ in range(CALLS):
        f(x, y).block_until_ready()
    assert not f(x, y).is_ready()
    blocking = eqxjit.filter_jit(fun, block=True)
    for _ in range(CALLS):
        assert blocking(x, y).is_ready()


ONES = np.ones((_SIDE, _SIDE), np.float32)

TRANSFORMED = {
    "vmap": lambda f, a: jax.vmap(f)(a[None])[0],
    "filter_vmap": lambda f, a: eqx.filter_vmap(f)(a[None])[0],
    "unbatched": lambda f, a: eqx.filter_vmap(lambda x, y: f(x), in_axes=(None, 0))(a, ONES[:2])[0],
    "jvp": lambda f, a: jax.jvp(f, (a,), (ONES,)),
    "vjp": lambda f, a: (lambda y, pull: (y, pull(jnp.ones(()))))(*jax.vjp(f, a)),
    "value_and_grad": lambda f, a: jax.value_and_grad(f)(a),
    "filter_value_and_grad": lambda f, a: eqx.filter_value_and_grad(f)(a),
    "vmap of grad": lambda f, a: jax.vmap(jax.value_and_grad(f))(a[None]),
    "grad of grad": lambda f, a: jax.grad(lambda x: jax.grad(f)(x).sum())(a),
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
        # A call without a transformation between.
        f(jnp.asarray(data))
