"""Fast paths do the same as the slow path, for random trees, and after changes in place.

A fast path matches a call exactly if the call has its spec. It then takes the arrays that `split`
takes, and returns the output that `combine` returns.
"""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eqxjit._fast.writer import TooLarge
from eqxjit._spec.static_key import MAX_PARTS, Opaque, Static, static_key
from eqxjit._spec.tree import combine, split
from tests.fast.paths import Path, Taken, each_path
from tests.support import changes, nodes, strategies
from tests.support.helpers import Own, outcome
from tests.support.profile import PROFILE
from tests.support.strategies import Made

N_EXAMPLES = {"fast": 120, "thorough": 5_000}[PROFILE]

X = jnp.arange(3.0)


# --- Strategies -------------------------------------------------------------------------------


def filled(kind, n, last):
    """Return a container of a kind with `n` parts."""
    parts = [*range(n - 1), last]
    return dict.fromkeys(parts, 1) if kind is dict else kind(parts)


def nested(depth, value):
    """Return a value within as many lists as `depth` says."""
    for _ in range(depth):
        value = [value]
    return value


def large_numpy(size):
    return np.full(size, 1.5)


class StaticHolder(eqx.Module):
    """A Module without arrays. Its static field may hold a container that is changed in place."""

    value: Any = eqx.field(static=True)
    weight: Any = 0


def static_holder(value):
    module = StaticHolder(None)
    # Not by the constructor, because Equinox looks for arrays in a static field, and can't do that
    # in a dict whose keys can't be sorted.
    object.__setattr__(module, "value", value)
    return module


_sizes = st.sampled_from([MAX_PARTS - 1, MAX_PARTS, MAX_PARTS + 1])
_large = st.one_of(
    st.builds(
        functools.partial(Made, filled),
        st.sampled_from([list, tuple, set, dict]),
        _sizes,
        st.sampled_from([Made(int, "7000"), Made(float, "nan"), Made(Own, 1)]),
    ),
    st.builds(functools.partial(Made, nested), st.sampled_from([3, 99, 100, 101]), st.just(1)),
)
_own = st.builds(functools.partial(Made, Own), st.integers(0, 2))

_numpy_arrays = st.builds(functools.partial(Made, large_numpy), st.sampled_from([2, 4000]))


@st.composite
def trees(draw: st.DrawFn) -> Made:
    """Draw trees, and Modules with large static containers, below `MAX_PARTS` and above it."""
    way = draw(st.integers(0, 5))
    if way == 0:
        return draw(_numpy_arrays)
    if way <= 2:
        return Made(static_holder, draw([_large, strategies.static_fields | _own][way - 1]))
    return draw(strategies.trees)


@st.composite
def variations_of(draw: st.DrawFn, one: Made) -> Made:
    if draw(st.integers(0, 5)) == 0:
        return draw(trees())
    other = draw(strategies.variations_of(one))
    try:
        other()
    except ValueError:
        # Equinox raises it for a different Module with a dict like the one in `static_holder`.
        assume(False)
    return other


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Made, Made]:
    one = draw(trees())
    return one, draw(variations_of(one))


# --- The property -----------------------------------------------------------------------------


def assert_equivalent(path: Path, *args: Any, **kwargs: Any) -> bool:
    """Check that a fast path does the same as the slow path for a call; return if it matches."""
    call = outcome(path.split, *args, **kwargs)
    if isinstance(call, Exception):
        # The fast path leaves the error to the slow path, or raises the same one.
        found = outcome(path, *args, **kwargs)
        assert found is None or (type(found), str(found)) == (type(call), str(call))
        return False
    is_equal = call.spec == path.spec
    taken = path(*args, **kwargs)
    if not (taken is not None and shrank(path.spec)):
        assert (taken is not None) == is_equal, (path.spec, call.spec)
    if taken is None or not is_equal:
        return False
    expected: Taken = path.expected(call)
    assert len(taken.arrays) == len(expected.arrays)
    for array, other in zip(taken.arrays, expected.arrays, strict=True):
        if isinstance(other, np.ndarray):
            assert type(array) is type(other)
            assert array.dtype == other.dtype
            assert array.tobytes() == other.tobytes()
        else:
            assert array is other
    _assert_same_output(taken.output, expected.output)
    return True


def shrank(spec: Any) -> bool:
    """Return whether a container had more than `MAX_PARTS` parts, and has fewer now.

    A fast path then takes the same object to be unchanged, but the slow path doesn't.
    """
    pending = [spec]
    while pending:
        part = pending.pop()
        if isinstance(part, (tuple, frozenset)):
            pending.extend(part)
        elif isinstance(part, Static):
            pending.append(part.key)
        elif isinstance(part, Opaque) and type(static_key(part.value)) is not Opaque:
            return True
    return False


def _assert_same_output(one: Any, other: Any) -> None:
    spec, arrays, statics = split(one, is_input=False)
    other_spec, other_arrays, other_statics = split(other, is_input=False)
    assert spec == other_spec
    for a, b in zip([*arrays, *statics], [*other_arrays, *other_statics], strict=True):
        # A flatten function may create new metadata each time.
        assert a is b or type(a) in (tuple, list, dict, type(b)), (a, b)
    assert jax.tree_util.tree_structure(one) == jax.tree_util.tree_structure(other)


def path_of(kind: str, fun: Any, body: Any, *args: Any, **kwargs: Any) -> Path:
    try:
        return Path(kind, fun, body, *args, **kwargs)
    except TooLarge:
        assume(False)
        raise
    except Exception:
        # The slow path rejects an argument.
        assume(False)
        raise


