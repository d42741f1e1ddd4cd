"""Calls that no specialised call serves; what wrapping, specialising and describing cost."""

import collections
import copy
import gc
import itertools
import sys
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from eqxjit._diagnostics.outline import outline
from eqxjit._plan import budget as _budget
from eqxjit._runtime import miss as _miss
from eqxjit._runtime import specialize as _specialize
from eqxjit._trees.key_cache import KnownKey
from eqxjit._trees.partition import partition
from eqxjit._trees.scan import scan
from tests.support import inside
from tests.support.helpers import SPECIALIZING
from tests.support.models import Pair

X = jnp.arange(3.0)


class Layer(eqx.Module):
    weight: Any
    setting: Any = eqx.field(static=True, default=None)


class Name(str):
    pass


def function() -> None:
    pass


def calls_of(action) -> int:
    """How many functions are called while an action runs, in Python and in C."""
    count = 0

    def hook(_frame, event, _argument):
        nonlocal count
        count += event in ("call", "c_call")

    # What finalises garbage would be counted, too.
    gc.collect()
    gc.disable()
    sys.setprofile(hook)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


# --- Wrapping ---------------------------------------------------------------------------------


class Hostile(list):
    """Refuses to be looked at."""

    def refuse(self, *_: Any):
        raise AssertionError

    __iter__ = __eq__ = __hash__ = __len__ = __getitem__ = __repr__ = __deepcopy__ = refuse  # type: ignore


class Refusing:
    def refuse(self, *_: Any):
        raise AssertionError

    __iter__ = __eq__ = __hash__ = __len__ = __getitem__ = __repr__ = __getattr__ = refuse  # type: ignore


def closure(value):
    def f(x):
        return x if value is None else x + 1

    return f


class Model(eqx.Module):
    weight: jax.Array
    setting: Any = eqx.field(static=True)

    def __call__(self, x):
        return self.weight * x

    def method(self, x):
        return self.weight * x


HOLDERS = {
    "closure": closure,
    "decorated closure": lambda value: jax.grad(closure(value)),
    "Module": lambda value: Model(X, value),
    "method": lambda value: Model(X, value).method,
    "partial": lambda value: eqx.Partial(function, Model(X, value)),
}
CAPTURED = {
    "pairs": lambda size: [(i, [i]) for i in range(size)],
    "dict": lambda size: {f"key {i}": i for i in range(size)},
    "set": lambda size: {*range(size)},
    "nest": lambda size: nest(size, lambda inner: [inner], 1),
    "objects": lambda size: [Refusing() for _ in range(size)],
}


def nest(depth, around, inner=X):
    for _ in range(depth):
        inner = around(inner)
    return inner


@pytest.mark.parametrize("captured", CAPTURED)
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.deep
def test_wrapping_looks_into_nothing(holder, captured):
    small, large = (HOLDERS[holder](CAPTURED[captured](size)) for size in (3, 900))
    eqxjit.filter_jit(small)
    assert calls_of(lambda: eqxjit.filter_jit(large)) == calls_of(lambda: eqxjit.filter_jit(small))


@pytest.mark.parametrize("kind", [Hostile, Refusing])
def test_what_a_function_captured_is_never_asked(kind):
    for _ in range(2):
        f = eqxjit.filter_jit(closure(kind()))
        assert f(X).tolist() == (X + 1).tolist()
    if kind is Refusing:
        assert f.traces()[0].differences[0].category == "function defined again"


def test_a_function_around_much_is_recognised_without_looking_at_all_of_it():
    looked_at = []
    for _ in range(2):
        f = eqxjit.filter_jit(closure([(i, i) for i in range(100_000)]))
        looked_at.append(calls_of(inside.definition(f).key))
        f(X)
    assert f.traces()[0].differences[0].category == "function defined again"
    assert max(looked_at) < 20_000


