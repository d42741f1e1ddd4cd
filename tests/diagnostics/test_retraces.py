"""Each trace is seen and explained: `traces()`, `explain_retraces`, and the reasons they give."""

import collections
import contextlib
import dataclasses
import functools
import gc
import logging
import pathlib
import re
import sys
import types
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxjit
from tests.support import nodes
from tests.support.helpers import Counted, Own
from tests.support.places import JAX_FILES, shown
from tests.support.processes import run
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
    def __repr__(self):
        raise RuntimeError("no text")


def model(**changed):
    fields = {"weight": X, "bias": Y, "activation": jnp.tanh, **changed}
    return Model([Layer(X, Y, jax.nn.relu), Layer(**fields)])


# --- Reasons ----------------------------------------------------------------------------------


WAS_AND_IS = [
    ({"x": X}, {"x": Y}, ["shape: `x` was float32[3], is float32[4]"]),
    ({"x": X}, {"x": X[None]}, ["shape: `x` was float32[3], is float32[1,3]"]),
    ({"x": X}, {"x": np.float32(2)}, ["shape: `x` was float32[3], is float32[]"]),
    ({"x": np.ones(3)}, {"x": Y}, ["shape: `x` was float32[3], is float32[4]"]),
    ({"x": X}, {"x": X.astype(int)}, ["dtype: `x` was float32, is int32"]),
    (
        {"x": jnp.asarray(1.0)},
        {"x": jnp.float32(1)},
        ["weak type: `x` was float32 of weak type, is float32"],
    ),
    ({"x": X, "n": 1}, {"x": X, "n": 2}, ["static value changed: `n` was 1, is 2"]),
    ({"n": 1}, {"n": True}, ["static value changed: `n` was 1, is True"]),
    ({"n": 0.0}, {"n": -0.0}, ["static value changed: `n` was 0.0, is -0.0"]),
    ({"n": 1}, {"n": "1"}, ["static value changed: `n` was 1, is '1'"]),
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
        {"d": collections.OrderedDict(a=X, b=X)},
        {"d": collections.OrderedDict(b=X, a=X)},
        ["structure changed: `d` was OrderedDict, is OrderedDict with its keys in another order"],
    ),
    (
        {"m": model()},
        {"m": model(weight=Y)},
        ["shape: `m.layers[1].weight` was float32[3], is float32[4]"],
    ),
    (
        {"m": model()},
        {"m": model(bias=None)},
        ["structure changed: `m.layers[1].bias` was float32[4], is None"],
    ),
    (
        {"m": model()},
        {"m": model(activation=jnp.sinh)},
        ["static value changed: `m.layers[1].activation` was tanh, is sinh"],
    ),
    (
        {"m": model()},
        {"m": model(size=5)},
        ["static value changed: `m.layers[1].size` was 3, is 5"],
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
        {"m": Model([], {"a": 1, "b": {2: 3}})},
        {"m": Model([], {"b": {2: 3}, "a": 1})},
        ["structure changed: `m.config` was dict, is dict with its keys in another order"],
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
        ["structure changed: `p` was Record with metadata ('a',), is Record with metadata ('b',)"],
    ),
    (
        {"t": {str(i): X for i in range(9)}},
        {"t": {str(i): Y for i in range(9)}},
        [f"shape: `t['{i}']` was float32[3], is float32[4]" for i in range(9)],
    ),
    ({"x": X}, {"x": X, "n": 1}, ["argument newly passed or left out: `n` was absent, is 1"]),
    ({}, {"x": X}, ["argument newly passed or left out: `x` was absent, is float32[3]"]),
    (
        {"x": Unprintable()},
        {"x": Unprintable()},
        ["static value changed: `x` is another Unprintable object"],
    ),
]


@pytest.mark.parametrize(("old", "new", "expected"), WAS_AND_IS)
def test_a_difference_has_its_category_and_path(old, new, expected):
    """Whether calls are cold or warm."""
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
    assert f.traces()[1].differences[0][:4] == ("static value changed", "rest[1]", "3", "5")


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
        # Of those that are as close, the latest.
        ([(X, 1, "a"), (Y, 2, "b"), (X, 1, "c"), (X, 1, "d")], 3, ["mode"]),
        ([(X,), (Y,), (X, 2)], 1, ["n"]),
        ([(X, {"p": 1}), (X, {"p": 2}), (X, {"p": 1, "q": 3})], 1, ["n['q']"]),
        ([(X, [1]), (X, [2]), (X, [1, 3])], 1, ["n"]),
        # One node less than the second, but twenty arrays more.
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
    assert difference.new == "Net (another class of that name)"


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
        (lambda: (call(2), call(3)), "raise `maxsize`"),
        (f.clear_cache, "clear_cache"),
    ):
        clear()
        [(category, new)] = call(1)
        assert category == "cache evicted or cleared"
        assert text in new
    # It is compared with, but its number may be another trace's.
    [trace] = f.traces()
    assert trace.compared_with is None
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


