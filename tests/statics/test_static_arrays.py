"""Arrays in static fields: compared by class, dtype, shape and content."""

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


#: Groups of arrays of which no two may share a program.
GROUPS = {
    "objects": [
        *[np.array([None] * 6, object).reshape(shape) for shape in ((2, 3), (3, 2))],
        *[np.array([value] * 6, object).reshape(2, 3) for value in (1, 1.0, True)],
    ],
    "bytes": [np.zeros(2, dtype) for dtype in ("<i4", ">i4", "<i8", "<f4")],
    "large": [np.arange(5000.0).reshape(s) for s in ((5000,), (50, 100))],
    "content": [np.arange(5000.0) + i for i in range(3)],
    "signs of zero": [np.zeros(1), -np.zeros(1)],
    # `==` broadcasts and converts.
    "of JAX": [
        *(jnp.ones(1), jnp.ones((1, 1)), jnp.ones((), int), jnp.ones(()), jnp.asarray(1.0)),
        *(jnp.zeros(1), -jnp.zeros(1)),
    ],
    "NumPy and JAX": [np.ones(2, np.float32), jnp.ones(2), jnp.ones(2, jnp.int32)],
}

PLACES = {"a field": lambda t: t, "a list": lambda t: [t, 1], "a dict": lambda t: {"t": t}}


@pytest.mark.parametrize("put", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_static_arrays_are_told_apart(group, put):
    f = eqxjit.filter_jit(lambda holder: (holder.weight * 2, repr(holder.table)))
    for _ in range(3):
        # Made again each time: equal ones share a program.
        for table in [put(array.copy()) for array in group] * 2:
            assert_same(f(Holder(jnp.ones(2), table)), (2 * jnp.ones(2), repr(table)))
    assert f.cache_info().traces == len(group)


def test_static_arrays_of_a_subclass_compare_by_identity():
    f = eqxjit.filter_jit(lambda holder: (holder.weight * 2, repr(holder.table)))
    tables = [np.ma.array([1.0, 2.0], mask=mask) for mask in ([0, 1], [1, 0], [1, 0])]
    for table in tables * 3:
        assert_same(f(Holder(jnp.ones(2), table)), (2 * jnp.ones(2), repr(table)))
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