def test_a_captured_array_is_not_read_and_nothing_is_kept():
    class Held:
        pass

    held = Held()
    ref = weakref.ref(held)
    f = eqxjit.filter_jit(closure([{"a": (held, X)}, Layer(X, held)]))
    f(X)
    del f, held
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ([1], (1,)),
        ([1, 2], [1, 3]),
        ({"a": 1}, {"b": 1}),
        (Layer(X, 1), Layer(X, 2)),
        (function, test_wrapping_looks_into_nothing),
        ("a" * 1_000, "a" * 1_001),
        (2**70, 2**80),
    ],
)
def test_outlines(one, other):
    assert outline([one]) == outline([one]) != outline([other])
    assert hash(outline([one])) == hash(outline([one]))


# --- Finding a structure again ----------------------------------------------------------------


class Aux:
    """A registered node with metadata of its own choice."""

    def __init__(self, child, data):
        self.child, self.data = child, data


jax.tree_util.register_pytree_node(
    Aux, lambda node: ((node.child,), node.data), lambda data, children: Aux(*children, data)
)
MARK = object()


class Odd(eqx.Module):
    """Not to be read past its own way to look up fields."""

    weight: Any
    setting: Any = eqx.field(static=True, default=None)

    def __getattribute__(self, name):
        return super().__getattribute__(name)


REGISTERED = [
    *(Odd(X), Odd(X, 1), Odd(X, True), Odd([X, X + 1]), [Odd(X, 1)] * 9, [Odd(X, True)] * 9),
    *([*[Odd(X, 1)] * 8, Odd(X, 2)], [Odd(X + i) for i in range(9)]),
    *({1: X, 2: X + 1}, collections.OrderedDict(b=X, a=X + 1)),
    *({(1, 2): X}, {(1, True): X}, {(1, "2"): X}, {(1, 2): X, (0, 2): X}, {(1, 2): {1: X}}),
    *({b"a": X}, {"a": {1: X}}, {"a": {True: X}}, {1: {"a": X}}, {1: X, 2: X}, {2: X, 1: X}),
    *(collections.OrderedDict({1: X, 2: X}), collections.OrderedDict({2: X, 1: X})),
    *(collections.OrderedDict(a=X, b=1), collections.OrderedDict(b=1, a=X)),
    *(collections.defaultdict(int, a=X), collections.defaultdict(list, a=X)),
    *(collections.defaultdict(int, a=X, b=X), collections.defaultdict(int, b=X, a=X)),
    *(Aux(X, 1), Aux(X, True), Aux(X, 1.0), Aux(X, -0.0), Aux(X, 0.0), Aux(X, None), Aux(1, 1)),
    *(Aux(X, (1, 2)), Aux(X, (1, True)), Aux(X, [1, 2]), Aux(X, [1, True]), Aux(X, Aux)),
    *(Aux(X, {"a": 1, "b": 2}), Aux(X, {"b": 2, "a": 1}), Aux(X, {1}), Aux(X, ("a",) * 20)),
    *(Aux(Aux(X, 1), 1), Aux([X], 1), Aux(X, function), Aux(X, (Aux,)), Aux(X, np.ones(2))),
]
TREES = [
    *REGISTERED,
    *(1, True, 1.0, 0, False, 0.0, -0.0, float("nan"), None, "a", Name("a"), b"a", "", 1j, 2**70),
    *((), [], {}, (1,), [1], (1, 1), [1, [1]], [[1], 1], {"a": 1}, {"b": 1}, {"a": {"a": 1}}),
    *(X, np.ones(2), np.float32(1), [X], (X,), [X] * 9, [X] * 8, [X] * 8 + [1], [*[X] * 8, [X]]),
    *([1] * 9, [True] * 9, [1.0] * 9, [0.0] * 9, [-0.0] * 9, [1] * 8 + [True], ["a"] * 9),
    *(
        [{"a": X}] * 9,
        [{"b": X}] * 9,
        [{"a": 1, "b": X}] * 9,
        [{"a": True, "b": X}] * 9,
        ({"a": 1, "b": X},) * 9,
    ),
    *([{"a": X, "b": 1}] * 9, [{"a": 0.0}] * 9, [{"a": -0.0}] * 9, [{Name("a"): X}] * 9, [{}] * 9),
    *([{"a": X, "b": X + i} for i in range(9)], [*[{"a": X}] * 8, {"b": X}], [{1: X}] * 9),
    *([*[{"a": 1, "b": X}] * 8, {"b": X, "a": 2}], [{"a": [X, 1], "b": None}] * 9),
    *([*[{"a": 1, "b": X}] * 8, {"b": X, "a": X}], [*[{"a": X}] * 8, {Name("a"): X}]),
    *([None] * 9, [None] * 8, (None,) * 9, [np.ones(2)] * 9, [*[X] * 8, np.ones(2)]),
    *(Pair(1, 2), Pair(X, 2), Pair(2, X), (X, 2), Pair(1, True), collections.OrderedDict(a=1)),
    *(collections.OrderedDict(b=1, a=2), collections.OrderedDict(a=2, b=1), {"b": 1, "a": 2}),
    *(collections.defaultdict(int, a=1), {1: X}, {True: X}, {1: 1, 2: 2}, {2: 2, 1: 1}),
    *(Layer(X), Layer(X, 1), Layer(X, True), Layer(X, 1.0), Layer(1, 1), Layer(Layer(X), 1)),
    *(Layer(X, (1, 2)), Layer(X, (True, 2)), Layer(X, [1, 2]), Layer(X, [True, 2]), Layer(X, ())),
    *(Layer(X, ((1,), 2)), Layer(X, (1, (2,))), Layer(X, -0.0), Layer(X, 0.0), Layer(X, MARK)),
    *(Layer(X, function), Layer(X, (function,)), function, jnp.tanh, jax.nn.relu, int, bool),
    *(Layer(X, np.dtype("int32")), Layer(X, {"a": 1}), Layer(X, {"a": True}), Layer(X, {1, 2})),
    *(Layer(X, id(function)), id(function), [function], Layer(X, Name("a")), Layer(X, "a")),
    *(eqx.nn.Linear(2, 2, key=jax.random.key(0)), eqx.Partial(max, X), eqx.nn.Identity()),
]


