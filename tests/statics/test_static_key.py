"""Typed static keys: values that are equal by `==`, although a program can tell them apart.

Where Equinox's result is wrong, the tests check it, too, so that a fix is noticed.
"""

import collections
import copy
import dataclasses
import decimal
import enum
import fractions
import functools
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support.helpers import Twins, assert_same
from tests.support.models import Frozen, Pair, Thawed
from tests.support.sides import CALLS


class Level(enum.IntEnum):
    ONE = 1


class Text(str):
    pass


class OtherPair(NamedTuple):
    first: Any
    second: Any


#: Values with equal hashes that are equal by `==`, but that a program can tell apart.
CONFUSABLE = {
    "one": (1, True, 1.0, Level.ONE, fractions.Fraction(1)),
    "signs": (0.0, -0.0),
    "zero": (0, False, 0.0, -0.0, complex(0.0, 0.0), complex(0.0, -0.0), complex(-0.0, 0.0)),
    "str": ("a", Text("a")),
    "tuple": ((1, (2,)), (1, (2.0,)), (True, (2,)), Pair(1, (2,)), OtherPair(1, (2,))),
    "frozenset": (frozenset({1, "a"}), frozenset({1.0, "a"}), frozenset({True, "a"})),
}

#: The same for values that can't be hashed, and so can only be in static fields.
CONFUSABLE_UNHASHABLE = {
    "list": ([1, [0.0]], [True, [0.0]], [1, [-0.0]], [1, [0]]),
    "dict": (
        {"a": 1},
        {"a": 1.0},
        {"a": True},
        collections.OrderedDict(a=1),
        collections.defaultdict(list, a=1),
        collections.Counter(a=1),
    ),
    "keys": ({1: "a"}, {True: "a"}, {1.0: "a"}, {Level.ONE: "a"}),
    "set": ({1, 2}, {1.0, 2}, frozenset({1, 2})),
    "order of a dict": ({"a": 1, "b": 1}, {"b": 1, "a": 1}),
    "order of a dict within": ([{"a": {0: 1, 1: 1}}], [{"a": {1: 1, 0: 1}}]),
}


class Holder(eqx.Module):
    value: Any = eqx.field(static=True)


class LeafHolder(eqx.Module):
    value: Any


AS_LEAF = {
    "an argument": (lambda v: v, lambda t: t),
    "a dict": (lambda v: {"k": v}, lambda t: t["k"]),
    "a Module's field": (LeafHolder, lambda t: t.value),
    "a Partial": (lambda v: eqx.Partial(max, v), lambda t: t.args[0]),
    "a frozen dataclass": (Frozen, lambda t: t.value),
    "a dataclass that can change": (Thawed, lambda t: t.value),
}

AS_METADATA = {
    "a static field": (Holder, lambda t: t.value),
    "a slice in a static field": (lambda v: Holder(slice(1, v)), lambda t: t.value.stop),
    "a dataclass in a static field": (lambda v: Holder(Frozen(v)), lambda t: t.value.value),
    "a Module in a static field": (lambda v: Holder(Holder(v)), lambda t: t.value.value),
}

#: Each kind of value as a leaf and as metadata, and a few kinds in all other places.
CASES = [
    *[("an argument", group) for group in CONFUSABLE],
    *[("a static field", group) for group in CONFUSABLE | CONFUSABLE_UNHASHABLE],
    *[
        (place, group)
        for place in AS_LEAF | AS_METADATA
        if place not in ("an argument", "a static field")
        for group in ("one", "signs")
    ],
]


def shown(value):
    """Return a text with all differences that `==` ignores."""
    return type(value).__name__, repr(value)


