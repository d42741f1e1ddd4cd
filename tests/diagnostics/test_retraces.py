"""Each trace is seen and explained: `traces()`, `explain_retraces`, and the reasons they give."""

import ast
import collections
import dataclasses
import functools
import logging
import operator
import pathlib
import re
import sys
import threading
import types
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxjit
from tests.support import inside, nodes
from tests.support.helpers import Counted, Own
from tests.support.places import JAX_FILES, shown
from tests.support.processes import run, start
from tests.support.sides import CALLS

#: What messages call this file.
HERE = shown(__file__)

X = jnp.arange(3.0)
Y = jnp.arange(4.0)
KEY = jax.random.key(0)


def identity(*args, **kwargs):
    return jax.tree.leaves(eqx.filter((args, kwargs), eqx.is_array))


def reasons(old, new, **options):
    """How a second call's trace differs from the first one's, both called until warm."""

    def fun(*args, **kwargs):
        return identity(*args, **kwargs)

    f = eqxjit.filter_jit(fun, **options)
    for arguments in (old, new):
        args, kwargs = arguments if isinstance(arguments, tuple) else ((), arguments)
        for _ in range(CALLS):
            f(*args, **kwargs)
    first, *others = f.traces()
    assert first.compared_with is None
    assert len(others) == 1, "not traced once more"
    assert others[0].compared_with == 1
    return [tuple(difference[:4]) for difference in others[0].differences]


class Layer(eqx.Module):
    weight: jax.Array
    bias: jax.Array | None
    activation: object
    size: int = eqx.field(static=True, default=3)


class Model(eqx.Module):
    layers: list
    config: object = eqx.field(static=True, default=None)


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float
    names: tuple[str, ...] = ()


def model(**changed):
    fields = {"weight": X, "bias": Y, "activation": jnp.tanh, **changed}
    return Model([Layer(X, Y, jax.nn.relu), Layer(**fields)])


# --- Reasons ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"x": X}, {"x": Y}, [("shape", "x", "float32[3]", "float32[4]")]),
        ({"x": X}, {"x": X[None]}, [("shape", "x", "float32[3]", "float32[1,3]")]),
        ({"x": X}, {"x": X.astype(int)}, [("dtype", "x", "float32", "int32")]),
        (
            {"x": jnp.asarray(1.0)},
            {"x": jnp.float32(1)},
            [("weak type", "x", "float32 of weak type", "float32")],
        ),
        ({"x": X, "n": 1}, {"x": X, "n": 2}, [("static value changed", "n", "1", "2")]),
        ({"n": 1}, {"n": True}, [("static value changed", "n", "1", "True")]),
        ({"n": 0.0}, {"n": -0.0}, [("static value changed", "n", "0.0", "-0.0")]),
        ({"n": 1}, {"n": "1"}, [("static value changed", "n", "1", "'1'")]),
        ({"n": float("nan")}, {"n": 1.0}, [("static value changed", "n", "nan", "1.0")]),
        ({"x": X}, {"x": 2.0}, [("static where an array was", "x", "float32[3]", "2.0")]),
        ({"x": 2}, {"x": X}, [("an array where a static value was", "x", "2", "float32[3]")]),
        ({"x": [X, X]}, {"x": [X, X, Y]}, [("structure changed", "x", "list of 2", "list of 3")]),
        ({"x": [X]}, {"x": (X,)}, [("structure changed", "x", "list of 1", "tuple of 1")]),
        ({"x": None}, {"x": X}, [("structure changed", "x", "None", "float32[3]")]),
        (
            {"d": {"a": X}},
            {"d": {"a": X, "b": Y}},
            [("structure changed", "d['b']", "absent", "float32[4]")],
        ),
        (
            {"d": {"a": X, "b": {"c": Y}}},
            {"d": {"a": X}},
            [("structure changed", "d['b']", "dict", "absent")],
        ),
        (
            {"m": model()},
            {"m": model(weight=Y)},
            [("shape", "m.layers[1].weight", "float32[3]", "float32[4]")],
        ),
        (
            {"m": model()},
            {"m": model(bias=None)},
            [("structure changed", "m.layers[1].bias", "float32[4]", "None")],
        ),
        (
            {"m": model()},
            {"m": model(activation=jnp.sinh)},
            [("static value changed", "m.layers[1].activation", "tanh", "sinh")],
        ),
        (
            {"m": model()},
            {"m": model(size=5)},
            [("static value changed", "m.layers[1].size", "3", "5")],
        ),
        (
            {"m": Model([], Config(1.0, ("a", "b")))},
            {"m": Model([], Config(2.0, ("a", "c")))},
            [
                ("static value changed", "m.config.rate", "1.0", "2.0"),
                ("static value changed", "m.config.names[1]", "'b'", "'c'"),
            ],
        ),
        (
            {"m": Model([], {"a": {"lr": 1}})},
            {"m": Model([], {"a": {"lr": 2}})},
            [("static value changed", "m.config['a']['lr']", "1", "2")],
        ),
        (
            {"opt": optax.adam(1e-3).init(X)},
            {"opt": optax.adam(1e-3).init(Y)},
            [
                ("shape", "opt[0].mu", "float32[3]", "float32[4]"),
                ("shape", "opt[0].nu", "float32[3]", "float32[4]"),
            ],
        ),
        (
            {"f": eqx.Partial(jnp.add, X)},
            {"f": eqx.Partial(jnp.subtract, X)},
            [("static value changed", "f.func", None, None)],
        ),
        ({"x": X}, {"x": X, "n": 1}, [("argument newly passed or left out", "n", "absent", "1")]),
        ({"x": X, "n": 1}, {"x": X}, [("argument newly passed or left out", "n", "1", "absent")]),
    ],
)
def test_a_difference_has_its_category_and_path(old, new, expected):
    found = reasons(old, new)
    assert len(found) == len(expected), found
    for ours, (category, path, was, is_now) in zip(found, expected, strict=True):
        assert ours[:2] == (category, path)
        assert was is None or ours[2:] == (was, is_now)


def test_numpy_arrays_are_described_as_jax_sees_them():
    f = eqxjit.filter_jit(lambda x: x * 2)
    f(np.ones(3, np.float64))
    f(jnp.ones(3))
    [trace] = f.traces()
    assert trace.arguments == {"x": "float32[3]"}
    f(np.float32(2))
    assert f.traces()[1].differences[0][:4] == ("shape", "x", "float32[3]", "float32[]")