def test_scans_tell_what_typed_keys_tell():
    scanned = [scan(((tree,), {})) for tree in TREES]
    keys = [partition(((tree,), {}))[1].key for tree in TREES]
    known = [(s, k) for s, k in zip(scanned, keys, strict=True) if s is not None]
    assert len(known) == len(TREES)
    for (one, key), (other, other_key) in itertools.product(known, known):
        if one.key == other.key:
            assert key == other_key
            assert hash(one.key) == hash(other.key)


class Gated(eqx.Module):
    gate: Any
    config: Any = eqx.field(static=True)
    weight: Any = None
    name: Any = eqx.field(static=True, default="gated")


def gated(*configs, dynamic=(X, X)):
    """Some Modules of one class, which a scan takes together, with configs and layers in turn."""
    made = []
    for i in range(10):
        made.append(layer := Gated(dynamic[i % len(dynamic)], None, dynamic[0]))
        # Equinox would sort the keys of a dict.
        object.__setattr__(layer, "config", configs[i % len(configs)])
    return made


NAN = float("nan")
CONFIGS: list[tuple[Any, ...]] = [
    *((1,), (True,), (1.0,), (0.0,), (-0.0,), (NAN,), ("a",), (b"a",), (None,), (1, True)),
    *(([1],), ([True],), ([1.0],), ([0.0],), ([-0.0],), ([NAN],), ([],), ((),), ({},), ((1,),)),
    *(([1], [2, 3]), ([1, 2], [3]), ((1,), (2, 3)), ([1], (1,)), ([1], 1), ([[1]],), ([(1,)],)),
    *(({"a": 1},), ({"a": True},), ({1: "a"},), ({"a": 1, "b": 2},), ({"b": 2, "a": 1},)),
    *(({"a": 1}, {"b": 1, "c": 1}), ({"a": 1, "b": 1}, {"c": 1}), (["a", 1],), ({"a": [1]},)),
    *(
        ([*range(50)],),
        ([*range(49), True],),
        ({1},),
        (np.dtype("f4"),),
        (function,),
        ([function],),
    ),
]


