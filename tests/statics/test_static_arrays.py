"""Arrays in static fields: compared by class, dtype, shape, content and a subclass's state."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support.helpers import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:A JAX array is being set as static")


class Holder(eqx.Module):
    weight: Any
    table: Any = eqx.field(static=True)


class Tagged(np.ndarray):
    """A subclass with a state of its own."""

    tag: str


def tagged(tag):
    made = np.arange(6.0).view(Tagged)
    made.tag = tag
    return made


def mapped(tmp_path, shape):
    path = tmp_path / "numbers"
    np.arange(6.0).tofile(path)
    return np.memmap(path, dtype=np.float64, mode="r", shape=shape)


#: Groups of arrays of which no two may share a program, each made by the test's folder.
GROUPS = {
    "memmap": lambda p: [mapped(p, (2, 3)), mapped(p, (3, 2)), np.arange(6.0).reshape(2, 3)],
    "matrix": lambda p: [np.arange(6.0).reshape(s).view(np.matrix) for s in ((2, 3), (3, 2))],
    "masked": lambda p: [np.ma.array([1.0, 2.0], mask=m) for m in ([0, 1], [1, 0], [0, 0])],
    "fill value": lambda p: [np.ma.array([1.0], mask=[1], fill_value=v) for v in (1.0, 2.0)],
    "objects": lambda p: [
        *[np.array([None] * 6, object).reshape(shape) for shape in ((2, 3), (3, 2))],
        *[np.array([value] * 6, object).reshape(2, 3) for value in (1, 1.0, True)],
    ],
    "state": lambda p: [tagged("a"), tagged("b")],
    "bytes": lambda p: [np.array([1, 2], dtype) for dtype in ("<i4", ">i4", "<i8", "<f4")],
    "large": lambda p: [np.arange(5000.0), np.arange(5000.0).reshape(50, 100), np.ones(5000)],
    "signs of zero": lambda p: [np.zeros(1), -np.zeros(1)],
    "NumPy and JAX": lambda p: [np.ones(2, np.float32), jnp.ones(2), jnp.ones(2, jnp.int32)],
}

PLACES = {"a field": lambda t: t, "a list": lambda t: [t, 1], "a dict": lambda t: {"t": t}}


@pytest.mark.parametrize("put", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_static_arrays_are_told_apart(group, put, tmp_path):
    f = eqxjit.filter_jit(lambda holder: (holder.weight * 2, repr(holder.table)))
    for _ in range(3):
        # Made again each time: equal ones share a program.
        tables = [put(table) for table in group(tmp_path)]
        # Of others, because a masked array finds its fill value once it is asked.
        texts = [repr(put(table)) for table in group(tmp_path)]
        for table, text in zip(tables * 2, texts * 2, strict=True):
            assert_same(f(Holder(jnp.ones(2), table)), (2 * jnp.ones(2), text))
    assert f.cache_info().traces == len(tables)


def test_a_static_array_changed_in_place_is_no_new_trace():
    """JAX may go on using what it held, so another trace would be in vain; a copy counts."""
    f = eqxjit.filter_jit(lambda holder: holder.weight * holder.table)
    table = np.ones(2)
    for _ in range(3):
        f(Holder(jnp.ones(2), table))
    table[0] = 5.0
    for _ in range(3):
        f(Holder(jnp.ones(2), table))
    assert f.cache_info().traces == 1
    for _ in range(3):
        assert_same(f(Holder(jnp.ones(2), table.copy())), jnp.array([5.0, 1.0]))
        assert_same(f(Holder(jnp.ones(2), np.ones(2))), jnp.ones(2))
    assert f.cache_info().traces == 2


def test_static_keys_of_random_numbers_compare_by_identity():
    key = jax.random.key(0)
    f = eqxjit.filter_jit(lambda holder: holder.weight * 2)
    for _ in range(3):
        f(Holder(jnp.ones(2), key))
    assert f.cache_info().traces == 1
