"""Bad arguments: an error that names the argument, caches unharmed, the next good call works."""

import collections
import contextlib
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support.helpers import Own, recursion_left
from tests.support.models import Pair
from tests.support.sides import CALLS, both

X = jnp.arange(1.0, 4.0)


class Holder(eqx.Module):
    child: object
    weight: jax.Array


class Unhashable:
    __hash__ = None  # type: ignore[assignment]


class HashRaises:
    def __hash__(self):
        raise TypeError("no hash today")

    def __eq__(self, other):
        return type(other) is HashRaises


def new():
    """Return a new function, with new caches, that takes anything as its first argument."""

    def first(tree, x):
        return x * 2

    return first


def run_both(bad, match, *, error=ValueError):
    """Check that a bad call fails each time, and spoils neither caches nor good calls."""
    theirs, ours = eqx.filter_jit(new()), eqxjit.filter_jit(new())
    for _ in range(CALLS):
        for f, expected in ((theirs, Exception), (ours, error)):
            with pytest.raises(expected) as caught:
                f(*bad)
        assert match in str(caught.value), str(caught.value)
    assert ours.cache_info()[:2] == (0, 0)
    for _ in range(CALLS):
        assert ours(X, X).tolist() == theirs(X, X).tolist()
        with pytest.raises(error):
            ours(*bad)
    assert ours.cache_info()[:2] == (1, 1)


# --- Static values that can't be hashed or compared -------------------------------------------


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({1, 2}, "tree` of type `set"),
        (bytearray(b"a"), "tree` of type `bytearray"),
        (HashRaises(), "tree` of type `HashRaises"),
        ((X, [Unhashable()]), "tree[1][0]` of type `Unhashable"),
        (Holder({"k": {"b": Unhashable()}}, X), "tree.child['k']['b']"),
        (Pair(X, Unhashable()), "tree.second"),
        ([Holder(Unhashable(), X)] * 2, "tree[0].child"),
    ],
)
def test_an_unhashable_static_value(tree, path):
    run_both((tree, X), f"The static value `{path}")


def test_the_path_names_keywords_and_variadic_arguments():
    @eqxjit.filter_jit
    def f(x, *rest, scale=1, **options):
        return x * scale

    for _ in range(CALLS):
        with pytest.raises(ValueError, match=r"`rest\[1\]\[0\]`"):
            f(X, 1, [Unhashable()])
        with pytest.raises(ValueError, match=r"`scale`"):
            f(X, scale=Unhashable())
        with pytest.raises(ValueError, match=r"`mode\['a'\]`"):
            f(X, mode={"a": Unhashable()})
        assert f(X, 1, [2], scale=2, mode={"a": 1}).tolist() == (X * 2).tolist()


def test_an_unhashable_static_value_in_the_function_itself():
    model = eqx.Partial(new(), {"a", "b"})
    with pytest.raises(ValueError, match=r"`fun\.args\[0\]` of type `set`"):
        eqxjit.filter_jit(model)
    assert eqxjit.filter_jit(eqx.Partial(new(), "ab"))(X).tolist() == (X * 2).tolist()


class Refusal(TypeError):
    """An error of the user's own."""


class Refuses:
    def __init__(self, hashes):
        self.hashes = hashes

    def __hash__(self):
        return 1 if self.hashes else self.__eq__(self)

    def __eq__(self, other):
        raise Refusal


@pytest.mark.parametrize("hashes", [False, True])
@pytest.mark.parametrize("place", [lambda value: value, lambda value: [value]])
def test_an_error_of_the_users_own_class_is_never_replaced(hashes, place):
    f = eqxjit.filter_jit(new())
    if hashes:
        f(place(Refuses(hashes)), X)
    for _ in range(CALLS):
        with pytest.raises(Refusal):
            f(place(Refuses(hashes)), X)


# --- Structures -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({1: X, "a": X}, "tree"),
        ([{"k": {None: X, 2: X}}], "tree[0]['k']"),
        ((collections.defaultdict(list, {1: X, "a": X}),), "tree[0]"),
    ],
)
def test_a_dict_whose_keys_cannot_be_sorted(tree, path):
    run_both((tree, X), f"The keys of the dict `{path}` can't be sorted")
    f, before = eqxjit.filter_jit(new()), recursion_left()
    with pytest.raises(ValueError, match="can't be sorted"):
        f(tree, X)
    assert recursion_left() == before


def _cyclic(kind):
    if kind is list:
        cyclic = [X]
        cyclic.append(cyclic)
    elif kind is dict:
        cyclic = {"x": X}
        cyclic["self"] = (cyclic,)
    else:
        cyclic = Holder(None, X)
        object.__setattr__(cyclic, "child", [cyclic])
    return {"a": [X, cyclic]}


@pytest.mark.parametrize("kind", [list, dict, Holder])
def test_a_pytree_that_contains_itself(kind):
    before = recursion_left()
    f = eqxjit.filter_jit(new())
    for _ in range(CALLS):
        with pytest.raises(ValueError, match=r"`tree\['a'\]\[1\]` contains itself"):
            f(_cyclic(kind), X)
        assert f(X, X).tolist() == (2 * X).tolist()
    # JAX never gives back the part of the interpreter's recursion limit that flattening took.
    assert recursion_left() == before


def test_a_full_stack_is_no_fault_of_an_argument():
    def at(depth, action):
        return action() if depth <= 0 else at(depth - 1, action)

    f, left = eqxjit.filter_jit(new()), recursion_left()
    for spare in range(8, 40, 2):
        with contextlib.suppress(RecursionError):
            at(left - spare, lambda: f([[Own(1)]], X))
    deep = X
    for _ in range(2 * left):
        deep = [deep]
    with pytest.raises(RecursionError):
        f(deep, X)