def test_scans_of_modules_together_tell_what_typed_keys_tell():
    trees = [gated(*configs) for configs in CONFIGS] + [
        [*gated([1])[:-1], Gated(X, [1], X, "other")],
        gated([1], dynamic=(X, [X])),
        gated([1], dynamic=([X, X], X)),
        gated([1], dynamic=(None, X)),
    ]
    found = [scan(tree) for tree in trees]
    keys = [partition(tree)[1].key for tree in trees]
    assert None not in found
    for (i, one), (j, other) in itertools.product(enumerate(found), repeat=2):
        assert (one.key == other.key) is (keys[i] == keys[j]) is (i == j)
    for tree, scanned in zip(trees, found, strict=True):
        assert list(map(id, scanned.arrays)) == list(map(id, partition(tree)[0]))
        again = scan(copy.copy(tree))
        assert again.key == scanned.key
        assert hash(again.key) == hash(scanned.key)


def test_modules_with_containers_are_compared_together(monkeypatch, unspecialized):
    """Not one by one, which takes longer than Equinox's whole call."""
    f = eqxjit.filter_jit(lambda layers: X)
    trees = [gated([1, 2]), gated((1, "a")), gated({"a": 1})]
    for tree in trees:
        for _ in range(3):
            f(tree)
    asked = []
    original = KnownKey.matches
    counted = lambda self, value: (asked.append(value), original(self, value))[1]  # noqa: E731
    monkeypatch.setattr(KnownKey, "matches", counted)
    for tree in trees:
        f(tree)
    assert asked == []
    for change in (lambda c: c.append(3), lambda c: c.__setitem__(0, True)):
        change(trees[0][3].config)
        n_traces = f.cache_info().traces
        f(trees[0])
        assert f.cache_info().traces == n_traces + 1


def test_scans_find_the_arrays_that_jax_finds():
    for tree in TREES:
        for each in (
            tree,
            {"b": [X + 1, tree, X], "a": Pair(X * 2, tree)},
            [[tree] * 9, (X, tree)],
        ):
            scanned = scan(each)
            if scanned is not None:
                ours, theirs = scanned.arrays, partition(each)[0]
                assert list(map(id, ours)) == list(map(id, theirs))


def test_chains_of_containers_of_one_are_told_apart():
    shared: dict[str, Any] = {"a": 0}
    trees = [
        *([X], [[X]], [[[X]]], [(X,)], ([X],), (X,), [[[]]], [], [[1]], [[True]], [[[X], X]]),
        *({"a": X}, {"b": X}, {"a": {"b": X}}, {"b": {"a": X}}, {"a": {"a": X}}, {"a": [X]}),
        *({"a": {}}, {}, {"a": {"b": X, "c": X}}, {"a": {"a": {"b": X, "c": X}}}, shared),
        *({"a": {1: X}}, {1: {"a": X}}, {1: X}, {1: {1: X}}, {"a": {1: {"a": X}}}),
    ]
    found = [scan(tree) for tree in trees]
    assert None not in found
    assert len({scanned.key for scanned in found}) == len(trees)
    for tree, scanned in zip(trees, found, strict=True):
        assert list(map(id, scanned.arrays)) == [id(x) for x in jax.tree.leaves(tree) if x is X]
    shared["a"] = shared
    circle: list[Any] = []
    circle.append(circle)
    assert (scan(shared), scan(circle)) == (None, None)


