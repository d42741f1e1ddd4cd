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
from tests.support.helpers import Counted, Twins, assert_same, outcome
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
    "only keyword only": lambda *, b, c=20.0: {"b": b, "c": c},
    "variadic": lambda a, *args: {"a": a, "args": args},
    "keywords": keywords,
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
    ((x, y, z), {}),
    ((x, y, z, 1, 2), {}),
    ((x,), {"b": y}),
    ((x,), {"b": 1}),
    ((x,), {"c": y}),
    ((x,), {"c": y, "b": z}),
    ((x, y), {"c": z}),
    ((x, y), {"b": z}),
    ((), {"a": x, "b": y}),
    ((), {"b": y, "a": x}),
    ((), {"b": y}),
    ((), {"b": y, "c": z}),
    ((x,), {"e": y}),
    ((x, y), {"e": z, "d": 1}),
    ((x, y, z, 1), {"e": 2, "f": x, "g": y}),
    ((x, y, z, 1, 2, y), {"e": 2, "f": x, "g": y, "aa": z}),
    ((x,), {"a": 1, "e": y}),
    ((x,), {"zz": y, "aa": 1}),
    ((x,), {"self": y}),
    ((), {"args": x, "kwargs": y}),
    ((), {}),
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


def test_arity_errors_of_a_module_name_its_call():
    class Model(eqx.Module):
        def __call__(self, x):
            return x

    jitted = eqxjit.filter_jit(Model())
    for _ in range(CALLS):
        with pytest.raises(TypeError, match=r"takes 1 positional argument but 2|takes 2 .* but 3"):
            jitted(x, y)


# --- Which calls are the same -----------------------------------------------------------------


def test_a_positional_argument_may_be_passed_by_name():
    """`f(x, y=1)` is `f(x, 1)`: one entry, one trace."""
    twins = Twins(defaults)
    for _ in range(CALLS):
        for f in (twins.ours, twins.upstream):
            results = [f(x, y), f(x, b=y), f(a=x, b=y), f(b=y, a=x)]
            for result in results:
                assert_same(result, {"a": x, "b": y, "c": 20.0})
    assert (twins.ours.traces, twins.upstream.traces) == (1, 1)
    assert twins.ours.jitted.cache_info().entries == 1


def test_keyword_arguments_in_another_order_are_the_same():
    twins = Twins(keywords)
    for _ in range(CALLS):
        for f in (twins.ours, twins.upstream):
            assert_same(f(x, one=y, two=z), keywords(x, one=y, two=z))
            assert_same(f(x, two=z, one=y), keywords(x, one=y, two=z))
    assert (twins.ours.traces, twins.upstream.traces) == (1, 1)


def test_the_function_gets_its_keyword_arguments_in_one_order():
    """The order in which a function sees `**kwargs` is JAX's, for both: sorted."""
    twins = Twins(lambda **kwargs: list(kwargs))
    assert twins(b=x, a=y, c=1) == ["a", "b", "c"]


def test_defaults_are_not_filled_in():
    """`f(x)` and `f(x, 10)` are two calls, and the function fills in its own default."""
    twins = Twins(defaults)
    for _ in range(CALLS):
        for f in (twins.ours, twins.upstream):
            assert_same(f(x), {"a": x, "b": 10, "c": 20.0})
            assert_same(f(x, 10), {"a": x, "b": 10, "c": 20.0})
            assert_same(f(x, 10, 20.0), {"a": x, "b": 10, "c": 20.0})
    assert (twins.ours.traces, twins.upstream.traces) == (3, 3)


@both
def test_an_array_as_default_is_a_constant_of_the_program(filter_jit):
    """It is never an argument of the jitted function, and so it isn't donated either."""
    default = jnp.arange(3.0)

    @filter_jit
    def f(x, scale=default):
        assert scale is default
        return x * scale

    for i in range(CALLS):
        assert_same(f(jnp.float32(i)), i * default)
    donating = filter_jit(lambda x, scale=default: x * scale, donate="all")
    for _ in range(CALLS):
        assert_same(donating(jnp.full(3, 2.0)), 2 * default)
    assert not default.is_deleted()


@both
def test_a_default_that_can_not_be_hashed(filter_jit):
    f = filter_jit(lambda x, options={"a": [1]}, *, more=[2]: (x, len(options), len(more)))
    for _ in range(CALLS):
        assert_same(f(x), (x, 1, 1))


def test_the_sentinel_of_an_absent_argument_is_no_secret_value():
    """Any value can be passed for an optional parameter, `inspect.Parameter.empty` too."""
    twins = Twins(lambda x, option=None: (x, repr(option)))
    for value in (None, ..., inspect.Parameter.empty, NotImplemented, (), "absent"):
        twins(x, value)
        twins(x, option=value)
    twins(x)


# --- Callables --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (max, (3, 1, 2)),
        (max, ((1, 5),)),
        (getattr, ("abc", "missing", 7)),
        (dict, ()),
        (type, (1,)),
        (vars, (int,)),
    ],
    ids=repr,
)
def test_a_callable_without_a_signature_works(fun, args):
    """Upstream can't wrap it."""
    with pytest.raises(ValueError, match="signature"):
        eqx.filter_jit(fun)
    jitted = eqxjit.filter_jit(fun)
    for _ in range(CALLS):
        assert jitted(*args) == fun(*args)
    assert repr(jitted)


def test_a_callable_without_a_signature_gets_arrays_and_keywords():
    jitted = eqxjit.filter_jit(dict)
    for i in range(CALLS):
        value = jnp.arange(3.0) + i
        assert_same(jitted(a=value, b=1), {"a": value, "b": 1})
        assert_same(jitted({"k": value}, c=i), {"k": value, "c": i})
    with pytest.raises(TypeError):
        jitted(1, 2, 3)


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


def test_a_mutable_default_belongs_to_the_function():
    """As without `filter_jit`, a trace may change it; calls that aren't traced don't."""
    for filter_jit in (eqx.filter_jit, eqxjit.filter_jit):

        def f(x, seen=[]):  # noqa: B006
            seen.append(1)
            return x, len(seen)

        jitted = Counted(filter_jit, f)
        assert [jitted(x)[1] for _ in range(CALLS)] == [1] * CALLS
        assert [jitted(y.astype(int))[1] for _ in range(CALLS)] == [2] * CALLS


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
        for n in (1, 2):
            found = jitted(x, **{Key.SECOND: n, Key.FIRST: y})
            assert_same(found, keywords(x, **{Key.FIRST: y, Key.SECOND: n}))
            assert [*map(type, found["kwargs"])] == [Key, Key]
    assert [t.summary.rpartition(", ")[2] for t in jitted.traces()] == ["second=1", "second=2"]
    assert_same(jitted(x, first=y, second=1), keywords(x, first=y, second=1))