@pytest.mark.parametrize(("place", "group"), CASES)
def test_equal_values_that_differ_are_told_apart(place, group):
    """Equinox returns the first value's result for all of them."""
    put, get = (AS_LEAF | AS_METADATA)[place]
    values = (CONFUSABLE | CONFUSABLE_UNHASHABLE)[group]
    twins = Twins(lambda tree: shown(get(tree)))
    right = [shown(value) for value in values]
    assert [twins.upstream(put(value)) for value in values] != right
    for _ in range(CALLS):
        assert [twins.ours(put(value)) for value in values] == right
    assert twins.ours.traces == len(values)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda v: functools.partial(lambda v, x: (x, shown(v)), v),
        lambda v: Scaled(jnp.ones(2), v),
    ],
)
def test_equal_values_within_the_function_are_told_apart(wrap):
    """Wrappers of equal Modules share a cache, as Equinox's wrappers of Modules do."""
    functions = [(value, wrap(value)) for value in CONFUSABLE["one"]]
    for _ in range(CALLS):
        for value, function in functions:
            assert eqxjit.filter_jit(function)(jnp.zeros(2))[1] == shown(value)


class Scaled(eqx.Module):
    weight: Any
    by: Any = eqx.field(static=True)

    def __call__(self, x):
        return x * self.weight, shown(self.by)


# --- NaN --------------------------------------------------------------------------------------

NANS = {
    "float": lambda: float("nan"),
    "complex": lambda: complex(float("nan"), 1.0),
    "in a list in a static field": lambda: Holder([float("nan")]),
    "as a key in a static field": lambda: Holder({float("nan"): 1}),
}


@pytest.mark.parametrize("name", NANS)
def test_nan_equals_nan(name):
    """Equinox traces again for each new NaN."""
    twins = Twins(lambda x, value: (x * 2, shown(value)))
    make = NANS[name]
    for i in range(CALLS):
        x = jnp.arange(3.0) + i
        value = make()
        assert_same(twins.ours(x, value), (x * 2, shown(value)))
        assert_same(twins.upstream(x, value), (x * 2, shown(value)))
    assert twins.ours.traces == 1
    assert twins.upstream.traces == CALLS


def test_numbers_that_differ_are_told_apart():
    f = eqxjit.filter_jit(shown)
    values = [math.nan, math.inf, -math.inf, 1.0, "nan", complex(math.nan, 0), math.nan]
    values += [True, False, 0j, 1j]
    values += [Holder({float("nan") for _ in range(n)}) for n in (1, 2)]
    for _ in range(CALLS):
        assert [f(v) for v in values] == [shown(v) for v in values]


# --- Never more traces than upstream, those cases aside --------------------------------------


class ByName:
    """A class with an `==` that compares only the name."""

    def __init__(self, name, note):
        self.name = name
        self.note = note

    def __eq__(self, other):
        return type(other) is type(self) and self.name == other.name

    def __hash__(self):
        return hash(self.name)


class ByNameUnhashable(ByName):
    __hash__ = None


@dataclasses.dataclass(frozen=True)
class Noted:
    value: Any
    note: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True)
class Rounded:
    """A dataclass with an `==` of its own, which the decorator keeps."""

    value: float

    def __eq__(self, other):
        return type(other) is Rounded and round(self.value) == round(other.value)

    def __hash__(self):
        return hash(round(self.value))


@dataclasses.dataclass(frozen=True, eq=False)
class ByIdentity:
    value: Any


class Tagged(tuple):
    """A container with an `==` that compares more than the items."""

    def __new__(cls, tag):
        made = super().__new__(cls, (1, 2))
        made.tag = tag
        return made

    def __eq__(self, other):
        return type(other) is Tagged and self.tag == other.tag

    def __hash__(self):
        return hash(self.tag)


kept = ByIdentity(1)