@pytest.mark.parametrize("tree", REGISTERED)
def test_registered_nodes_are_found_again(tree, unspecialized):
    """Where many structures take turns, JAX's registry and typed keys take longer than Equinox."""
    f = eqxjit.filter_jit(lambda tree, x: x + 1)
    for _ in range(3):
        f(tree, X)
    found = scan(((tree, X), {}))
    assert inside.cache(f).find_again(found.key) is inside.entries(f)[0]


@pytest.mark.parametrize("tree", [[{"a": X, "b": 1}] * 100, {f"{i}": X for i in range(200)}])
def test_more_nodes_than_are_scanned_at_first_are_scanned_from_then_on(monkeypatch, tree):
    inside.specialize_nothing(monkeypatch)
    inside.scan_few_nodes(monkeypatch, 50)
    f = eqxjit.filter_jit(lambda tree, x: x + 1)
    for _ in range(3):
        f(tree, X)
    assert scan(((tree, X), {}), None, 50) is None
    found = scan(((tree, X), {}))
    assert found is not None
    assert inside.cache(f).find_again(found.key) is inside.entries(f)[0]


@pytest.fixture
def unspecialized(monkeypatch):
    inside.specialize_nothing(monkeypatch)


STRUCTURES = {
    "MLPs": lambda i: eqx.nn.MLP(2, 2, 3, i % 5 + 1, key=jax.random.key(0)),
    "static fields": lambda i: Layer(X, i),
    "functions": lambda i: Layer(X, lambda: i),
    "differing at the end": lambda i: [*[Layer(X, j) for j in range(20)], Layer(X, 100 + i)],
    "lists 150 deep": lambda i: nest(150, lambda inner: [inner, X, i]),
    "dicts 150 deep": lambda i: nest(150, lambda inner: {"b": inner, "a": X, "c": i}),
    "Modules 100 deep": lambda i: nest(100, lambda inner: Layer(inner, i)),
    "numbers": lambda i: [float(i), *map(float, range(1_000))],
    "named tuples": lambda i: Pair([X] * 10, Pair(i, None)),
    "NumPy arrays": lambda i: [np.ones(3), i, X],
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_a_structure_met_before_is_found_without_flattening(kind, unspecialized, monkeypatch):
    trees = [STRUCTURES[kind](i) for i in range(4)]

    def last(tree):
        return [leaf for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)][-1:]

    f = eqxjit.filter_jit(lambda tree, x: (sum(map(jnp.sum, last(tree)), x), tree))
    expected = [f(tree, X)[0].tolist() for tree in trees]
    for tree in trees * 2:
        f(tree, X)
    monkeypatch.setattr(_miss, "partition", None)
    traces = f.cache_info().traces
    for tree, values in zip(trees, expected, strict=True):
        result, returned = f(tree, X)
        assert result.tolist() == values
        assert jax.tree.structure(returned) == jax.tree.structure(tree)
    assert f.cache_info().traces == traces


def test_a_new_object_at_a_dead_ones_address(unspecialized):
    class Static:
        def __init__(self, value):
            self.value = value

    f = eqxjit.filter_jit(lambda layer, x: x * layer.setting.value)
    for value in range(1, 12):
        layer = Layer(X, Static(value))
        for _ in range(4):
            assert f(layer, X).tolist() == (X * value).tolist()
        del layer


def test_a_static_object_that_is_changed_in_place(unspecialized):
    f = eqxjit.filter_jit(lambda layer, x: x * sum(layer.setting["a"]))
    layer = Layer(X, {"a": [1]})
    for value in (1, 2, 1, 1, 3, 3, 3, 2):
        layer.setting["a"][0] = value
        for _ in range(4):
            assert f(layer, X).tolist() == (X * value).tolist()
    assert f.cache_info().traces == 3