def test_nested_functions_are_traces_of_their_own():
    inner = eqxjit.filter_jit(lambda x: jnp.sin(x))
    outer = eqxjit.filter_jit(lambda x: inner(x).sum() + inner(x[1:]))
    for _ in range(CALLS):
        outer(X)
    assert [t.reason for t in inner.traces()][1].startswith("shape: `x` was float32[3]")
    [trace] = outer.traces()
    assert 0 < sum(t.seconds.tracing for t in inner.traces()) <= trace.seconds.tracing
    assert inner.traces()[0].seconds.compiling == 0 < trace.seconds.compiling
    assert {t.call_site.filename for t in (trace, *inner.traces())} == {__file__}


def test_transformations_trace_and_compile_too():
    counted = Counted(eqxjit.filter_jit, lambda x: (x**2).sum())
    f = counted.jitted
    for _ in range(2):
        f(X)
        jax.grad(f)(X)
        jax.vmap(f)(X[None])
    assert counted.traces == f.cache_info().traces == len(f.traces()) == 1


def test_a_trace_that_fails_is_none():
    """Also while its error, and by it its frames, are alive."""
    f = eqxjit.filter_jit(lambda x, n: x / (1 // n), max_traces=1)
    errors = []
    for _ in range(CALLS):
        with pytest.raises(ZeroDivisionError) as caught:
            f(X, 0)
        errors.append(caught.value)
    assert f.traces() == []
    f(X, 1)
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


def test_other_functions_of_one_code_are_not_defined_again(caplog):
    def decorated(fun):
        return eqxjit.filter_jit(functools.wraps(fun)(lambda *args: fun(*args)))

    def unnamed(fun):
        return eqxjit.filter_jit(lambda x: fun(x))

    def shared(x):
        return x

    functions = [
        eqxjit.filter_jit(jax.grad(lambda x: x.sum())),
        eqxjit.filter_jit(jax.grad(lambda x: (x**2).sum())),
        eqxjit.filter_jit(jax.vmap(lambda x: x + 1)),
        decorated(lambda x: x * 2),
        decorated(lambda x: x * 3),
        unnamed(jnp.sin),
        unnamed(lambda x: x * 4),
        *(eqxjit.filter_jit(lambda x: x * 6), eqxjit.filter_jit(lambda x: x * 7)),
        # The same, wrapped again.
        *(eqxjit.filter_jit(shared, **options) for options in ({}, {"inline": True})),
    ]
    with eqxjit.explain_retraces():
        for f in functions:
            f(X)
            assert [t.reason for t in f.traces()] == ["first trace"]
    assert caplog.messages == []


def test_explanations_are_switched_on_and_off(caplog):
    f = eqxjit.filter_jit(lambda x, n: x)
    f(X, 0)

    def is_logged():
        caplog.clear()
        f(X, f.cache_info().traces)
        # Beside that of a storm.
        return any("traced again" in message for message in caplog.messages)

    try:
        eqxjit.explain_retraces()
        assert is_logged()
        with eqxjit.explain_retraces(False):
            assert not is_logged()
            with eqxjit.explain_retraces():
                assert is_logged()
            assert not is_logged()
        assert is_logged()
    finally:
        eqxjit.explain_retraces(False)
    assert not is_logged()
    assert eqxjit.explain_retraces()(is_logged)()
    assert not is_logged()
    explaining = eqxjit.explain_retraces()
    for _ in range(2):
        with explaining:
            assert is_logged()
        assert not is_logged()
    # They may overlap.
    one, two = eqxjit.explain_retraces(), eqxjit.explain_retraces()
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert is_logged()
    two.__exit__(None, None, None)
    assert not is_logged()


@pytest.mark.parametrize("wrong", ["yes", None, 1, 0, identity])
def test_a_switch_is_on_or_off(wrong, caplog):
    with pytest.raises(TypeError, match=r"`on` is True or False"):
        eqxjit.explain_retraces(wrong)
    f = eqxjit.filter_jit(lambda x, n: x)
    f(X, 1), f(X, 2)
    assert caplog.messages == []


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


def test_the_limit_is_per_function_and_options():
    def fun(x, n):
        return x

    one, other = eqxjit.filter_jit(fun, max_traces=1), eqxjit.filter_jit(fun)
    for n in range(5):
        other(X, n)
    one(X, 1)
    with pytest.raises(eqxjit.TooManyTracesError, match="may be traced once"):
        one(X, 2)


# --- Storms -----------------------------------------------------------------------------------


@pytest.fixture
def messages():
    """What was logged so far."""
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("eqxjit").addHandler(handler)
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


class ScaleBy(eqx.Module):
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
FAMILIES = ("partials", "methods", "Modules")
STORMS = {
    "statics": (
        one(lambda i: (X, i, str(i)), lambda x, n, mode: x),
        [
            "static value changed: `n` was 9, is 10",
            "static value changed: `mode` was '9', is '10'",
        ],
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
        anew(lambda i: lambda x, i=[i]: x * i[0]),
        [f"{AGAIN} function made of the same code ({HERE}:"],
    ),
    "closures": (
        anew(lambda i: lambda x: x * i),
        [f"{AGAIN} function made of the same code ({HERE}:"],
    ),
    "partials": (
        anew(lambda i: functools.partial(multiply, i)),
        ["another callable: `i` was 9, is 10"],
    ),
    "methods": (
        anew(lambda i: Stepper().step),
        ["another callable: `Stepper.step` of another `Stepper`"],
    ),
    "Modules": (anew(ScaleBy), ["another callable: `by` was 9, is 10"]),
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
    call = make()
    for i in range(10):
        call(i)
    assert messages == []
    for i in range(10, 22):
        call(i)
    [message] = messages
    start, *causes, end = message.splitlines()
    place = re.escape(HERE)
    assert re.match(rf"`.*` was traced 10 times in a row, last for the call at {place}:\d+:", start)
    assert "Ignore this if you expect only a few more" in end
    for cause in expected:
        assert any(cause in line and "the last time: " in line for line in causes), message
    # Nor for other functions that are defined at the same place, where that is the cause.
    call = make()
    for i in range(12):
        call(i)
    assert len(messages) == (
        1 if "another " in expected[0] and make is not STORMS["activations"][0] else 2
    )


def test_causes_are_counted(messages):
    f = eqxjit.filter_jit(lambda x, n, **kwargs: x)
    for i in range(4):
        f(X, i, **{f"n{k}": i for k in range(50)})
    for i in range(20, 27):
        f(jnp.ones(i), 3, **{f"n{k}": 3 for k in range(50)})
    [message] = messages
    assert re.search(
        r"- 7 times, the last time: shape: `x` was float32\[25\], is .*\[26\]\n", message
    )
    assert "- 3 times, the last time: static value changed: `n` was 2, is 3\n" in message
    assert message.count("pad it") == message.count("pass `jnp.asarray(n, ") == 1
    # Many are cut short.
    assert message.count("the last time:") == 4
    assert "and 48 more" in message
    # It is logged once.
    f.clear_cache()
    for i in range(12):
        f(X, i)
    assert messages == [message]


def test_what_is_no_storm(messages):
    f = eqxjit.filter_jit(lambda x, n: x)
    for n in [0] * 40 + [*range(10)]:
        f(X, n)
    # What fails isn't traced.
    g = eqxjit.filter_jit(lambda x, n: 1 / 0)
    for n in range(20):
        with pytest.raises(ZeroDivisionError):
            g(X, n)
    # On purpose, ahead of time.
    frozen = eqxjit.freeze(lambda x: x)
    for n in range(20):
        f.lower(X, n).compile()
        frozen.lower(jnp.ones(n))
    # Parts of an outer program.
    inner = eqxjit.filter_jit(lambda x, n: x * n)
    eqxjit.filter_jit(lambda x: [inner(x, n) for n in range(20)])(X)
    jax.jit(lambda x: [inner(x, n) for n in range(20, 40)])(X)
    # Lines of a session, of which each is another.
    for i in range(20):
        code = compile(f"lambda x: x * {i}", "<stdin>", "eval")
        eqxjit.filter_jit(eval(code))(X)
    assert messages == []


def test_eager_transformations_are_counted(messages):
    f = eqxjit.filter_jit(lambda x, n: (x * n).sum())
    for n in range(20):
        jax.grad(f)(X, n)
    [message] = messages
    assert "static value changed: `n` was" in message


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
