"""Each trace is recorded and explained: `traces()`, and its reasons."""

import contextlib
import dataclasses
import functools
import gc
import pathlib
import re
import time
import weakref
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxjit
from tests.support import nodes
from tests.support.helpers import Counted, Own
from tests.support.places import shown
from tests.support.sides import CALLS
from tests.support.threads import race

#: What messages call this file.
HERE = shown(__file__)

X = jnp.arange(3.0)
Y = jnp.arange(4.0)


def identity(*args, **kwargs):
    return jax.tree.leaves(eqx.filter((args, kwargs), eqx.is_array))


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


class Unprintable:
    __module__ = 3  # type: ignore[assignment]

    def __repr__(self):
        raise RuntimeError("no text")


def model(**changed):
    fields = {"weight": X, "bias": Y, "activation": jnp.tanh, **changed}
    return Model([Layer(X, Y, jax.nn.relu), Layer(**fields)])


WAS_AND_IS = [
    ({"x": X}, {"x": Y}, ["shape: `x` was float32[3], is float32[4]"]),
    ({"x": X}, {"x": np.float32(2)}, ["shape: `x` was float32[3], is float32[]"]),
    ({"x": X}, {"x": X.astype(int)}, ["dtype: `x` was float32, is int32"]),
    (
        {"x": jnp.asarray(1.0)},
        {"x": jnp.float32(1)},
        ["weak type: `x` was float32 of weak type, is float32"],
    ),
    ({"x": X, "n": 1}, {"x": X, "n": 2}, ["static value changed: `n` was 1, is 2"]),
    ({"n": 1}, {"n": True}, ["static value changed: `n` was 1, is True"]),
    ({"n": 0.0}, {"n": -0.0}, ["static value changed: `n` was 0.0, is -0.0"]),
    ({"n": float("nan")}, {"n": 1.0}, ["static value changed: `n` was nan, is 1.0"]),
    ({"x": X}, {"x": 2.0}, ["static where an array was: `x` was float32[3], is 2.0"]),
    ({"x": 2}, {"x": X}, ["an array where a static value was: `x` was 2, is float32[3]"]),
    ({"x": [X, X]}, {"x": [X, X, Y]}, ["structure changed: `x` was list of 2, is list of 3"]),
    ({"x": [X]}, {"x": (X,)}, ["structure changed: `x` was list of 1, is tuple of 1"]),
    ({"x": None}, {"x": X}, ["structure changed: `x` was None, is float32[3]"]),
    (
        {"d": {"a": X}},
        {"d": {"a": X, "b": Y}},
        ["structure changed: `d['b']` was absent, is float32[4]"],
    ),
    (
        {"d": {"a": X, "b": {"c": Y}}},
        {"d": {"a": X}},
        ["structure changed: `d['b']` was dict, is absent"],
    ),
    (
        {"m": model()},
        {"m": model(weight=Y)},
        ["shape: `m.layers[1].weight` was float32[3], is float32[4]"],
    ),
    (
        {"m": model()},
        {"m": model(activation=jnp.sinh)},
        ["static value changed: `m.layers[1].activation` was tanh, is sinh"],
    ),
    (
        {"m": Model([], Config(1.0, ("a", "b")))},
        {"m": Model([], Config(2.0, ("a", "c")))},
        [
            "static value changed: `m.config.rate` was 1.0, is 2.0",
            "static value changed: `m.config.names[1]` was 'b', is 'c'",
        ],
    ),
    (
        {"m": Model([], {"a": {"lr": 1}})},
        {"m": Model([], {"a": {"lr": 2}})},
        ["static value changed: `m.config['a']['lr']` was 1, is 2"],
    ),
    (
        {"opt": optax.adam(1e-3).init(X)},
        {"opt": optax.adam(1e-3).init(Y)},
        [f"shape: `opt[0].{part}` was float32[3], is float32[4]" for part in ("mu", "nu")],
    ),
    (
        {"p": nodes.Record([X, {"b": X}], "a")},
        {"p": nodes.Record([X, {"b": Y}], "a")},
        ["shape: `p.data[1]['b']` was float32[3], is float32[4]"],
    ),
    (
        {"p": nodes.Record([X], "a")},
        {"p": nodes.Record([X], "b")},
        ["static value changed: `p (metadata)[0]` was 'a', is 'b'"],
    ),
    ({"x": X}, {"x": X, "n": 1}, ["argument newly passed or left out: `n` was absent, is 1"]),
    (
        {"x": Unprintable()},
        {"x": Unprintable()},
        ["static value changed: `x` is a different Unprintable object"],
    ),
]