def test_arguments_have_the_names_of_the_parameters():
    @eqxjit.filter_jit
    def f(a, /, b, *rest, c=1, **others):
        return a

    f(X, 1, 2, 3, d={"e": 4})
    assert f.traces()[0].arguments == {
        "a": "float32[3]",
        "b": "1",
        "rest[0]": "2",
        "rest[1]": "3",
        "d": "dict",
        "d['e']": "4",
    }
    for _ in range(CALLS):
        f(X, 1, 2, 5, d={"e": 4})
    assert f.traces()[1].differences[0][:4] == ("static value changed", "rest[1]", "3", "5")


def test_a_method_and_a_bound_model():
    class Scale(eqx.Module):
        by: jax.Array
        mode: str = eqx.field(static=True)

        @eqxjit.filter_jit
        def step(self, x):
            return self.by * x

        def __call__(self, x):
            return self.by + x

    for mode in ("a", "b"):
        Scale(X, mode).step(X)
    first, second = Scale(X, "b").step.traces()
    assert first.function == "Scale.step"
    assert second.differences[0][:4] == ("static value changed", "self.mode", "'a'", "'b'")

    bound = eqxjit.filter_jit(Scale(X, "a"))
    bound(X)
    other = eqxjit.filter_jit(Scale(jnp.ones((1, 3)), "a"))
    other(X)
    assert other.traces()[-1].differences[0][:4] == (
        "shape",
        "fun.by",
        "float32[3]",
        "float32[1,3]",
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [(1, 2**31), (1.0, 1e39), (KEY, 1), (KEY, True), (X, "text"), (X, X[None])],
)
def test_where_nothing_would_help_there_is_no_remedy(old, new):
    f = eqxjit.filter_jit(lambda x: X)
    f(old), f(new)
    [difference] = f.traces()[1].differences
    assert not difference.remedy


def test_the_closest_earlier_trace_is_compared_with():
    f = eqxjit.filter_jit(lambda x, n, mode: x)
    f(X, 1, "a")
    f(Y, 2, "b")
    f(X, 1, "c")
    third = f.traces()[2]
    assert third.compared_with == 1
    assert [d.path for d in third.differences] == ["mode"]
    # Of those that are as close, the latest.
    f(X, 1, "d")
    assert f.traces()[3].compared_with == 3
    # Also in the configuration.
    g = eqxjit.filter_jit(lambda x: x @ x)
    g(X)
    with jax.default_matmul_precision("float32"):
        g(X)
    jax.clear_caches()
    g(X)
    assert g.traces()[2].compared_with == 1


@pytest.mark.parametrize(
    ("calls", "path"),
    [
        ([(X,), (Y,), (X, 2)], "k"),
        ([(X, {"p": 1}), (X, {"p": 2}), (X, {"p": 1, "q": 3})], "k['q']"),
        ([(X, [1]), (X, [2]), (X, [1, 3])], "k"),
    ],
)
def test_what_differs_in_structure_is_compared_in_all_else(calls, path):
    f = eqxjit.filter_jit(lambda x, k=1: x)
    for arguments in calls:
        f(*arguments)
    assert f.traces()[2].compared_with == 1
    assert [d.path for d in f.traces()[2].differences] == [path]


def test_a_node_counts_with_all_that_is_in_it():
    f = eqxjit.filter_jit(lambda tree, n, mode: X)
    f([X] * 20, 1, "a")
    f(None, 2, "c")
    # One node less than the second, but twenty arrays more.
    f([X] * 20, 2, "b")
    assert f.traces()[2].compared_with == 1
    assert [d.path for d in f.traces()[2].differences] == ["n", "mode"]
    f(None, 2, "b")
    assert f.traces()[3].compared_with == 2


@pytest.mark.parametrize(
    ("make", "old", "new"),
    [
        (lambda end: "a" * 99 + end, "...aaaaaaaaaa1'", "...aaaaaaaaaa2'"),
        (lambda end: b"a" * 99 + end.encode(), "...aaaaaaaaaa1'", "...aaaaaaaaaa2'"),
        (lambda end: Own("a" * 99 + end), "...aaaaaaaaaa1)", "...aaaaaaaaaa2)"),
        (
            lambda end: "a" * 99 + end + "b" * 99,
            f"...aaaaaaaaaa1{'b' * 29}...",
            f"...aaaaaaaaaa2{'b' * 29}...",
        ),
    ],
)
def test_long_texts_are_shown_where_they_differ(make, old, new):
    f = eqxjit.filter_jit(lambda text: X)
    f(make("1")), f(make("2"))
    [difference] = f.traces()[1].differences
    assert difference[:4] == ("static value changed", "text", old, new)
    assert f.traces()[1].arguments["text"].endswith("aaaa...")


def test_what_is_not_complete_yet_is_compared_with():
    """A recursion, and what other threads trace meanwhile."""

    @eqxjit.filter_jit
    def countdown(x, n):
        return x if n == 0 else countdown(x, n - 1)

    countdown(X, 3)
    reasons = [trace.reason for trace in countdown.traces()]
    assert sorted(reason.partition(":")[0] for reason in reasons) == [
        "first trace",
        *["static value changed"] * 3,
    ]
    # The innermost comes to its end first.
    assert reasons[0] == "static value changed: `n` was 1, is 0"

    started, go_on = threading.Event(), threading.Event()

    @eqxjit.filter_jit(max_traces=1)
    def slow(x, n):
        started.set()
        assert go_on.wait(60)
        return x

    thread = threading.Thread(target=slow, args=(X, 1))
    thread.start()
    assert started.wait(60)
    with pytest.raises(eqxjit.TooManyTracesError, match="`n` was 1, is 2"):
        slow(X, 2)
    go_on.set()
    thread.join()


def test_another_class_of_the_same_name():
    def define():
        class Net(eqx.Module):
            w: jax.Array

        return Net

    f = eqxjit.filter_jit(lambda m: m.w)
    f(define()(X))
    f(define()(X))
    [difference] = f.traces()[1].differences
    assert difference.new == "Net (another class of that name)"


