"""Structures that take turns: each call is served by its own program, however many there are."""

import copy
import dataclasses
import enum
import random
import zlib
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support import inside
from tests.support.helpers import SPECIALIZING, assert_same
from tests.support.models import Layer, Point

X = jnp.arange(3.0)

specialized = pytest.mark.skipif(not SPECIALIZING, reason="nothing is specialised")
natively = pytest.mark.skipif(
    not eqxjit.native_enabled() or not SPECIALIZING, reason="asked of the native back end"
)


class Other(Layer):
    pass


class Config(enum.Enum):
    A = 1


class Text(str):
    """Not a builtin type: it may yet be registered as a node."""


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Tagged:
    child: Any
    tag: Any

    def tree_flatten(self):
        return (self.child,), self.tag

    @classmethod
    def tree_unflatten(cls, tag, children):
        return cls(*children, tag)


def number(tree):
    """A number that a trace computes from all that is static in a tree."""
    static = jax.tree.map(lambda leaf: "array" if eqx.is_array(leaf) else (type(leaf), leaf), tree)
    return zlib.crc32(repr(static).encode()) % 1000


def tell(tree, x):
    return x * number(tree)


def _with(items, index, item):
    return [*items[:index], item, *items[index + 1 :]]


FLOATS = [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
LAYERS = [Layer(X, [X, 1.5])] * 6

# Each a family of structures, told apart by one guard or another.
FAMILIES = {
    "a number": [0, 1, 2, True, 1.0, 300, 301],
    "a text": ["a", "b", b"a", Text("a"), Text("b")],
    "a zero, or no number": [0.0, -0.0, float("nan"), 1.0],
    "a tuple of texts": [("a", "b"), ("a", "c"), ("a",), (X, "a"), ("a", X)],
    "an array": [X, None, 1, np.ones(2), Layer(X)],
    "a static field": [Layer(X, config=i) for i in (*range(3), "a", (1, 2), (1, True), [1])],
    "a field's field": [Layer(Layer(X, config=i), Layer(X, config=3 - i)) for i in range(3)],
    "a class": [Layer(X), Other(X), Point(X, None), (X, None), [X, None]],
    "keys": [{"a": X}, {"b": X}, {"a": X, "b": X}, {1: X}, {True: X}, {1.0: X}],
    "a value in a dict": [{"a": X, "b": {"c": i, "d": X}} for i in range(3)],
    "keys of several types": [{1: X, key: i} for key in (2.5, 3) for i in range(3)],
    "an item of many numbers": [FLOATS, *[_with(FLOATS, i, 9.5) for i in range(6)], FLOATS[:5]],
    "a zero among many numbers": [_with(FLOATS, 3, zero) for zero in (0.0, -0.0, 0, False)],
    "a text among many numbers": [_with(FLOATS, 3, text) for text in ("3.5", b"3.5")],
    "an item of many Modules": [
        LAYERS,
        *[_with(LAYERS, i, Layer(X, [X, 2.5])) for i in range(6)],
        *[_with(LAYERS, i, Other(X, [X, 1.5])) for i in (0, 5)],
        LAYERS[:5],
    ],
    "all items of many Modules": [[Layer(X, [X, float(i)])] * 6 for i in range(1, 4)],
    "an item of many arrays": [[X] * 6, _with([X] * 6, 5, 1), [X] * 7, (X,) * 6],
    "a registered node": [eqx.Partial(f, X, 1) for f in (max, min)] + [eqx.Partial(max, X, 2)],
    "metadata, or none": [[Tagged(X, a), Tagged(X, b)] for a, b in [(None, 5), (5, None), (5, 5)]],
    "a named tuple's field": [Point(i, Point(X, j)) for i in range(2) for j in range(2)],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_gets_its_own(family):
    trees = FAMILIES[family]
    f = eqxjit.filter_jit(lambda tree, x: tell(tree, x))
    order = random.Random(0)
    for tree in [*trees, *order.choices(trees, k=25 * len(trees))]:
        np.testing.assert_array_equal(f(copy.deepcopy(tree), X), tell(tree, X))
    assert f.cache_info().traces == len(trees)


def test_all_families_in_turn():
    trees = [tree for trees in FAMILIES.values() for tree in trees]
    f = eqxjit.filter_jit(lambda tree, x: tell(tree, x))
    order = random.Random(1)
    for tree in [*trees, *trees, *order.choices(trees, k=2_000)]:
        np.testing.assert_array_equal(f(tree, X), tell(tree, X))


# What tells structures apart, at all depths. (Numbers are objects of their own from 257 on.)
TELLING = {
    "a number": lambda n: n,
    "a large number": lambda n: n + 300,
    "a text": lambda n: f"text {n}",
    "a static field": lambda n: Layer(X, config=n),
    "a field's field": lambda n: (X, Layer(X, Layer(X, config=f"text {n}"))),
    "an item behind many arrays": lambda n: [*[X] * 6, n],
    "a field behind many numbers": lambda n: (*FLOATS, Layer(X, config=n + 300)),
    "a field of each of many": lambda n: [X, *[Layer(X, config=n)] * 6],
    "an item behind many Modules": lambda n: (*LAYERS, {"a": X, "b": [n + 300]}),
    "a value in a dict": lambda n: {1: X, 2: {"a": {}, "b": Point(X, n)}},
    "a length": lambda n: [X, [[X] * n]],
    "a key": lambda n: {"a": {f"key {n}": X}},
    "a number of keys": lambda n: {"a": {f"key {i}": X for i in range(n)}},
    "behind an object that may become a node": lambda n: (Config.A, Layer(X, config=n)),
}


def _call_all(f, trees, order):
    for n in order:
        tree, y = f(trees[n], X)
        assert eqx.tree_equal(tree, trees[n])
        np.testing.assert_array_equal(y, X + 1)


@natively
@pytest.mark.parametrize("what", TELLING)
def test_each_is_served_by_its_specialized_call(what):
    trees = [*map(TELLING[what], range(10))]
    f = eqxjit.filter_jit(lambda tree, x: (tree, x + 1))
    _call_all(f, trees, [*range(10)] * 3)
    assert inside.n_specialized(f) == 10
    generic = [entry.hits for entry in inside.entries(f)]
    _call_all(f, trees, random.Random(2).choices(range(10), k=300))
    # None went past its own.
    assert [entry.hits for entry in inside.entries(f)] == generic


@natively
def test_very_many_are_all_specialized():
    f = eqxjit.filter_jit(lambda n, x: (n, x + 1))
    _call_all(f, range(70), [*range(64)] * 3)
    assert inside.n_specialized(f) == 64
    _call_all(f, range(70), [*range(70)] * 3)
    assert inside.n_specialized(f) == 64


def _n_specialized_of(tree, count):
    """How many of so many trees in turn have a specialised call."""
    f = eqxjit.filter_jit(lambda tree, x: (tree, x + 1))
    _call_all(f, [*map(tree, range(count))], [*range(count)] * 3)
    return inside.n_specialized(f)


@specialized
@pytest.mark.parametrize(
    "tree", [lambda n: (Text(n), X), lambda n: jax.tree_util.Partial(max, X, n)]
)
def test_few_are_where_guards_run_python_first(tree):
    assert _n_specialized_of(tree, 12) == 8


@natively
@pytest.mark.parametrize(
    "tree",
    [
        lambda n: {("key", i): X for i in range(n + 1)},
        lambda n: [jax.tree_util.Partial(max, X), n],
        lambda n: [{(1, 2): X}] * 5 + [n],
        lambda n: [Tagged(X, "a"), n],
    ],
)
def test_all_are_where_what_tells_them_apart_is_looked_at_first(tree):
    assert _n_specialized_of(tree, 30) == 30


@specialized
def test_few_are_where_each_takes_a_frame(monkeypatch):
    monkeypatch.setenv("EQXJIT_NATIVE", "0")
    f = eqxjit.filter_jit(lambda n, x: x + n)
    for _ in range(3):
        for n in range(12):
            np.testing.assert_array_equal(f(n, X), X + n)
    assert inside.n_specialized(f) == 8


def test_a_guard_that_failed_is_looked_at_without_running_python():
    """A dict whose keys came to be of another class, with an `==` of their own."""

    class Key(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            raise KeyboardInterrupt

    f = eqxjit.filter_jit(lambda tree, x: x * tree["a"])
    for _ in range(3):
        for n in (2, 3):
            np.testing.assert_array_equal(f({"a": n, "b": X}, X), X * n)
    with pytest.raises(KeyboardInterrupt):
        hash({Key("a"): 1}.get("a"))
    for _ in range(3):
        with pytest.raises(ValueError, match="`tree`"):
            f({Key("a"): 2, 1: X}, X)
        np.testing.assert_array_equal(f({"a": 2, "b": X}, X), X * 2)


@pytest.mark.parametrize("back_end", ["native", "python"])
def test_constants_are_compared_before_trees_are_looked_into(back_end, monkeypatch):
    if back_end == "python":
        monkeypatch.setenv("EQXJIT_NATIVE", "0")
    flattened = []

    class Noted(Tagged):
        def tree_flatten(self):
            flattened.append(self)
            return super().tree_flatten()

    jax.tree_util.register_pytree_node_class(Noted)
    f = eqxjit.filter_jit(lambda tree, n: tree.child * n)
    for _ in range(4):
        for n in range(1, 8):
            f(Noted(X, "a"), n)
    flattened.clear()
    for n in range(1, 8):
        assert_same(f(Noted(X, "a"), n), X * n)
    assert len(flattened) <= 7 * 2


def test_what_takes_turns_no_longer_is_found_again():
    """Long after: nothing fails any more, then something does."""
    f = eqxjit.filter_jit(lambda n, x: x + n)
    for n in (1, 2) * 3 + (1,) * 250 + (2, 1) * 3 + (3,) * 3:
        np.testing.assert_array_equal(f(n, X), X + n)


def test_a_wrapper_called_once_needs_no_specialized_call():
    """Wrapped anew for each call, as some write it; with structures in turn."""

    def fun(n, x):
        return x + n

    for n in (1, 2, 3) * 4:
        np.testing.assert_array_equal(eqxjit.filter_jit(fun)(n, X), X + n)
    f = eqxjit.filter_jit(fun)
    for n in (1, 2, 3) * 3:
        np.testing.assert_array_equal(f(n, X), X + n)
    assert f.cache_info().traces == 3