# --- Arrays -----------------------------------------------------------------------------------


@both
def test_a_tracer_leaked_from_a_finished_trace(filter_jit):
    leaked = []
    jax.jit(lambda x: leaked.append(x * 2))(X)
    f = filter_jit(lambda tree, x: tree["a"][0] + x)
    for _ in range(CALLS):
        with pytest.raises(jax.errors.UnexpectedTracerError):
            f({"a": leaked}, X)
        assert f({"a": [X]}, X).tolist() == (2 * X).tolist()
    assert filter_jit is eqx.filter_jit or f.cache_info()[:2] == (1, 1)


class CallableHolder(Holder):
    def __call__(self, x):
        return x * self.weight


@both
def test_a_deleted_array(filter_jit):
    donate = filter_jit(lambda x: x + 1, donate="all")
    f = filter_jit(lambda tree, x: tree["a"][0] + x)
    for _ in range(CALLS):
        array = X + 0
        donate(array)
        assert array.is_deleted()
        # The first error is that of a function that was never called.
        with pytest.raises((RuntimeError, ValueError), match="deleted") as caught:
            f({"a": [array]}, X)
        assert f({"a": [X]}, X).tolist() == (2 * X).tolist()
    if filter_jit is eqxjit.filter_jit:
        assert "The array `tree['a'][0]` has been deleted" in str(caught.value)
        assert f.cache_info()[:2] == (1, 1)
        with pytest.raises((RuntimeError, ValueError), match=r"`fun\.weight` has been deleted"):
            filter_jit(CallableHolder(None, array))(X)


STRANGE_ARRAYS = {
    "strings": (np.array(["a", "b"]), "tuple"),
    "objects": (np.array([None, object()]), "tuple"),
    "dates": (np.array(["2020-01-01"], dtype="datetime64[D]"), "numbers"),
    "a date": (np.datetime64("2020-01-01"), "numbers"),
    "a string": (np.str_("a"), ".item()"),
    "records": (np.zeros(2, dtype=[("a", int), ("b", float)]), "tuple"),
    "long doubles": (np.zeros(2, dtype=np.longdouble), "numbers"),
    "masked": (np.ma.array([1.0, 2.0], mask=[True, False]), "filled"),
}


@pytest.mark.parametrize("kind", STRANGE_ARRAYS)
def test_an_array_that_jax_cannot_trace(kind):
    array, remedy = STRANGE_ARRAYS[kind]
    if array.dtype == np.float64 and kind == "long doubles":
        pytest.skip("no such type here")
    error = ValueError if kind == "masked" else TypeError
    if isinstance(array, np.ndarray):  # JAX rejects scalars only when they are traced.
        run_both(((X, {"a": [array]}), X), "The array `tree[1]['a'][0]` ", error=error)
    f = eqxjit.filter_jit(new())
    for warm in (False, True):
        if warm:
            for _ in range(CALLS):
                f({"a": np.ones(3)}, X)
        for call in (f, f.lower) if isinstance(array, np.ndarray) else (f,):
            with pytest.raises(error, match=r"`tree\['a'\]`") as caught:
                call({"a": array}, X)
            assert remedy in str(caught.value)
            assert "static_arg" not in str(caught.value)
    held = eqxjit.filter_jit(CallableHolder(array, X))
    with pytest.raises(error, match=r"`fun\.child`"):
        held(X)


# --- What can't be wrapped --------------------------------------------------------------------


@both
def test_what_is_not_callable_cannot_be_wrapped(filter_jit):
    for value in (3, [max], X, sys, property(new())):
        for wrap in (filter_jit, filter_jit(donate="all")):
            with pytest.raises(TypeError, match="callable"):
                wrap(value)


def test_decorators_in_the_wrong_order_are_told():
    with pytest.raises(TypeError, match="Put `@classmethod` above `@filter_jit`"):
        eqxjit.filter_jit(classmethod(new()))
    with pytest.raises(TypeError, match="Put `@property` above `@filter_jit`"):
        eqxjit.filter_jit(property(new()))
    # A staticmethod object can be called.
    assert eqxjit.filter_jit(staticmethod(new()))(None, X).tolist() == (X * 2).tolist()


# --- Exceptions while tracing -----------------------------------------------------------------


class Breaking:
    """A node whose flatten or unflatten raises an error when a test says so."""

    at, error = None, KeyboardInterrupt

    def __init__(self, x):
        self.x = x

    @classmethod
    def break_at(cls, place, x):
        if cls.at == place and isinstance(x, jax.core.Tracer):
            raise cls.error("interrupted")

    def tree_flatten(self):
        self.break_at("flatten of the output", self.x)
        return (self.x,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        cls.break_at("unflatten", *children)
        return cls(*children)


jax.tree_util.register_pytree_node_class(Breaking)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("place", ["function", "unflatten", "flatten of the output"])
@both
def test_an_exception_while_tracing_leaves_no_half_made_entry(filter_jit, kind, place, monkeypatch):
    @filter_jit
    def f(node, n):
        node.break_at("function", node.x)
        return Breaking(node.x * n)

    monkeypatch.setattr(Breaking, "at", place)
    monkeypatch.setattr(Breaking, "error", kind)
    for _ in range(CALLS):
        with pytest.raises(kind, match="interrupted"):
            f(Breaking(X), 2)
    if filter_jit is eqxjit.filter_jit:
        assert f.cache_info()[:2] == (0, 0)
    monkeypatch.setattr(Breaking, "at", None)
    for _ in range(CALLS):
        assert f(Breaking(X), 2).x.tolist() == (2 * X).tolist()
    if filter_jit is eqxjit.filter_jit:
        assert f.cache_info()[:2] == (1, 1)