def test_a_class_is_no_array_of_its_name():
    f = eqxjit.filter_jit(lambda x, dtype: x)
    for dtype in (None, jnp.float32, jnp.zeros((), jnp.float32), np.float32, float):
        f(X, dtype)
    assert [(d.old, d.new) for trace in f.traces()[1:] for d in trace.differences] == [
        ("None", "class jax.numpy.float32"),
        ("class jax.numpy.float32", "float32[]"),
        ("float32[]", "class numpy.float32"),
        ("class numpy.float32", "class float"),
    ]


def test_the_order_of_a_static_dict():
    class Steps(eqx.Module):
        steps: dict = eqx.field(static=True)

    f = eqxjit.filter_jit(lambda model: X)
    f(Steps({"a": 1, "b": {2: 3}}))
    f(Steps({"b": {2: 3}, "a": 1}))
    f(Steps({"b": {2: 4}, "a": 1}))
    f(Steps({"a": 1, "b": {2: 4}}))
    # Another class altogether: what is in it isn't compared.
    f(Steps(collections.OrderedDict({"b": {2: 4}, "a": 1})))
    # Compared with the third trace, of the same order.
    with jax.default_matmul_precision("float32"):
        f(Steps({"b": {2: 4}, "a": 1}))
    assert [[str(d) for d in trace.differences] for trace in f.traces()[1:]] == [
        ["structure changed: `model.steps` was dict, is dict with its keys in another order"],
        ["static value changed: `model.steps['b'][2]` was 3, is 4"],
        ["structure changed: `model.steps` was dict, is dict with its keys in another order"],
        ["structure changed: `model.steps` was dict, is OrderedDict"],
        ["configuration changed: `jax_default_matmul_precision` was None, is 'float32'"],
    ]


def test_a_model_of_another_size_has_no_remedy():
    f = eqxjit.filter_jit(lambda model, x: model(x))
    for size in (3, 4):
        f(eqx.nn.Linear(size, size, key=jax.random.key(0)), jnp.ones(size))
    differences = f.traces()[1].differences
    assert {d.category for d in differences} == {"shape", "static value changed"}
    assert not any(d.remedy for d in differences)


def test_a_key_that_cannot_be_shown():
    class Key:
        def __lt__(self, other):
            return True

        def __repr__(self):
            raise RuntimeError

    f = eqxjit.filter_jit(lambda d: X)
    f({Key(): X})
    f({"b": X})
    assert [d.path for d in f.traces()[1].differences] == ["d['b']", "d[0]"]


@pytest.mark.parametrize("huge", [(1,) * 60_000, "a" * 10**6, b"a" * 10**6, 10**5000], ids=type)
def test_a_huge_static_value_is_told_apart_and_cut_short(huge):
    model = Model([], huge)
    f = eqxjit.filter_jit(lambda m, x: x)
    f(model, X)
    f(Model([], huge + 1 if isinstance(huge, int) else huge[:-1] + huge[:1] * 2), X)
    [difference] = f.traces()[1].differences
    assert difference[:2] == ("static value changed", "m.config")
    assert len(repr(f.traces()[1])) < 500


def test_calls_without_arguments():
    f = eqxjit.filter_jit(lambda x=None: x)
    f()
    assert f.traces()[0].arguments == {}
    assert repr(f.traces()[0]).startswith(f"<trace 1 of <lambda>() at {HERE}:")
    f(X)
    assert [d[:2] for d in f.traces()[1].differences] == [
        ("argument newly passed or left out", "x")
    ]
    jax.clear_caches()
    f()
    assert f.traces()[2].differences[0].category == "cache evicted or cleared"


def test_a_huge_tree_is_not_described():
    f = eqxjit.filter_jit(lambda x, many: x)
    for n in (1, 2):
        f(X, [[n]] * 60_000)
    assert f.traces()[1].differences[0].category == "unknown"
    assert f.traces()[1].arguments == {}
    assert "(...) at " in repr(f.traces()[1])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda n: [n] * 2_000, "`many[0]` was 1, is 2 (and 1999 more: `many[1]`, "),
        (lambda n: (*range(1_999), n), "`many[1999]` was 1, is 2"),
        (lambda n: Model([], config=[*range(99), n]), "`many.config[99]` was 1, is 2"),
        (
            lambda n: Model([], config=dict.fromkeys(range(2000), n)),
            "`many.config` was {0: 1, 1: 1, 2: 1, ",
        ),
    ],
)
def test_a_large_container_of_constants(make, reason):
    f = eqxjit.filter_jit(lambda x, many: x)
    for n in (1, 2, 1):
        f(X, make(n))
    _, second = f.traces()
    assert second.reason.startswith(f"static value changed: {reason}")


def test_old_descriptions_of_large_trees_are_dropped():
    f = eqxjit.filter_jit(lambda x, many: x)
    for n in range(18):
        f(X, [n] * 1_500)
    n_described = [len(trace.arguments) for trace in f.traces()]
    assert n_described == [0, 0, *[1_502] * 16]


def test_where_a_structure_is_put():
    f = eqxjit.filter_jit(lambda x: x)
    device = jax.devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    f.lower(jax.ShapeDtypeStruct((3,), jnp.float32, sharding=sharding))
    assert f.traces()[0].arguments == {"x": f"float32[3] on {device.platform}:{device.id}"}


def test_many_traces_of_which_the_first_are_no_longer_remembered(messages):
    f = eqxjit.filter_jit(lambda x: x)
    for n in (*range(1, 8), *range(100, 370), *range(8, 12)):
        # What is prepared is counted with none in a row.
        (f if n < 100 else f.lower)(np.ones(n, np.float32))
    [message] = messages
    assert "10 times, the last time: shape: `x` was float32[10], is float32[11]" in message
    assert "defined again" not in message


class Unique:
    """Objects of which each is another."""


def test_what_changes_later_is_described_as_it_was():
    """Also where nobody asks before: a record describes the call that was traced."""
    config, unique = [1], Unique()
    f = eqxjit.filter_jit(lambda tree: X)
    f([*range(200), Model([], config=config), unique])
    config[0] = 2
    del unique
    arguments = f.traces()[0].arguments
    assert arguments["tree[200].config[0]"] == "1"
    assert arguments["tree[201]"] == "Unique object"


# --- What JAX does by itself ------------------------------------------------------------------