SAME = {
    "own ==": (ByName("a", 1), ByName("a", 2)),
    "own == of a dataclass": (Rounded(1.0), Rounded(1.1)),
    "field that isn't compared": (Noted(1, "a"), Noted(1, "b")),
    "dataclass": (Frozen((1, 2.0)), Frozen((1, 2.0))),
    "bound method of a plain object": (kept.__repr__, kept.__repr__),
    "decimals": (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    "Modules without arrays": (LeafHolder((1, "a")), LeafHolder((1, "a"))),
    "static fields": (Holder({"a": [1, {2}], "b": 3}), Holder({"a": [1, {2}], "b": 3})),
    "own == that can't be hashed": (
        Holder(ByNameUnhashable("a", 1)),
        Holder(ByNameUnhashable("a", 2)),
    ),
    "own == in a list in a static field": (Holder([ByName("a", 1)]), Holder([ByName("a", 2)])),
}


DIFFERENT = {
    "identity": (ByIdentity(1), ByIdentity(1)),
    "lambdas": (lambda: 1, lambda: 1),
    "functools.partial": (functools.partial(max, 1), functools.partial(max, 1)),
    "dict order in an OrderedDict": (
        collections.OrderedDict(a=1, b=1),
        collections.OrderedDict(b=1, a=1),
    ),
    "default factories": (
        collections.defaultdict(list, a=1),
        collections.defaultdict(tuple, a=1),
    ),
    "own == of a tuple": (Tagged("a"), Tagged("b")),
}


@pytest.mark.parametrize(
    ("values", "traces"),
    [*((pair, 1) for pair in SAME.values()), *((pair, 2) for pair in DIFFERENT.values())],
    ids=[*(f"same {name}" for name in SAME), *(f"different {name}" for name in DIFFERENT)],
)
def test_the_same_values_share_a_trace_and_different_ones_do_not(values, traces):
    twins = Twins(lambda x, value: x * 2)
    for i in range(CALLS):
        for value in values:
            x = jnp.arange(3.0) + i
            assert_same(twins.ours(x, value), x * 2)
            assert_same(twins.upstream(x, value), x * 2)
    assert (twins.ours.traces, twins.upstream.traces) == (traces, traces)


@pytest.mark.parametrize("n", [98, 100, 102])
@pytest.mark.parametrize("kind", ["list", "set", "dict", "depth"])
def test_a_change_in_place_is_seen_up_to_the_bound(kind, n):
    """Beyond the bound of parts or depth, the same object counts as unchanged."""
    inner = [1]
    nested = functools.reduce(lambda within, _: [within], range(n - 1), inner)
    value, change = {
        "list": (parts := [*range(n)], lambda: parts.append(parts.pop() + 1)),
        "set": (numbers := {*range(n)}, lambda: numbers.add(numbers.pop() + n)),
        "dict": (items := dict.fromkeys(range(n)), lambda: items.update({0: 1})),
        "depth": (nested, lambda: inner.append(inner.pop() + 1)),
    }[kind]
    f = eqxjit.filter_jit(lambda holder, x: x)
    holder = Holder(value)
    for _ in range(CALLS):
        f(holder, 1.0)
    change()
    for _ in range(CALLS):
        f(holder, 1.0)
    assert f.cache_info().traces == 1 + (n <= 100)


# --- Arrays in static fields: compared by class, dtype, shape and content ---------------------


ignore_warning = pytest.mark.filterwarnings("ignore:A JAX array is being set as static")


class Tabled(eqx.Module):
    weight: Any
    table: Any = eqx.field(static=True)


#: Groups of arrays of which no two may share a program.
GROUPS = {
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
@ignore_warning
def test_static_arrays_are_told_apart(group, put):
    f = eqxjit.filter_jit(lambda holder: (holder.weight * 2, repr(holder.table)))
    for _ in range(3):
        # Created again each time, because equal arrays share a program.
        for table in [put(array.copy()) for array in group] * 2:
            assert_same(f(Tabled(jnp.ones(2), table)), (2 * jnp.ones(2), repr(table)))
    assert f.cache_info().traces == len(group)


@ignore_warning
def test_static_arrays_of_a_subclass_or_of_objects_and_keys_compare_by_identity():
    f = eqxjit.filter_jit(lambda holder: (holder.weight * 2, repr(holder.table)))
    tables = [np.ma.array([1.0, 2.0], mask=mask) for mask in ([0, 1], [1, 0], [1, 0])]
    tables += [jax.random.key(0), np.array([None, 1]), np.array([None, 1])]
    for table in tables * 3:
        assert_same(f(Tabled(jnp.ones(2), table)), (2 * jnp.ones(2), repr(table)))
    assert f.cache_info().traces == len(tables)


@ignore_warning
def test_a_static_array_changed_in_place_is_no_new_trace():
    """JAX may keep using the old content, so a new trace would be useless. A copy is compared."""
    f = eqxjit.filter_jit(lambda holder: holder.weight * holder.table)
    table = np.ones(2)
    for _ in range(3):
        f(Tabled(jnp.ones(2), table))
    table[0] = 5.0
    for _ in range(3):
        f(Tabled(jnp.ones(2), table))
    assert f.cache_info().traces == 1
    for _ in range(3):
        assert_same(f(Tabled(jnp.ones(2), table.copy())), jnp.array([5.0, 1.0]))
        assert_same(f(Tabled(jnp.ones(2), np.ones(2))), jnp.ones(2))
    assert f.cache_info().traces == 2


HOLD = {
    "a field": (lambda t: t, lambda t: t),
    "a list": (lambda t: [t], lambda t: t[0]),
    "a dict": (lambda t: {"t": (t,)}, lambda t: t["t"][0]),
    "a dataclass": (Thawed, lambda t: t.value),
    "a Module": (lambda t: Tabled(1, t), lambda t: t.table),
}


@pytest.mark.parametrize("name", HOLD)
@pytest.mark.parametrize("n_warm", [1, CALLS])
@ignore_warning
def test_a_changed_array_spoils_nothing_for_others(name, n_warm):
    """A trace for another shape compiles in the array's current content."""
    put, get = HOLD[name]
    # Not the array itself: JAX may go on using what that held.
    f = eqxjit.filter_jit(lambda holder: holder.weight * get(holder.table).tolist()[0])
    changed = np.array([1.0, 2.0])
    never_changed = changed.copy()

    def call(table, *shape):
        return f(Tabled(jnp.ones((*shape, 2)), put(table)))[..., 0].sum()

    for _ in range(n_warm):
        assert call(changed) == 1
    changed[:] = 5
    for n in 3, 4:
        call(changed, n)
        for _ in range(CALLS):
            assert call(never_changed, n) == n
            assert call(np.array([1.0, 2.0]), n) == n
            assert call(np.array([5.0, 2.0]), n) == 5 * n
    # Older programs still serve other arrays, or are compiled again.
    assert call(np.array([1.0, 2.0])) == 1


@pytest.mark.parametrize("content", [[2.0], {"by": 2.0}], ids=["list", "dict"])
def test_a_changed_container_of_a_function_spoils_nothing_for_later_functions(content):
    class Scale(eqx.Module):
        by: Any = eqx.field(static=True)

        def __call__(self, x):
            return x * sum(self.by.values() if isinstance(self.by, dict) else self.by)

    changed = copy.copy(content)
    f = eqxjit.filter_jit(Scale(changed))
    assert f(jnp.ones(3))[0] == 2
    assert eqxjit.filter_jit(Scale(copy.copy(content)))(jnp.ones(3))[0] == 2
    # Both functions have the same program so far.
    assert f.cache_info().traces == 1
    changed.update(more=3.0) if isinstance(changed, dict) else changed.append(3.0)
    assert f(jnp.ones(4))[0] == 5
    for _ in range(CALLS):
        assert eqxjit.filter_jit(Scale(copy.copy(content)))(jnp.ones(4))[0] == 2


@pytest.mark.parametrize("is_first", [True, False])
@ignore_warning
def test_a_changed_array_of_a_function_spoils_nothing_for_others(is_first):
    """Equal Modules share programs, and calls don't compare the wrapper's static objects."""

    class Scale(eqx.Module):
        by: Any = eqx.field(static=True)

        def __call__(self, x):
            # Not the array itself: JAX may go on using what that held.
            return x * float(self.by[0])

    arrays = [np.array([2.0]), np.array([2.0])]
    functions = [eqxjit.filter_jit(Scale(array)) for array in arrays]
    for f in functions:
        assert f(jnp.ones(3))[0] == 2
    changed, other = functions if is_first else functions[::-1]
    arrays[not is_first][:] = 5
    assert changed(jnp.ones(4))[0] == 5
    for _ in range(CALLS):
        assert other(jnp.ones(4))[0] == 2
        assert eqxjit.filter_jit(Scale(np.array([2.0])))(jnp.ones(4))[0] == 2
        assert eqxjit.filter_jit(Scale(np.array([5.0])))(jnp.ones(3))[0] == 5