def test_a_callback_that_changes_a_static_object(unspecialized):
    layer, changes = Layer(X, [1]), iter([1, 2, 2, 1, 1, 2, 1])

    def change(x):
        layer.setting[0] = next(changes)
        return x

    def fun(layer, x):
        factor = layer.setting[0]
        return jax.pure_callback(change, jax.ShapeDtypeStruct((3,), x.dtype), x) * factor

    f = eqxjit.filter_jit(fun)
    factors = []
    for _ in range(7):
        before = layer.setting[0]
        assert f(layer, X).tolist() == (X * before).tolist()
        factors.append(before)
    assert {*factors} == {1, 2}


def test_the_least_recently_used_structure_goes(unspecialized):
    f = eqxjit.filter_jit(lambda x, n: x * n, maxsize=3)
    for n in (1, 2, 3, 1, 2, 4, 1, 2, 4):
        f(X, n)
    assert f.cache_info()[:2] == (3, 4)
    f(X, 3)
    assert f.cache_info()[:2] == (3, 5)


def test_a_pytree_that_contains_itself_is_refused_and_harms_nothing():
    cycle: list[Any] = [X]
    cycle.append(cycle)
    f = eqxjit.filter_jit(lambda tree, x: x)
    for _ in range(3):
        with pytest.raises(ValueError, match="contains itself"):
            f(cycle, X)
    assert f(nest(300, lambda inner: [inner]), X).tolist() == X.tolist()


# --- Specialising -----------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch):
    """Plans: calls that are planned natively need no budget."""
    monkeypatch.setenv("EQXJIT_NATIVE", "0")


def use_planner(name, monkeypatch):
    """Return the function by which calls are planned from here on."""
    if name == "build":
        monkeypatch.setenv("EQXJIT_NATIVE", "0")
    elif not eqxjit.native_enabled():
        pytest.skip("There is no native back end.")
    return getattr(_specialize, name)


class Clock:
    """A thread's time that goes on by so much each time that somebody asks."""

    def __init__(self, seconds: float):
        self.seconds, self.now = seconds, 0.0

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


@pytest.mark.skipif(not SPECIALIZING, reason="nothing is specialised")
@pytest.mark.parametrize("returned", [False, True])
def test_no_specialised_call_takes_longer_than_its_budget(monkeypatch, budget, planned, returned):
    """A slow machine: a millisecond for some twenty nodes."""
    clock = Clock(0.0008)
    monkeypatch.setattr(_budget.time, "thread_time", clock)
    small, large = [Layer(X, i) for i in range(2)], [Layer(X, i) for i in range(1_000)]
    for tree, is_specialized in ((small, True), (large, False)):
        f = eqxjit.filter_jit(lambda tree, x: (tree, x + 1) if returned else x + 1)
        start = clock.now
        for _ in range(6):
            f(tree, X)
        assert clock.now - start < 0.2
        assert (f.specialized_source() is not None) == is_specialized


@pytest.mark.skipif(not SPECIALIZING, reason="nothing is specialised")
@pytest.mark.parametrize("n_slow", [1, 3])
def test_a_specialised_call_that_took_too_long_is_tried_again(monkeypatch, budget, planned, n_slow):
    """Garbage may have been collected meanwhile: three attempts, each after ten times as many."""
    tree, attempted_at = [Layer(X, i) for i in range(300)], []
    make = _specialize.Specializer

    def counted(*args):
        attempted_at.append(f.cache_info().hits)
        slow = len(attempted_at) <= n_slow
        monkeypatch.setattr(_budget.time, "thread_time", Clock(1.0 if slow else 0.0))
        return make(*args)

    inside.take_compiling_for_free(monkeypatch)
    inside.specialize_in_second_calls(monkeypatch)
    monkeypatch.setattr(_specialize, "Specializer", counted)
    f = eqxjit.filter_jit(lambda tree, x: x + 1)
    for _ in range(150):
        assert f(tree, X).tolist() == (X + 1).tolist()
    assert attempted_at == [1, 11, 111][: n_slow + 1]
    assert (f.specialized_source() is None) == (n_slow == 3)


