"""Constants are compared alike by the native back end, by Python, and by typed static keys."""

import collections
import itertools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eqxjit
from eqxjit._trees import constants
from eqxjit._trees.key_cache import static_key
from eqxjit._trees.static_key import ByContent, typed_key
from tests.support.helpers import OF_FRAMELESS_CALLS, assert_same, our_frames, warm
from tests.support.hiding import reads_fields

BOTH = pytest.mark.parametrize(
    ("is_same", "is_constant"),
    [
        (constants.is_same_by_python, constants.is_constant_by_python),
        (constants.is_same, constants.is_constant),
    ],
    ids=["Python", "as is"],
)

X = jnp.arange(3.0)


class Text(str):
    """A text of the user's."""


class Always(tuple):
    """Equals anything."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return hash(1)


def nested(depth, inner=()):
    for _ in range(depth):
        inner = (inner,)
    return inner


def nan():
    return float("nan")


#: Makers of values, no two of which are the same.
DIFFERENT = [
    lambda: None,
    *[lambda value=value: value for value in (True, False, 0, 1, 2, 10**30, -(10**30), "", "a")],
    *[lambda value=value: value for value in (b"", b"a", 0.0, -0.0, 1.0, math.inf, -math.inf)],
    nan,
    *[
        lambda real=real, imaginary=imaginary: complex(real, imaginary)
        for real, imaginary in itertools.product((0.0, -0.0, 1.0, math.nan), repeat=2)
    ],
    *[lambda value=value: (*value,) for value in ((), (1,), (True,), (1.0,), (1, 2), (2, 1))],
    *[lambda value=value: (value,) for value in (0.0, -0.0, "a", b"a", None, ((),))],
    lambda: (nan(),),
    lambda: ((1, "a"), (2, ("b", 0.5))),
    lambda: ((1, "a"), (2, ("b", 0.25))),
    *[lambda value=value: frozenset(value) for value in ((), (1,), ("1",), (1, "1"), (b"1", 1))],
    lambda: (frozenset(["a", 10**20]),),
    lambda: (frozenset(["a", 10**20, None]),),
]

#: Not told here, whatever they hold.
OTHERS = [
    lambda: Text("a"),
    lambda: Always((1,)),
    lambda: (1, Always((1,))),
    lambda: [1],
    lambda: ([1],),
    lambda: frozenset([True]),
    lambda: frozenset([1.0]),
    lambda: frozenset([(1,)]),
    lambda: frozenset([Text("a")]),
    lambda: range(1),
    lambda: collections.namedtuple("Pair", "a b")(1, 2),
]


@BOTH
def test_the_same_are_told_from_all_others(is_same, is_constant):
    pairs = [*itertools.product(enumerate(DIFFERENT), repeat=2)]
    for (i, one), (j, other) in pairs:
        assert is_same(one(), other()) is (i == j), (one(), other())
    for other, (_, make) in itertools.product(OTHERS, enumerate(DIFFERENT)):
        assert not is_same(other(), make())
        assert not is_same(make(), other())


@BOTH
@pytest.mark.parametrize("make", OTHERS)
def test_what_is_no_constant_is_itself_alone(make, is_same, is_constant):
    value = make()
    assert is_same(value, value)
    assert not is_same(make(), value)
    assert not is_constant(value)


@BOTH
def test_constants_that_a_hash_tells(is_same, is_constant):
    for make in DIFFERENT:
        value = make()
        assert is_constant(value) == ("nan" not in repr(value)), value
        assert is_constant((value, (1, value))) == is_constant(value)


@BOTH
def test_depth(is_same, is_constant):
    for depth in (1, 198):
        assert is_constant(nested(depth))
        assert is_same(nested(depth), nested(depth))
        assert not is_same(nested(depth, (1,)), nested(depth, (2,)))
    for depth in (199, 200, 5_000):
        assert not is_constant(nested(depth))
        assert not is_constant(nested(depth, frozenset()))
    value = nested(100_000)
    assert is_same(value, value)


def test_what_is_held_twice_by_what_is_held_twice():
    def doubled(inner):
        for _ in range(150):
            inner = (inner, inner)
        return inner

    assert constants.is_constant_by_python(doubled(1.0))
    assert not constants.is_constant_by_python(doubled(nan()))
    assert constants.is_same_by_python(doubled((1, 0.0)), doubled((1, 0.0)))
    assert not constants.is_same_by_python(doubled((1, 0.0)), doubled((1, -0.0)))


def n_parts(constant):
    return 1 + sum(map(n_parts, constant)) if type(constant) in (tuple, frozenset) else 1


@pytest.mark.parametrize(
    "has_more_parts", [constants.has_more_parts_by_python, constants.has_more_parts]
)
def test_the_number_of_parts(has_more_parts):
    values = [1, "ab", (), (1, "ab"), frozenset("abc"), (frozenset("abc"), (1, ()), 2), nested(190)]
    for value in [*values, (*values, *values)]:
        assert has_more_parts(value, n_parts(value) - 1)
        assert not has_more_parts(value, n_parts(value))
    shared = (1,)
    for _ in range(150):
        shared = (shared, shared)
    assert has_more_parts(shared, 10_000)


ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 1), st.sampled_from(["", "a"]), st.just(b"a"),
    st.sampled_from([0.0, -0.0, 1.0, math.nan]), st.builds(complex, st.sampled_from([0.0, -0.0])),
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(ATOMS, st.frozensets(ATOMS, max_size=3)),
    lambda below: st.lists(below, max_size=3).map(tuple),
    max_leaves=6,
)


@given(VALUES, VALUES)
def test_all_three_agree(one, other):
    told = static_key(one) == static_key(other)
    for value, expected in [(one, other), (other, one)]:
        same = constants.is_same(value, expected)
        assert same == constants.is_same_by_python(value, expected)
        # A no is no answer for what isn't a constant.
        assert told or not same
        if constants.is_constant(one) and constants.is_constant(other):
            assert told == same
    assert constants.is_constant(one) == constants.is_constant_by_python(one)
    if constants.is_constant(one):
        assert hash(static_key(one)) == hash(static_key(one))


def test_keys_of_constants():
    for value in [(1, (2.0, "a")), frozenset("a")]:
        assert type(typed_key(value)) is type(static_key(value)) is ByContent
    key = static_key((1, (2.0, "a")))
    assert key == static_key((1, (2.0, "a")))
    assert key != static_key((1, (2, "a")))
    assert key != (1, (2.0, "a"))
    assert type(static_key((1, (math.nan,)))) is not ByContent
    assert static_key((1, (math.nan,))) == static_key((1, (nan(),)))


@pytest.mark.skipif(not eqxjit.native_enabled(), reason="There is none.")
def test_arguments_of_the_native_functions():
    for arguments in [(), (1,), (1, 2, 3)]:
        with pytest.raises(TypeError):
            constants.is_same(*arguments)


class Layer(eqx.Module):
    weight: jax.Array
    static: object = eqx.field(static=True)


#: Static objects that are made anew for each call, as a loop that builds a Module does.
REBUILT = [
    lambda: 0.0,
    nan,
    lambda: complex(0.0, -1.0),
    lambda: frozenset(range(1_000)),
    lambda: tuple([(i, (str(i), i / 2)) for i in range(2_000)]),
]


@reads_fields
@pytest.mark.parametrize("make", REBUILT)
class TestRebuilt:
    pytestmark = OF_FRAMELESS_CALLS

    def test_fields_are_compared_in_the_back_end(self, make):
        f = eqxjit.filter_jit(lambda layer, x: x + 1)
        warm(f, Layer(X, make()), X)
        layer = Layer(X, make())
        assert our_frames(lambda: f(layer, X)) == []
        assert f.cache_info().traces == 1

    def test_so_are_leaves(self, make):
        f = eqxjit.filter_jit(lambda leaves, x: x + 1)
        warm(f, [make(), make(), X], X)
        leaves = [make(), make(), X]
        assert our_frames(lambda: f(leaves, X)) == []
        assert f.cache_info().traces == 1

    def test_another_one_is_traced(self, make):
        f = eqxjit.filter_jit(lambda layer, x: repr(layer.static))
        warm(f, Layer(X, make()), X)
        other = -1.0 if type(make()) is float else (make(), 1)
        for _ in range(3):
            assert f(Layer(X, other), X) == repr(other)
        assert f.cache_info().traces == 2


def test_nan_in_a_rebuilt_tuple():
    f = eqxjit.filter_jit(lambda layer, x: x + 1)
    for _ in range(5):
        assert_same(f(Layer(X, tuple([nan() for _ in range(5_000)])), X), X + 1)
    assert f.cache_info().traces == 1
