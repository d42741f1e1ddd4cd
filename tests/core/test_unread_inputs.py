"""Inputs that one program of an entry doesn't read, and a later one does: none is read too late."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from eqxjit._core import slow
from tests.support.inside import entries
from tests.support.threads import race

SIDE = 300


def reads_if_large(x, buffers):
    """A program for one element doesn't read the buffers, one for more reads them late."""
    if x.shape[0] == 1:
        return x
    product = jnp.ones((SIDE, SIDE)) * x[0]
    for _ in range(8):
        product = jnp.tanh(product @ product)
    scale = jnp.exp(jnp.min(product) * 0)
    return jnp.stack([jnp.sum(buffer) * scale for buffer in buffers])


@pytest.mark.parametrize("donate", ["none", "warn", "warn-except-first"])
@pytest.mark.parametrize("size", [100, 10_000, SIDE * SIDE])
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_later_program_reads_more(size, donate):
    f = eqxjit.filter_jit(reads_if_large, donate=donate)
    f.clear_cache()
    buffers = [np.ones(size, np.float32), np.ones(size, np.float32)]
    for n in (1, 1, 1, 1, 2, 2, 2, 1, 3, 2, 1):
        for i, buffer in enumerate(buffers):
            buffer[...] = n + i
        out = f(jnp.ones(n), buffers)
        # No program has written into them either.
        assert [buffer[0] for buffer in buffers] == [n, n + 1]
        for buffer in buffers:
            buffer[...] = -1
        expected = [1.0] if n == 1 else [n * size, (n + 1) * size]
        np.testing.assert_allclose(out, expected, rtol=1e-3)
    (entry,) = entries(f)
    assert entry.uses == b"\1\1\1"


def test_another_thread_traces_meanwhile():
    """A call that took its arrays before waits if what is read has changed when it returns."""
    f = eqxjit.filter_jit(reads_if_large)
    f.clear_cache()
    buffers = [np.ones(SIDE * SIDE, np.float32)]
    for _ in range(4):
        f(jnp.ones(1), buffers)
    (entry,) = entries(f)

    def call(i):
        own = [np.full(SIDE * SIDE, i, np.float32)]
        out = f(jnp.ones(2), own)
        own[0][...] = -1
        assert float(out[0]) == pytest.approx(i * SIDE * SIDE, rel=1e-3)

    race(call)
    assert entry.uses == b"\1\1"
    assert jax.tree.leaves(f(jnp.ones(1), buffers))[0].shape == (1,)


def test_a_program_that_reads_more_is_traced_while_a_fast_path_is_made(monkeypatch):
    f = eqxjit.filter_jit(reads_if_large)
    f.clear_cache()
    buffers = [np.ones(SIDE * SIDE, np.float32)]
    make = slow.fast_path

    def make_meanwhile(call):
        monkeypatch.setattr(slow, "fast_path", make)
        fast = make(call)
        f(jnp.ones(2), buffers)
        return fast

    monkeypatch.setattr(slow, "fast_path", make_meanwhile)
    f(jnp.ones(1), buffers)
    for n in range(1, 6):
        buffers[0][...] = n
        out = f(jnp.ones(2), buffers)
        buffers[0][...] = -1
        assert float(out[0]) == pytest.approx(n * SIDE * SIDE, rel=1e-3)


class Summed(eqx.Module):
    """A function that holds a buffer, which it reads late, beside an input that it doesn't read."""

    buffer: np.ndarray

    def __call__(self, x, unread):
        return reads_if_large(x, [self.buffer])[0]


@pytest.mark.parametrize("size", [100, SIDE * SIDE])
def test_the_arrays_of_the_function_are_told_from_those_of_its_arguments(size):
    buffer, unread = np.ones(size, np.float32), np.ones(size, np.float32)
    f = eqxjit.filter_jit(Summed(buffer))
    for n in range(1, 8):
        buffer[...] = n
        out = f(jnp.ones(2), unread)
        buffer[...] = -1
        assert float(out) == pytest.approx(n * size, rel=1e-3)