@pytest.mark.parametrize("warm", [1, CALLS])
@pytest.mark.parametrize(
    ("change", "name", "old", "new"),
    [
        (lambda: jax.enable_x64(True), "jax_enable_x64", "False", "True"),
        (
            lambda: jax.default_matmul_precision("float32"),
            "jax_default_matmul_precision",
            "None",
            "'float32'",
        ),
        (
            lambda: jax.numpy_dtype_promotion("strict"),
            "jax_numpy_dtype_promotion",
            None,
            None,
        ),
        (lambda: jax.set_mesh(jax.make_mesh((1,), ("a",))), "mesh (jax.set_mesh)", None, None),
    ],
)
def test_a_changed_configuration(change, name, old, new, warm):
    counted = Counted(eqxjit.filter_jit, lambda x: x @ x)
    for _ in range(warm):
        counted(X)
    with change():
        for _ in range(warm):
            counted(X)
    assert counted.traces == 2
    _, second = counted.jitted.traces()
    found = {d.path: d for d in second.differences if d.category == "configuration changed"}
    assert name in found, second
    assert old is None or found[name][2:4] == (old, new)
    for _ in range(warm):
        counted(X)
    assert counted.jitted.cache_info().traces == counted.traces == 2


def test_contexts_that_are_made_after_the_import():
    code = """
import jax, jax.numpy as jnp, eqxjit
f = eqxjit.filter_jit(lambda x: x + 1)
f(jnp.ones(3))
one, other = jax.make_user_context(0), jax.make_user_context(0)
f(jnp.ones(3))
for n in range(3):
    with one(n), other(1):
        f(jnp.ones(3))
print([[(d.path.rstrip("0123456789"), d.old, d.new) for d in t.differences] for t in f.traces()])
"""
    *_, first, second = ast.literal_eval(run(code))
    # Where JAX doesn't tell what it keys traces by, there is no name.
    if inside.sees_axis_names():
        assert first == [("user_context ", "0", "1")]
        assert second == [("user_context ", "1", "2")]


@pytest.mark.parametrize("warm", [1, CALLS])
def test_cleared_and_evicted_caches(warm):
    counted = Counted(eqxjit.filter_jit, lambda x, n: x * n, maxsize=2)
    f = counted.jitted

    def call(n):
        for _ in range(warm):
            f(X, n)
        assert f.cache_info().traces == len(f.traces())
        return f.traces()[-1].differences

    call(1)
    jax.clear_caches()
    [difference] = call(1)
    assert difference.category == "cache evicted or cleared"
    assert "jax.clear_caches()" in difference.new
    call(2), call(3)
    [difference] = call(1)
    assert difference.category == "cache evicted or cleared"
    assert "raise `maxsize`" in difference.new
    n_traces = counted.traces
    f.clear_cache()
    assert f.traces() == []
    [difference] = call(1)
    assert difference.category == "cache evicted or cleared"
    assert "clear_cache" in difference.new
    assert len(f.traces()) == 1
    # It is compared with, but its number may be another trace's.
    assert f.traces()[0].compared_with is None
    assert counted.traces == n_traces + 1


def test_a_static_object_changed_in_place():
    f = eqxjit.filter_jit(lambda x, named: (x, named))
    named = Own("a")
    f(X, named)
    named.value = "b"
    f(X, Own("a"))
    [difference] = f.traces()[1].differences
    assert difference.category == "cache evicted or cleared"
    assert "changed in place" in difference.new
    returned, _ = f(X, named), f(X, named)
    returned[1].value = "d"
    f(X, Own("b"))
    assert "changed in place" in f.traces()[-1].reason
    f(X, Own("c"))
    [difference] = f.traces()[-1].differences
    assert difference[:2] == ("static value changed", "named")
    assert difference.new == "Own(c)"


def configured():
    """A class of Modules that nothing was compiled for so far."""

    class Configured(eqx.Module):
        config: Any = eqx.field(static=True)

        def __call__(self, x):
            return x * self.config[0]

        def method(self, x):
            return self(x)

    return Configured


class Unhashable:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is type(self) and self.value == other.value


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            [collections.OrderedDict(a=X, b=X), collections.OrderedDict(b=X, a=X)],
            "structure changed: `v` was OrderedDict, is OrderedDict with its keys in another order",
        ),
        (
            [*map(configured(), map(Unhashable, (1, 2)))],
            "static value changed: `v.config` was Unhashable object with value=1, "
            "is Unhashable object with value=2",
        ),
        (
            [*map(configured(), map(dict.fromkeys, (range(9), [0, 1, 2, 8, 7, 6, 5, 4, 3])))],
            "structure changed: `v.config` was dict, is dict with its keys in another order",
        ),
    ],
)
def test_values_that_look_alike(values, reason):
    f = eqxjit.filter_jit(lambda v, x: x)
    for _ in range(CALLS):
        for value in values:
            f(value, X)
    _, again = f.traces()
    assert again.reason == reason


class Box:
    """A node that JAX makes, with no code of the user's in between: of tuples, by an addition."""

    def __init__(self, x):
        self.x = x


added = jax.jit(operator.add)
jax.tree_util.register_pytree_node(
    Box, lambda box: ((box.x,), (1.0,)), functools.partial(jax.tree.map, added)
)


def test_what_else_is_compiled_in_a_warm_call_is_no_trace():
    f = eqxjit.filter_jit(lambda x: Box(x), max_traces=1)
    for _ in range(CALLS):
        added.clear_cache()
        [out] = f(X)
        assert out.tolist() == [1.0, 2.0, 3.0]
    assert f.cache_info()[:2] == (1, 1)


def test_what_a_callback_compiles_is_not_the_callers():
    """A CPU may run it in the thread that calls."""
    f = eqxjit.filter_jit(lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct((3,), X.dtype), x))
    sizes = iter(range(5, 100))

    def host(x):
        return np.asarray(jax.jit(lambda y: y * 2)(np.ones(next(sizes))))[:3]

    for _ in range(CALLS):
        f(X)
    assert f.cache_info()[:2] == (1, 1)