def outputs(args, kwargs):
    """Return an output with the arguments, and with arrays and static objects of the trace."""
    return [args, {"kwargs": kwargs, "own": (X, [1.5, None], nodes.Layer(X, "own", [2]))}]


def anything(*args, **kwargs):
    raise AssertionError


@each_path
@settings(max_examples=N_EXAMPLES)
@given(data=st.data())
def test_it_matches_exactly_if_the_specs_are_equal(kind, data):
    one, other = data.draw(pairs())
    value = one()
    path = path_of(kind, anything, outputs, value, 1, x=value)
    assert_equivalent(path, value, 1, x=value)
    again, varied = one(), [other(), data.draw(variations_of(one))()]
    # What differed in the last call that didn't match may be compared first.
    for each in [*varied, *varied]:
        assert_equivalent(path, again, 1, x=again)
        assert_equivalent(path, each, 1, x=again)
        assert_equivalent(path, again, 1, x=each)
    assert not assert_equivalent(path, again, True, x=again)


@each_path
@settings(max_examples=N_EXAMPLES)
@given(data=st.data())
def test_it_matches_exactly_if_the_specs_are_equal_after_changes_in_place(kind, data):
    args, kwargs = [data.draw(trees())()], {"x": data.draw(trees())()}
    path = path_of(kind, anything, outputs, *args, **kwargs)
    for change in data.draw(st.lists(strategies.changes, min_size=1, max_size=3)):
        changes.apply(change, args, kwargs)
        assert_equivalent(path, *args, **kwargs)


SIGNATURES = {
    "positional": lambda a, b, c: None,
    "optional": lambda a, b=1, c=2: None,
    "positional only": lambda a, b=1, /, c=2: None,
    "more": lambda a, *rest, k=1: None,
    "keywords": lambda a, *, b=0, c=0, **more: None,
    "any": anything,
}


@each_path
@settings(max_examples=N_EXAMPLES // 2)
@given(data=st.data())
def test_however_a_call_is_bound(kind, data):
    fun = SIGNATURES[data.draw(st.sampled_from([*SIGNATURES]))]
    leaves = st.sampled_from([X, 1, 1.0, [X, 2], None])

    def draw():
        n = data.draw(st.integers(0, 4))
        names = data.draw(st.lists(st.sampled_from("abckz"), unique=True, max_size=3))
        args = [data.draw(leaves) for _ in range(n)]
        return args, {name: data.draw(leaves) for name in names}

    args, kwargs = draw()
    path = path_of(kind, fun, outputs, *args, **kwargs)
    assert assert_equivalent(path, *args, **kwargs)
    for _ in range(3):
        args, kwargs = draw()
        try:
            path.split(*args, **kwargs)
        except TypeError:
            continue
        assert_equivalent(path, *args, **kwargs)


MODELS = [
    eqx.Partial(anything, X, [X, "s"]),
    eqx.Partial(anything, np.ones(3), large_numpy(4000)),
    eqx.Partial(anything),
]


@each_path
@settings(max_examples=N_EXAMPLES // 2)
@given(data=st.data())
def test_the_functions_own_arrays_and_static_objects(kind, data):
    model = data.draw(st.sampled_from(MODELS))
    one, other = data.draw(pairs())
    value = one()
    path = path_of(kind, model, outputs, value, x=X)
    assert_equivalent(path, value, x=X)
    assert_equivalent(path, other(), x=X)


class Batch(NamedTuple):
    """A named tuple whose index selects an element of the batch instead of a field."""

    values: Any
    label: Any

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]

    def __iter__(self) -> Any:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)


@each_path
@pytest.mark.parametrize("values", [jnp.ones((2, 3)), np.ones((2, 3)), [X, X]])
def test_a_named_tuple_is_read_by_field_whatever_its_methods_return(kind, values):
    path = path_of(kind, anything, outputs, Batch(values, X))
    assert assert_equivalent(path, Batch(values, X))
    assert not assert_equivalent(path, Batch(values, 1))
    assert not assert_equivalent(path, Batch((X, X), X))


# --- The slow path against JAX and Equinox ------------------------------------------------------


@settings(max_examples=N_EXAMPLES)
@given(trees())
def test_split_and_combine_do_what_jax_does(made):
    tree = made()
    try:
        leaves, treedef = jax.tree_util.tree_flatten(tree)
    except Exception as error:
        with pytest.raises(type(error)):
            split(tree)
        return
    spec, arrays, statics = split(tree, is_input=False)
    expected = jax.tree.leaves(eqx.partition(tree, eqx.is_array)[0])
    assert len(arrays) == len(expected)
    assert all(a is b for a, b in zip(arrays, expected, strict=True))
    assert [*map(id, expected)] == [id(leaf) for leaf in leaves if eqx.is_array(leaf)]
    again = combine(spec, iter(arrays), iter(statics))
    new_leaves, new_treedef = jax.tree_util.tree_flatten(again)
    assert new_treedef == treedef
    assert all(a is b for a, b in zip(new_leaves, leaves, strict=True))
    spec_again, *_ = split(again, is_input=False)
    assert spec_again == spec
    assert hash(spec_again) == hash(spec)
    # `combine` takes all arrays and static objects.
    left = iter(arrays), iter(statics)
    combine(spec, *left)
    assert [*left[0], *left[1]] == []
