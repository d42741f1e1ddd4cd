"""Binding: how a call's arguments become parameters, and what a wrong call raises."""

import enum
import inspect
import re
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support.helpers import Twins, assert_same, outcome
from tests.support.sides import CALLS, both

x, y, z = jnp.float32(2), jnp.float32(3), jnp.float32(5)


def defaults(a, b=10, c=20.0):
    return {"a": a, "b": b, "c": c}


def keywords(a, **kwargs):
    return {"a": a, "kwargs": kwargs}


def everything(a, b=10, /, c=20, d=30.0, *args, e, f=50, **kwargs):
    return {"a": a, "b": b, "c": c, "d": d, "args": args, "e": e, "f": f, "kwargs": kwargs}


FUNCTIONS = {
    "plain": lambda a, b: {"a": a, "b": b},
    "defaults": defaults,
    "all defaults": lambda a=1, b=2: {"a": a, "b": b},
    "positional only": lambda a, b=10, /: {"a": a, "b": b},
    "keyword only": lambda a, *, b, c=20.0: {"a": a, "b": b, "c": c},
    "variadic": lambda a, *args: {"a": a, "args": args},
    "anything": lambda *args, **kwargs: {"args": args, "kwargs": kwargs},
    "everything": everything,
    "variadic after a default": lambda a=1, *args, b=2: {"a": a, "args": args, "b": b},
    "nothing": lambda: (),
}

ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((x,), {}),
    ((x, y), {}),
    ((x, 1), {}),
    ((x, y, z, 1, 2), {}),
    ((x,), {"b": y}),
    ((x,), {"c": y, "b": z}),
    ((x, y), {"c": z}),
    ((x, y), {"b": z}),
    ((), {"b": y, "a": x}),
    ((), {"b": y, "c": z}),
    ((x,), {"e": y}),
    ((x, y), {"e": z, "d": 1}),
    ((x, y, z, 1, 2, y), {"e": 2, "f": x, "g": y, "aa": z}),
    ((x,), {"a": 1, "e": y}),
    ((x,), {"self": y}),
    ((), {"args": x, "kwargs": y}),
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_call_binds_as_upstream_and_as_python(name):
    fun = FUNCTIONS[name]
    twins = Twins(fun)
    accepted = 0
    for _ in range(CALLS):
        for args, kwargs in ARGUMENTS:
            expected = outcome(fun, *args, **kwargs)
            ours = outcome(twins.ours, *args, **kwargs)
            theirs = outcome(twins.upstream, *args, **kwargs)
            if isinstance(expected, TypeError):
                assert type(ours) is type(theirs) is TypeError
                assert str(expected) in str(ours)
            else:
                assert_same(ours, expected)
                assert_same(theirs, expected)
                accepted += 1
    assert accepted
    assert twins.ours.traces == twins.upstream.traces


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f(), "scale() missing 1 required positional argument: 'model'"),
        (lambda f: f(x), "scale() missing 1 required keyword-only argument: 'by'"),
        (lambda f: f(x, bye=1), "scale() got an unexpected keyword argument 'bye'"),
        (lambda f: f(x, y, by=1), "scale() takes 1 positional argument but 2"),
        (lambda f: f(x, by=1, model=x), "scale() got multiple values for argument 'model'"),
    ],
)
def test_arity_errors_name_the_users_function_and_parameter(call, message):
    def scale(model, *, by):
        return model * by

    scale.__qualname__ = "scale"
    jitted = eqxjit.filter_jit(scale)
    for _ in range(CALLS):
        with pytest.raises(TypeError, match=re.escape(message)):
            call(jitted)
        assert jitted(x, by=2) == 4  # the next good call works, from the first to a warm one
    with pytest.raises(TypeError):
        call(eqx.filter_jit(scale))


def test_which_calls_are_the_same():
    """Calls with keywords in a different order share a program. Defaults aren't filled in."""
    for fun, calls, traces in [
        (defaults, [((x, y), {}), ((x,), {"b": y}), ((), {"b": y, "a": x})], 1),
        (defaults, [((x,), {}), ((x, 10), {}), ((x, 10, 20.0), {})], 3),
        (keywords, [((x,), {"one": y, "two": z}), ((x,), {"two": z, "one": y})], 1),
    ]:
        twins = Twins(fun)
        for args, kwargs in calls * CALLS:
            for f in (twins.ours, twins.upstream):
                assert_same(f(*args, **kwargs), fun(*args, **kwargs))
        assert (twins.ours.traces, twins.upstream.traces) == (traces, traces)
        assert twins.ours.jitted.cache_info().entries == traces


@both
def test_an_array_as_default_is_a_constant_of_the_program(filter_jit):
    """It is never an argument of the jitted function, and so it isn't donated either."""
    default = jnp.arange(3.0)
    f = filter_jit(lambda x, scale=default: (x * scale, scale is default), donate="all")
    for _ in range(CALLS):
        assert_same(f(jnp.full(3, 2.0)), (2 * default, True))
    assert not default.is_deleted()


# --- Callables --------------------------------------------------------------------------------


def test_a_callable_without_a_signature_works():
    """Equinox can't wrap such a callable."""
    for fun, args, kwargs in [(max, (3, 1, 2), {}), (dict, ({"k": x},), {"a": y, "b": 1})]:
        with pytest.raises(ValueError, match="signature"):
            eqx.filter_jit(fun)
        jitted = eqxjit.filter_jit(fun)
        for _ in range(CALLS):
            assert jitted(*args, **kwargs) == fun(*args, **kwargs)
        assert repr(jitted)


def test_a_signature_set_by_hand_is_the_one_that_counts():
    def f(*args, **kwargs):
        return args, kwargs

    parameter = inspect.Parameter
    f.__signature__ = inspect.Signature(
        [
            parameter("first", parameter.POSITIONAL_OR_KEYWORD),
            parameter("second", parameter.POSITIONAL_OR_KEYWORD, default=3),
        ]
    )
    twins = Twins(f)
    assert_same(twins(x, second=y), ((x, y), {}))
    assert_same(twins(first=x), ((x,), {}))
    for jitted in (twins.ours, twins.upstream):
        with pytest.raises(TypeError):
            jitted(x, y, z)


def test_more_than_255_arguments():
    names = [f"p{i}" for i in range(300)]
    namespace: dict[str, Any] = {}
    exec(f"def f({', '.join(names)}):\n    return [{', '.join(names)}]", namespace)
    jitted = eqxjit.filter_jit(namespace["f"])
    values = [np.float32(i) if i % 2 else i for i in range(300)]
    for _ in range(CALLS):
        assert jitted(*values) == values
        assert jitted(**dict(zip(names, values, strict=True))) == values
    assert jitted.cache_info().entries == 1


class Key(enum.StrEnum):
    FIRST = "first"
    SECOND = "second"


def test_names_of_a_class_derived_from_str():
    jitted = eqxjit.filter_jit(keywords)
    for _ in range(CALLS):
        assert_same(jitted(x, first=y, second=1), keywords(x, first=y, second=1))
        for n in (1, 2):
            found = jitted(x, **{Key.SECOND: n, Key.FIRST: y})
            assert_same(found, keywords(x, **{Key.FIRST: y, Key.SECOND: n}))
            assert [*map(type, found["kwargs"])] == [Key, Key]