def test_lowering_is_a_trace_and_compiling_is_timed():
    f = eqxjit.filter_jit(lambda x: jnp.sin(x))
    lowered = f.lower(X)
    [trace] = f.traces()
    assert trace.seconds.lowering > 0
    assert trace.seconds.compiling == 0
    lowered.compile()
    assert trace.seconds.compiling > 0
    for _ in range(CALLS):
        f(X)
    assert len(f.traces()) == f.cache_info().traces == 1


def test_a_function_made_anew_around_other_arrays():
    """The usual mistake: a model in a closure. Its arrays' values make no difference."""
    for i in range(2):
        array = jnp.full(3, i)
        f = eqxjit.filter_jit(lambda x, array=array: x * array)
        g = eqxjit.filter_jit(jax.grad(_times(array)))
        f(X), g(X)
    for each in (f, g):
        [trace] = each.traces()
        assert trace.differences[0].category == "function defined again"
        assert f"({HERE}:" in trace.differences[0].new


def _times(array):
    return lambda x: (x * array).sum()


def test_nested_functions_are_traces_of_their_own():
    inner = eqxjit.filter_jit(lambda x: jnp.sin(x))
    outer = eqxjit.filter_jit(lambda x: inner(x).sum() + inner(x[1:]))
    for _ in range(CALLS):
        outer(X)
    assert [t.reason for t in inner.traces()][1].startswith("shape: `x` was float32[3]")
    [trace] = outer.traces()
    assert 0 < sum(t.seconds.tracing for t in inner.traces()) <= trace.seconds.tracing
    assert inner.traces()[0].seconds.compiling == 0
    assert trace.seconds.compiling > 0
    assert {t.call_site.filename for t in (trace, *inner.traces())} == {__file__}


def test_transformations_trace_and_compile_too():
    counted = Counted(eqxjit.filter_jit, lambda x: (x**2).sum())
    f = counted.jitted
    for _ in range(2):
        f(X)
        jax.grad(f)(X)
        jax.vmap(f)(X[None])
        jax.vmap(f, axis_name="i")(X[None])
    assert counted.traces == f.cache_info().traces == 2
    _, retrace = f.traces()
    if inside.sees_axis_names():
        assert retrace.reason == (
            "configuration changed: `axis names of an outer transformation` was {}, is {'i': 1}"
        )


def test_a_trace_that_was_nested_is_compiled_for_itself():
    inner = eqxjit.filter_jit(lambda x: x * 2, max_traces=1)
    jax.jit(lambda x: inner(x))(X)
    [trace] = inner.traces()
    assert trace.seconds.compiling == 0
    for _ in range(CALLS):
        inner(X)
    assert trace.seconds.compiling > 0
    assert inner.cache_info()[:2] == (1, 1)


def test_a_trace_that_fails_is_none():
    f = eqxjit.filter_jit(lambda x, fails: 1 / 0 if fails else x)
    for _ in range(CALLS):
        with pytest.raises(ZeroDivisionError):
            f(X, True)
    assert f.traces() == []
    f(X, False)
    assert [(t.number, t.reason) for t in f.traces()] == [(1, "first trace")]


def test_the_persistent_cache_is_told_apart(tmp_path):
    program = """
        import jax, jax.numpy as jnp, eqxjit

        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        f = eqxjit.filter_jit(lambda x: jnp.sin(x) @ jnp.cos(x))
        with eqxjit.compile_report() as report:
            f(jnp.ones(3))
        [trace] = f.traces()
        [row] = [row for row in report.rows if row.function == "<lambda>"]
        print(trace.from_persistent_cache, row.persistent_cache_hits)
    """
    answers = [
        run(program, JAX_COMPILATION_CACHE_DIR=str(tmp_path)).splitlines()[-1] for _ in range(2)
    ]
    assert answers == ["False 0", "True 1"]


# --- The record -------------------------------------------------------------------------------


def test_the_text_of_a_trace():
    def power(x, n):
        return x**n

    f = eqxjit.filter_jit(power)
    f(X, 2)
    f(X, 3)
    line = f.traces()[1].call_site.line
    text = repr(f.traces()[1])
    assert text.startswith(
        f"<trace 2 of power(x: float32[3], n=3) at {HERE}:{line}: "
        "static value changed: `n` was 2, is 3; "
    )
    assert "s (tracing " in text
    source = pathlib.Path(__file__).read_text().splitlines()
    assert source[line - 1].strip() == "f(X, 3)"


def test_records_refer_to_nothing_of_the_users():
    import gc
    import weakref

    f = eqxjit.filter_jit(lambda x, *statics: x, maxsize=1)
    watched = []
    for _ in range(3):
        kind = type("Kind", (), {})
        static = kind()
        function = lambda y: y  # noqa: E731
        partial = functools.partial(function)
        array = jnp.ones(7)
        watched += map(weakref.ref, (kind, static, function, partial, array))
        for _ in range(CALLS):
            f(array, static, function, partial, (static, [function]))
        del kind, static, function, partial, array
    f(X)
    gc.collect()
    assert [ref() for ref in watched if ref() is not None] == []
    assert len(f.traces()) == 4


@pytest.mark.slow
def test_what_is_remembered_has_a_bound():
    f = eqxjit.filter_jit(lambda x, n: n, maxsize=4)
    for n in range(260):
        f(None, n)
    assert f.cache_info().traces == 260
    assert len(f.traces()) == 256
    assert [trace.number for trace in f.traces()] == [*range(5, 261)]