@pytest.mark.parametrize(("old", "new", "expected"), WAS_AND_IS)
def test_a_difference_has_its_category_and_path(old, new, expected):
    """This holds for cold and for warm calls."""
    for warm in (1, CALLS):
        f = eqxjit.filter_jit(lambda *args, **kwargs: identity(*args, **kwargs))
        for kwargs in (old, new):
            for _ in range(warm):
                f(**kwargs)
        first, second = f.traces()
        assert (first.compared_with, second.compared_with) == (None, 1)
        assert [*map(str, second.differences)] == expected


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
    trace = f.traces()[1]
    assert trace.differences[0][:4] == ("static value changed", "rest[1]", "3", "5")
    assert re.match(rf"<trace 2 of .*f\(a: float32\[3\], .*\) at {HERE}:", repr(trace))
    line = pathlib.Path(__file__).read_text().splitlines()[trace.call_site.line - 1]
    assert line.strip() == 'f(X, 1, 2, 5, d={"e": 4})'


class Scale(eqx.Module):
    by: jax.Array
    mode: str = eqx.field(static=True)

    @eqxjit.filter_jit
    def step(self, x):
        return self.by * x

    def __call__(self, x):
        return self.by + x


def test_a_method_and_a_bound_model():
    for mode in ("a", "b"):
        Scale(X, mode).step(X)
    first, second = Scale.step.traces()
    assert first.function == "Scale.step"
    assert second.reason == "static value changed: `self.mode` was 'a', is 'b'"
    for by in (X, X[None]):
        bound = eqxjit.filter_jit(Scale(by, "a"))
        bound(X)
    assert bound.traces()[-1].reason == "shape: `fun.by` was float32[3], is float32[1,3]"


@pytest.mark.parametrize(
    ("calls", "compared_with", "paths"),
    [
        ([(X, 1, "a"), (Y, 2, "b"), (X, 1, "c")], 1, ["mode"]),
        # Of equally close traces, the latest is compared.
        ([(X, 1, "a"), (Y, 2, "b"), (X, 1, "c"), (X, 1, "d")], 3, ["mode"]),
        ([(X,), (Y,), (X, 2)], 1, ["n"]),
        ([(X, {"p": 1}), (X, {"p": 2}), (X, {"p": 1, "q": 3})], 1, ["n['q']"]),
        ([(X, [1]), (X, [2]), (X, [1, 3])], 1, ["n"]),
        # It has one node less than the second trace, but twenty arrays more.
        ([([X] * 20, 1, "a"), (None, 2, "c"), ([X] * 20, 2, "b")], 1, ["n", "mode"]),
    ],
)
def test_the_closest_earlier_trace_is_compared_with(calls, compared_with, paths):
    f = eqxjit.filter_jit(lambda x, n=None, mode=None: X)
    for args in calls:
        f(*args)
    assert f.traces()[-1].compared_with == compared_with
    assert [d.path for d in f.traces()[-1].differences] == paths