@pytest.mark.skipif(not SPECIALIZING, reason="nothing is specialised")
def test_arguments_that_what_ran_has_changed():
    """Only then no specialised call can be made: a later one can."""
    tree, n_calls = [X, X], 0

    def look(x):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 2:
            tree.append(X)
        return x

    f = eqxjit.filter_jit(lambda tree: jax.pure_callback(look, X, tree[0]))
    for _ in range(2):
        f(tree)
    assert len(tree) == 3
    assert f.specialized_source() is None
    tree.pop()
    for _ in range(3):
        f(tree)
    assert f.specialized_source() is not None


@pytest.mark.parametrize("at_call", [2, 3, 4])
@pytest.mark.parametrize(
    "make", [lambda config: Layer(X, config), lambda config: {"a": [Layer(X, config)] * 2}]
)
def test_a_static_object_that_what_ran_has_changed(make, at_call):
    """A specialised call that was made of it then would serve calls that it was not traced for."""
    config, n_calls = [1], 0

    def look(x):
        nonlocal n_calls
        n_calls += 1
        if n_calls == at_call:
            config[0] = 2
        return x

    tree = make(config)
    f = eqxjit.filter_jit(lambda tree: jax.pure_callback(look, X, X) * config[0])
    for i in range(1, 8):
        assert f(tree).tolist() == (X * (1 if i <= at_call else 2)).tolist()


@pytest.mark.skipif(not SPECIALIZING, reason="nothing is specialised")
def test_a_short_first_call_allows_for_little(budget):
    for seconds, allowed in ((0.0, 0.01), (0.05, 0.05), (100.0, 0.18)):
        assert _budget.Budget(seconds, 10_000).seconds == allowed
    with pytest.raises(_budget.TooLong):
        _budget.Budget(0.02, 10_000).check_compiling("a = 1\n" * 1_000_000)
    _budget.Budget(0.02, 10_000).check_compiling("a = 1\n")


@pytest.mark.skipif(not SPECIALIZING, reason="nothing is specialised")
def test_what_will_be_done_once_more_counts_twice(monkeypatch, budget):
    now = 0.0
    monkeypatch.setattr(_budget.time, "thread_time", lambda: now)
    allowed = _budget.Budget(0.02, 10_000)
    now = 0.008
    allowed.reserve_as_much()
    allowed.check_compiling("a = 1\n")
    now = 0.013
    with pytest.raises(_budget.TooLong):
        allowed.check_compiling("a = 1\n")


PLANNERS = pytest.mark.parametrize("planner", ["build", "plan_natively"])


@pytest.mark.skipif(not SPECIALIZING, reason="nothing is specialised")
@PLANNERS
def test_no_garbage_is_collected_while_a_large_call_is_made(monkeypatch, budget, planner):
    make = use_planner(planner, monkeypatch)
    collects = []

    def built(*args):
        collects.append(gc.isenabled())
        if len(collects) == 3:
            raise KeyboardInterrupt
        return make(*args)

    monkeypatch.setattr(_specialize, planner, built)

    def call(tree):
        f = eqxjit.filter_jit(lambda tree, x: x + 1)
        for _ in range(3):
            f(tree, X)
        assert gc.isenabled()

    call([Layer(X, i) for i in range(3)])
    call([Layer(X, i) for i in range(300)])
    with pytest.raises(KeyboardInterrupt):
        call([Layer(X, i) for i in range(300)])
    assert gc.isenabled()
    assert collects == [True, False, False]