def test_racing_threads_count_and_number_each_trace():
    f = eqxjit.filter_jit(lambda x, n: x * n)
    threads = [
        threading.Thread(target=lambda i=i: [f(X, n) for n in range(i, i + 3)]) for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    info = f.cache_info()
    assert [trace.number for trace in f.traces()] == [*range(1, info.traces + 1)]


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


def test_values_that_cannot_be_shown():
    f = eqxjit.filter_jit(lambda x, value: x)
    f(X, Unprintable())
    f(X, Unprintable())
    assert f.traces()[1].differences[0][:4] == (
        "static value changed",
        "value",
        "Unprintable object",
        "Unprintable object",
    )


def test_a_registered_node_is_looked_into():
    f = eqxjit.filter_jit(lambda p: p.data[0])
    f(nodes.Record([X, {"b": X}], "a"))
    f(nodes.Record([X, {"b": Y}], "a"))
    assert f.traces()[1].differences[0][:2] == ("shape", "p.data[1]['b']")
    f(nodes.Record([X, {"b": X}], "b"))
    [difference] = f.traces()[2].differences
    assert difference[:4] == (
        "structure changed",
        "p",
        "Record with metadata ('a',)",
        "Record with metadata ('b',)",
    )


# --- The log ----------------------------------------------------------------------------------


def test_the_log_is_silent_unless_asked_for(caplog):
    f = eqxjit.filter_jit(lambda x, n: x)
    with caplog.at_level(logging.DEBUG, "eqxjit"):
        f(X, 1)
        f(X, 2)
        assert caplog.messages == []
        with eqxjit.explain_retraces():
            f(X, 2)
            f(X, 3)
        f(X, 4)
    [message] = caplog.messages
    assert message.startswith(
        f"`{f.traces()[0].function}` was traced again (trace 3) for the call "
    )
    assert f"at {HERE}:{f.traces()[2].call_site.line}, in " in message
    assert "(tracing " in message
    assert (
        "Compared with trace 2:\n  - static value changed: `n` was 2, is 3\n    If it varies"
        in message
    )
    [record] = caplog.records
    assert (record.name, record.levelno) == ("eqxjit", logging.WARNING)


def test_a_function_defined_again_is_logged(caplog):
    with eqxjit.explain_retraces():
        for n in range(3):
            f = eqxjit.filter_jit(lambda x, n=n: x * n)
            f(X)
    assert len(caplog.messages) == 2
    assert "function defined again: another function made of the same code" in caplog.messages[0]
    assert "Define and wrap it once" in caplog.messages[0]
    assert f.traces()[0].differences[0].category == "function defined again"


def test_other_functions_of_one_code_are_not_defined_again(caplog):
    def decorated(fun):
        @eqxjit.filter_jit
        @functools.wraps(fun)
        def wrapper(*args):
            return fun(*args)

        return wrapper

    def unnamed(fun):
        return eqxjit.filter_jit(lambda x: fun(x))

    def scaled(by):
        return eqxjit.filter_jit(lambda x: x * by)

    functions = [
        eqxjit.filter_jit(jax.grad(lambda x: x.sum())),
        eqxjit.filter_jit(jax.grad(lambda x: (x**2).sum())),
        eqxjit.filter_jit(jax.vmap(lambda x: x + 1)),
        decorated(lambda x: x * 2),
        decorated(lambda x: x * 3),
        unnamed(jnp.sin),
        unnamed(lambda x: x * 4),
        unnamed(lambda x: x * 5),
        scaled(5),
        *(eqxjit.filter_jit(lambda x: x * 6), eqxjit.filter_jit(lambda x: x * 7)),
    ]
    with eqxjit.explain_retraces():
        for f in functions:
            f(X)
            assert [t.reason for t in f.traces()] == ["first trace"]
        assert caplog.messages == []
        f = scaled(6)
        f(X)
    assert f.traces()[0].differences[0].category == "function defined again"
    [message] = caplog.messages
    assert message.startswith("`<lambda>` was traced (trace 1) for the call")


def test_the_same_function_wrapped_again_is_not_defined_again():
    def fun(x):
        return x

    for options in ({}, {"donate": "all"}, {"inline": True}):
        f = eqxjit.filter_jit(fun, **options)
        f(jnp.ones(3))
        assert [t.reason for t in f.traces()] == ["first trace"]


def test_explanations_are_switched_on_and_off(caplog):
    f = eqxjit.filter_jit(lambda x, n: x)
    f(X, 0)
    n_logged = 0

    def assert_logged(is_logged):
        nonlocal n_logged
        n_logged += is_logged
        f(X, f.cache_info().traces)
        # Beside that of a storm.
        assert sum("traced again" in message for message in caplog.messages) == n_logged

    try:
        eqxjit.explain_retraces()
        assert_logged(True)
        with eqxjit.explain_retraces(False):
            assert_logged(False)
            with eqxjit.explain_retraces():
                assert_logged(True)
            assert_logged(False)
        assert_logged(True)
    finally:
        eqxjit.explain_retraces(False)
    assert_logged(False)
    decorated = eqxjit.explain_retraces()(assert_logged)
    assert_logged(False)
    decorated(True)
    assert_logged(False)

    @eqxjit.explain_retraces()
    def recursive(depth):
        if depth:
            recursive(depth - 1)
        assert_logged(True)

    recursive(2)
    assert_logged(False)
    explaining = eqxjit.explain_retraces()
    for _ in range(2):
        with explaining:
            assert_logged(True)
        assert_logged(False)


@pytest.mark.parametrize("wrong", ["yes", None, 1, 0, identity])
def test_a_switch_is_on_or_off(wrong, caplog):
    with pytest.raises(TypeError, match=r"`on` is True or False"):
        eqxjit.explain_retraces(wrong)
    f = eqxjit.filter_jit(lambda x, n: x)
    f(X, 1), f(X, 2)
    assert caplog.messages == []


def test_contexts_may_overlap(caplog):
    f = eqxjit.filter_jit(lambda x, n: x)
    one, two = eqxjit.explain_retraces(), eqxjit.explain_retraces()
    f(X, 0)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    f(X, 1)
    two.__exit__(None, None, None)
    f(X, 2)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(("value", "n_messages"), [("1", 1), ("False", 0)])
def test_the_environment_variable(value, n_messages):
    program = """
        import logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(name)s: %(message)s")
        import jax.numpy as jnp, eqxjit
        f = eqxjit.filter_jit(lambda x, n: x)
        f(jnp.ones(3), 1)
        f(jnp.ones(3), 2)
    """
    printed = run(program, EQXJIT_EXPLAIN_RETRACES=value)
    assert printed.count("eqxjit: `<lambda>` was traced again (trace 2)") == n_messages


def test_arrays_that_changed_alike_share_a_line(caplog):
    f = eqxjit.filter_jit(lambda tree: tree)
    tree = {str(i): X for i in range(20)}
    with eqxjit.explain_retraces():
        f(tree)
        f(jax.tree.map(lambda x: x.astype(jnp.float16), tree))
    [message] = caplog.messages
    assert "dtype: `tree['0']` was float32, is float16 (and 19 more: `tree['1']`" in message
    assert message.count("\n") == 2


# --- Limits -----------------------------------------------------------------------------------


def test_one_trace_too_many_raises_what_explains_it():
    counted = Counted(eqxjit.filter_jit, lambda x, n=1: x * n, max_traces=3)
    f = counted.jitted
    for n in (1, 2, 3):
        for _ in range(CALLS):
            f(X, n)
    before, entries = counted.traces, f.cache_info()
    for bad in ((X, 4), (Y, 3), (X.astype(int), 3)):
        for _ in range(CALLS):
            with pytest.raises(eqxjit.TooManyTracesError) as caught:
                f(*bad)
            message = str(caught.value)
            assert "may be traced 3 times (`max_traces=3`)" in message
            assert f"the call at {HERE}:" in message
            assert "would be trace 4" in message
            assert "Compared with trace 3:\n  - " in message
    assert "dtype: `x` was float32, is int32" in message
    assert counted.traces == before
    assert f.cache_info() == entries
    for n in (1, 2, 3):
        np.testing.assert_array_equal(f(X, n), X * n)
    f.clear_cache()
    f(X, 5)
    assert f.cache_info().traces == 1


def test_the_limit_sees_what_jax_traces_by_itself():
    f = eqxjit.filter_jit(lambda x: x, max_traces=1)
    for _ in range(CALLS):
        f(X)
    jax.clear_caches()
    for _ in range(CALLS):
        with pytest.raises(eqxjit.TooManyTracesError, match=r"jax\.clear_caches\(\)"):
            f(X)
    with pytest.raises(eqxjit.TooManyTracesError, match="jax_enable_x64"), jax.enable_x64(True):
        f(X)
    with pytest.raises(eqxjit.TooManyTracesError):
        f.lower(Y)


def test_the_limit_counts_a_recursion():
    @eqxjit.filter_jit(max_traces=3)
    def countdown(x, n):
        return x if n == 0 else countdown(x + 1, n - 1)

    assert countdown(X, 2).tolist() == (X + 2).tolist()
    with pytest.raises(eqxjit.TooManyTracesError):
        countdown(X, 3)
    assert countdown(X, 1).tolist() == (X + 1).tolist()
    assert countdown.cache_info().traces == 3


def test_the_limit_leaves_out_traces_that_failed():
    """Also while their errors, and by them their frames, are alive."""

    @eqxjit.filter_jit(max_traces=2)
    def divided(x, n):
        return x / (1 // n)

    errors = []
    for _ in range(5):
        with pytest.raises(ZeroDivisionError) as caught:
            divided(X, 0)
        errors.append(caught.value)
    assert divided(X, 1).tolist() == divided(Y, 1)[: len(X)].tolist() == X.tolist()
    assert divided.cache_info().traces == 2


def test_the_limit_is_per_function_and_options():
    def fun(x, n):
        return x

    one, other = eqxjit.filter_jit(fun, max_traces=1), eqxjit.filter_jit(fun)
    one(X, 1)
    for n in range(5):
        other(X, n)
    with pytest.raises(eqxjit.TooManyTracesError, match="may be traced once"):
        one(X, 2)


# --- Storms -----------------------------------------------------------------------------------


@pytest.fixture
def messages():
    """What was logged so far; a Python warning would be an error."""
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("eqxjit").addHandler(handler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield logged
    logging.getLogger("eqxjit").removeHandler(handler)


def one(arguments, fun=lambda x: X, **options):
    """A storm of calls of one function: how its `i`-th call is made."""

    def made():
        again = types.FunctionType(fun.__code__, fun.__globals__, fun.__name__)
        f = eqxjit.filter_jit(again, **options)
        return lambda i: f(*arguments(i))

    return made


def anew(fun, make=lambda i: X):
    """A storm of functions that are wrapped anew for each call."""
    return lambda: lambda i: eqxjit.filter_jit(fun(i))(make(i))


class Scale(eqx.Module):
    by: int = eqx.field(static=True)

    def __call__(self, x):
        return self.by * x


class Stepper:
    def step(self, x):
        return x


def multiply(i, x):
    return i * x


def cleared():
    f = eqxjit.filter_jit(lambda x: x)

    def call(i):
        f(X)
        jax.clear_caches()

    return call


AGAIN = "function defined again: another"
STORMS = {
    "static": (one(lambda i: (X, i), lambda x, n: x), ["static value changed: `n` was 9, is 10"]),
    "two statics": (
        one(lambda i: (X, i, str(i)), lambda x, n, mode: x),
        [
            "static value changed: `n` was 9, is 10",
            "static value changed: `mode` was '9', is '10'",
        ],
    ),
    "shapes": (
        one(lambda i: (jnp.ones(i),), lambda x: x),
        ["shape: `x` was float32[9], is float32[10]"],
    ),
    "dtypes and shapes": (
        one(lambda i: (jnp.ones(i // 2, [jnp.int32, jnp.float32][i % 2]),), lambda x: x),
        ["shape: `x` was", "dtype: `x` was float32, is int32"],
    ),
    "structures": (
        one(lambda i: ([X] * i,), lambda tree: X),
        ["structure changed: `tree` was list of 9, is list of 10"],
    ),
    "functions": (
        anew(lambda i: lambda x: x),
        [f"{AGAIN} function made of the same code ({HERE}:"],
    ),
    "functions around a value": (anew(lambda i: lambda x, i=[i]: x * i[0]), [AGAIN]),
    "closures": (
        anew(lambda i: lambda x: x * i),
        [f"{AGAIN} function made of the same code ({HERE}:"],
    ),
    "partials": (
        anew(lambda i: functools.partial(multiply, i)),
        [f"{AGAIN} function made of the same code ({HERE}:"],
    ),
    "methods": (
        anew(lambda i: Stepper().step),
        ["function defined again: `Stepper.step` of another `Stepper"],
    ),
    "Modules": (anew(Scale), [f"{AGAIN} one of `Scale`"]),
    "activations": (
        one(lambda i: (X, lambda x: x), lambda x, activation: activation(x)),
        ["static value changed: `activation` is another `<lambda>` at "],
    ),
    "cleared": (cleared, ["cache evicted or cleared: JAX's caches no longer hold it"]),
    "evicted": (
        one(lambda i: (X, "ab"[i % 2]), lambda x, n: x, maxsize=1),
        ["cache evicted or cleared: its entry was the least recently used of more than 1"],
    ),
}


@pytest.mark.parametrize("name", STORMS)
def test_a_storm_is_logged_once_with_its_causes(name, messages):
    make, expected = STORMS[name]

    def storm(n):
        call = make()
        for i in range(n):
            call(i)

    storm(10)
    assert messages == []
    inside.forget_storms()
    storm(22)
    [message] = messages
    start, *causes, end = message.splitlines()
    place = re.escape(HERE)
    assert re.match(rf"`.*` was traced 10 times in a row, last for the call at {place}:\d+:", start)
    assert "Ignore this if you expect only a few more" in end
    for cause in expected:
        assert any(cause in line and "the last time: " in line for line in causes), message
    assert sum("the last time: " in line for line in causes) >= len(expected)
    # Nor for other functions that are defined at the same place, where that is the cause.
    storm(12)
    assert len(messages) == (1 if "defined again" in expected[0] else 2)


def test_causes_are_counted(messages):
    f = eqxjit.filter_jit(lambda x, n: x)
    for i in range(4):
        f(X, i)
    for i in range(20, 27):
        f(jnp.ones(i), 3)
    [message] = messages
    assert re.search(
        r"- 7 times, the last time: shape: `x` was float32\[25\], is .*\[26\]\n", message
    )
    assert "- 3 times, the last time: static value changed: `n` was 2, is 3\n" in message
    assert message.count("pad it") == message.count("pass `jnp.asarray(n, ") == 1
    # It is logged once.
    f.clear_cache()
    for i in range(12):
        f(X, i)
    assert messages == [message]


def test_many_causes_are_cut_short(messages):
    f = eqxjit.filter_jit(lambda **kwargs: X)
    for i in range(11):
        f(**{f"n{k}": i for k in range(50)})
    [message] = messages
    assert message.count("the last time:") == 4
    assert "and 46 more" in message


def test_what_is_no_storm(messages):
    f = eqxjit.filter_jit(lambda x, n: x)
    for _ in range(40):
        f(X, 0)
    # Ten variants, each then used.
    for n in range(10):
        f(X, n)
    # What fails isn't traced.
    g = eqxjit.filter_jit(lambda x, n: 1 / 0)
    for n in range(20):
        with pytest.raises(ZeroDivisionError):
            g(X, n)
    # On purpose, ahead of time.
    for n in range(20):
        f.lower(X, n).compile()
    frozen = eqxjit.freeze(eqx.nn.Linear(3, 3, key=jax.random.key(0)))
    for n in range(20):
        frozen.lower(jnp.ones((n, 3))[0, :] if n else X)
    # Parts of an outer program.
    inner = eqxjit.filter_jit(lambda x, n: x * n)
    eqxjit.filter_jit(lambda x: [inner(x, n) for n in range(20)])(X)
    jax.jit(lambda x: [inner(x, n) for n in range(20, 40)])(X)
    # One function under some options, or as parts of others.
    for options in ({}, {"donate": "all"}, {"block": True}):
        eqxjit.filter_jit(inner.__wrapped__, **options)(jnp.ones(3), 1)
    # After so many, it is begun to count anew.
    h = eqxjit.filter_jit(lambda x, n: x)
    for n in range(50):
        h(X, n)
        if n % 9 == 8:
            h.clear_cache()
    assert messages == []


def test_eager_transformations_are_counted(messages):
    f = eqxjit.filter_jit(lambda x, n: (x * n).sum())
    for n in range(20):
        jax.grad(f)(X, n)
    [message] = messages
    assert "static value changed: `n` was" in message


def test_functions_of_one_line_in_a_session_are_told_apart(messages):
    for i in range(20):
        code = compile(f"lambda x: x * {i}", "<stdin>", "eval")
        eqxjit.filter_jit(eval(code))(X)
    assert messages == []


def test_a_handler_of_the_log_may_call_what_is_logged(messages):
    f = eqxjit.filter_jit(lambda x, n: x * n)

    class Handler(logging.Handler):
        def emit(self, record):
            def work():
                for n in range(30):
                    f(X, n)

            thread = threading.Thread(target=work)
            thread.start()
            thread.join(60)
            assert not thread.is_alive()

    handler = Handler()
    logging.getLogger("eqxjit").addHandler(handler)
    try:
        for n in range(12):
            f(X, n)
    finally:
        logging.getLogger("eqxjit").removeHandler(handler)
    assert len(messages) == 1


def test_warnings_that_are_errors_do_no_harm():
    program = """
        import jax, jax.numpy as jnp, eqxjit
        f = eqxjit.filter_jit(lambda x, n: x * n)
        for n in range(30):
            assert f(jnp.ones(3), n).tolist() == [n] * 3
        print("fine")
    """
    result = start(program, PYTHONWARNINGS="error")
    assert result.stdout == "fine\n", result.stderr
    assert "10 times in a row" in result.stderr


# --- What it costs -----------------------------------------------------------------------------


def frames_of_jax(call):
    """How many Python functions of JAX's a call runs."""
    called = 0

    def see(frame, event, _):
        nonlocal called
        called += event == "call" and frame.f_code.co_filename.startswith(JAX_FILES)

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return called


def test_warm_calls_are_dispatched_in_c_whatever_was_traced_before():
    """JAX goes on in Python, slowly, with arguments for which a call of it has failed."""
    fails = True

    def fun(x):
        if fails and x.dtype == jnp.int32:
            raise ZeroDivisionError
        return x + 1

    f = eqxjit.filter_jit(fun)
    shapes = [X, Y, jnp.ones((2, 2))]
    for x in shapes:
        for _ in range(CALLS):
            f(x)
    with pytest.raises(ZeroDivisionError):
        f(jnp.arange(2))
    fails = False
    f.compile(jax.ShapeDtypeStruct((7,), jnp.float32))
    jax.clear_caches()
    shapes += [jnp.arange(2), jnp.ones(7)]
    for x in shapes * 2:
        f(x)
    fresh = eqxjit.filter_jit(lambda x: x + 1)
    for _ in range(CALLS):
        fresh(X)
    least = frames_of_jax(lambda: fresh(X))
    assert least < 5
    assert [frames_of_jax(lambda x=x: f(x)) for x in shapes] == [least] * len(shapes)