@pytest.mark.parametrize(
    ("make", "old", "new"),
    [
        (lambda end: b"a" * 10**6 + end.encode(), "...aaaaaaaaaa1'", "...aaaaaaaaaa2'"),
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
    assert len(repr(f.traces()[1])) < 500


def test_another_class_of_the_same_name():
    f = eqxjit.filter_jit(lambda m: X)
    for _ in range(2):
        f(type("Net", (eqx.Module,), {})())
    [difference] = f.traces()[1].differences
    assert difference.new == "Net (a different class of that name)"


@pytest.mark.parametrize(
    ("before", "text"), [((jnp.ones(3),), "float32[3]"), ((), "absent")], ids=["array", "absent"]
)
def test_an_object_whose_text_is_that_of_what_was_there_before(before, text):
    class Named:
        def __repr__(self):
            return text

        def __eq__(self, other):
            return type(other) is Named

        def __hash__(self):
            return 0

    f = eqxjit.filter_jit(lambda *args: None)
    f(*before), f(Named())
    [difference] = f.traces()[-1].differences
    assert difference.new == text


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda n: [n] * 2_000, "2000 numbers in `many`"),
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


class Unique:
    """A class whose objects are all different."""


def test_what_changes_later_is_described_as_it_was():
    """A record describes the call that was traced, even if it is read later."""
    config, unique = [1], Unique()
    f = eqxjit.filter_jit(lambda tree: X)
    f([*range(200), Model([], config=config), unique])
    config[0] = 2
    del unique
    arguments = f.traces()[0].arguments
    assert arguments["tree[200].config[0]"] == "1"
    assert arguments["tree[201]"] == "Unique object"


# --- What JAX does by itself -------------------------------------------------------------------


@pytest.mark.parametrize("warm", [1, CALLS])
@pytest.mark.parametrize(
    ("change", "name", "values"),
    [
        (lambda: jax.enable_x64(True), "jax_enable_x64", ("False", "True")),
        (
            lambda: jax.default_matmul_precision("float32"),
            "jax_default_matmul_precision",
            ("None", "'float32'"),
        ),
        (lambda: jax.set_mesh(jax.make_mesh((1,), ("a",))), "mesh (jax.set_mesh)", None),
    ],
)
def test_a_changed_configuration(change, name, values, warm):
    counted = Counted(eqxjit.filter_jit, lambda x: x @ x)
    for context in (contextlib.nullcontext, change, contextlib.nullcontext):
        with context():
            for _ in range(warm):
                counted(X)
    assert counted.jitted.cache_info().traces == counted.traces == 2
    _, second = counted.jitted.traces()
    found = {d.path: d for d in second.differences if d.category == "configuration changed"}
    assert found[name][2:4] == (values or found[name][2:4])


@pytest.mark.parametrize("warm", [1, CALLS])
def test_cleared_and_evicted_caches(warm):
    counted = Counted(eqxjit.filter_jit, lambda x, n: x * n, maxsize=2)
    f = counted.jitted

    def call(n):
        for _ in range(warm):
            f(X, n)
        return [(d.category, d.new) for d in f.traces()[-1].differences]

    call(1)
    for clear, text in (
        (jax.clear_caches, "jax.clear_caches()"),
        (lambda: (call(2), call(3)), "more than `maxsize=2`"),
    ):
        clear()
        [(category, new)] = call(1)
        assert category == "cache evicted or cleared"
        assert text in new
    f.clear_cache()
    call(1)
    [trace] = f.traces()
    assert trace.reason == "first trace"
    assert (counted.traces, f.cache_info().traces) == (6, 1)


def test_a_static_object_changed_in_place():
    f = eqxjit.filter_jit(lambda x, named: (x, named))
    named = Own("a")
    f(X, named)
    named.value = "b"
    f(X, Own("a"))
    [difference] = f.traces()[1].differences
    assert difference.category == "cache evicted or cleared"
    assert "changed in place" in difference.new
    f(X, Own("c"))
    assert f.traces()[-1].reason == "static value changed: `named` was Own(a), is Own(c)"


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


def test_a_trace_that_fails_is_none():
    """This also holds while its error, and so its frames, are alive."""
    f = eqxjit.filter_jit(lambda x, n: x / (1 // n), max_traces=1)
    errors = []
    for _ in range(CALLS):
        with pytest.raises(ZeroDivisionError) as caught:
            f(X, 0)
        errors.append(caught.value)
    assert f.traces() == []
    f(X, 1)
    assert [(t.number, t.reason) for t in f.traces()] == [(1, "first trace")]


def test_the_persistent_cache_is_told_apart():
    # A program that no cache has.
    number = time.time() % 1
    for is_cached in (False, True):
        f = eqxjit.filter_jit(lambda x: jnp.sin(x) @ jnp.cos(x) * number)
        with eqxjit.compile_report() as report:
            f(X)
        [trace] = f.traces()
        [row] = [row for row in report.rows if row.function == trace.function]
        assert (trace.from_persistent_cache, row.persistent_cache_hits) == (is_cached, is_cached)
        jax.clear_caches()


def test_records_refer_to_nothing_of_the_users():
    f = eqxjit.filter_jit(lambda x, *statics: x, maxsize=1)
    watched = []
    for _ in range(3):
        static, function, array = type("Kind", (), {})(), lambda y: y, jnp.ones(7)
        partial = functools.partial(function)
        watched += map(weakref.ref, (type(static), static, function, partial, array))
        for _ in range(CALLS):
            f(array, static, function, partial, (static, [function]))
        del static, function, partial, array
    f(X)
    gc.collect()
    assert [ref() for ref in watched if ref() is not None] == []
    assert len(f.traces()) == 4


def test_racing_threads_count_and_number_each_trace():
    f = eqxjit.filter_jit(lambda x, n: x * n)
    race(lambda i: [f(X, n) for n in range(i, i + 3)])
    info = f.cache_info()
    assert [trace.number for trace in f.traces()] == [*range(1, info.traces + 1)]


def test_an_object_without_a_repr_is_told_apart_by_what_it_holds():
    kind = type("Mute", (Own,), {"__repr__": object.__repr__, "__hash__": lambda self: 0})
    f = eqxjit.filter_jit(lambda x, own: x * own.value)
    for value in (2, 2, 3):
        f(X, kind(value))
    [_, again] = f.traces()
    assert again.reason == "static value changed: `own.value` was 2, is 3"


# --- One trace more than `max_traces` raises what explains it ---------------------------------


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
            assert "It is compiled for" not in message
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


class Pair(NamedTuple):
    a: object
    b: object


class ReversedPair(Pair):
    def __iter__(self):
        return reversed((self[0], self[1]))


def test_the_fields_of_a_named_tuple_are_named_whatever_its_own_iteration_yields():
    f = eqxjit.filter_jit(lambda pair: 2 * pair.b)
    for pair in (ReversedPair(1, X), ReversedPair(1, Y), ReversedPair(2, Y)):
        f(pair)
    _, shape, value = [trace.reason for trace in f.traces()]
    assert "`pair.b` was float32[3], is float32[4]" in shape
    assert "`pair.a` was 1, is 2" in value