@pytest.mark.skipif(not SPECIALIZING, reason="nothing is specialised")
@PLANNERS
def test_garbage_that_the_user_does_not_let_be_collected(monkeypatch, budget, planner):
    make = use_planner(planner, monkeypatch)
    collects = []

    def built(*args):
        collects.append(gc.isenabled())
        return make(*args)

    monkeypatch.setattr(_specialize, planner, built)
    gc.disable()
    try:
        f, tree = eqxjit.filter_jit(lambda tree, x: x + 1), [Layer(X, i) for i in range(300)]
        for _ in range(3):
            f(tree, X)
        assert not gc.isenabled()
        assert collects == [False]
    finally:
        gc.enable()


NUMBERS = {
    "floats": ([float(i) for i in range(1, 400)], [(5, 5), (7, -7.0), (9, np.nan), (0, True)]),
    "zeros": ([0.0] * 400, [(5, -0.0), (7, 0), (9, False), (0, np.nan)]),
    "NaN": ([float("nan")] * 400, [(5, -0.0), (7, 0)]),
    "ints": ([*range(400)], [(1, True), (0, False), (5, 5.0), (300, "300")]),
    "texts": ([f"text {i}" for i in range(400)], [(5, Name("text 5")), (7, b"text 7"), (9, "")]),
    "mixed": ([1, "a", True, 2.5, b"c"] * 80, [(0, True), (2, 1), (3, 2), (4, "c")]),
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("sequence", [list, tuple])
def test_a_run_of_numbers_is_compared_as_one(kind, sequence):
    values, changes = NUMBERS[kind]
    f = eqxjit.filter_jit(lambda tree, x: (tree, x + 1))
    for _ in range(6):
        tree = sequence([X, *values, X])
        returned, _ = f(tree, X)
        assert type(returned) is sequence
        assert list(map(id, returned[1:-1])) == list(map(id, tree[1:-1])) or kind == "NaN"
    copied = sequence([X, *[type(value)(value) for value in values], X])
    assert f.cache_info().traces == 1
    f(copied, X)
    assert f.cache_info().traces == 1
    source = f.specialized_source()
    assert (source is None) == (not SPECIALIZING)
    assert source is None or len(source) < 4_000
    for n, (index, value) in enumerate(changes):
        changed = list(values)
        changed[index] = value
        returned, _ = f(sequence([X, *changed, X]), X)
        assert type(returned[index + 1]) is type(value)
        assert repr(returned[index + 1]) == repr(value)
        assert f.cache_info().traces == n + 2


# --- Describing -------------------------------------------------------------------------------


def test_a_new_shape_redoes_the_arrays_alone(monkeypatch):
    described = inside.count_descriptions(monkeypatch)
    f = eqxjit.filter_jit(lambda layers, x: x)
    layers = [Layer(X, i) for i in range(20)]
    for n in range(1, 5):
        f(layers, jnp.ones(n))
    assert len(described) == 1
    assert [t.reason for t in f.traces()][1:] == [
        f"shape: `x` was float32[{n}], is float32[{n + 1}]" for n in range(1, 4)
    ]
    f([*layers, X], X)
    assert len(described) == 2
    assert f.traces()[-1].arguments["layers[20]"] == "float32[3]"


def test_descriptions_hold_nothing_and_are_of_the_traced_values():
    class Held:
        pass

    layer = Layer(X, [Held(), "first"])
    ref = weakref.ref(layer.setting[0])
    f = eqxjit.filter_jit(lambda layer, x: x)
    f(layer, X), f(layer, X[1:])
    layer.setting[1] = "second"
    f(layer, X), f(layer, X[1:])
    texts = [trace.arguments["layer.setting[1]"] for trace in f.traces()]
    assert texts == ["'first'", "'first'", "'second'", "'second'"]
    del layer
    gc.collect()
    assert ref() is None


def test_descriptions_are_kept_for_a_few_structures_only():
    f = eqxjit.filter_jit(lambda x, n: x)
    for n in range(inside.MAX_TEMPLATES + 5):
        f(X, n)
    assert inside.n_templates(f) == inside.MAX_TEMPLATES
