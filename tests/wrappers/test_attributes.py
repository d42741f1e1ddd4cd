"""The public surface: how a function is wrapped, its options, and what the wrapper offers."""

import collections
import functools
import inspect
import pydoc
import re
import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from tests.support.callables import Model, documented, every_callable
from tests.support.callables import X as x
from tests.support.helpers import assert_same, warm
from tests.support.sides import CALLS, both
from tests.support.threads import THREADS, race

# --- How a function is wrapped ----------------------------------------------------------------


@both
def test_the_forms_of_the_decorator(filter_jit):
    def function(x):
        return 2 * x

    decorate = filter_jit(donate="none")
    for f in [
        filter_jit(function),
        filter_jit(fun=function),
        filter_jit()(function),
        filter_jit(function, donate="none"),
        decorate(function),
        decorate(lambda x: 2 * x),
        functools.partial(filter_jit, inline=True)(function),
    ]:
        assert type(f) is type(filter_jit(function))
        assert_same(warm(f, x), 2 * x)
    with pytest.raises(TypeError):
        filter_jit(function, "none")


# --- Options ----------------------------------------------------------------------------------


OF_JIT = ["static_argnums", "static_argnames", "donate_argnums", "in_shardings", "out_shardings"]

BAD_OPTIONS = {
    "donate": ["ALL", "", None, True, 1, ("all",), ["all"]],
    "block": ["a", None, (), 2],
    **{option: [0, -1, 1.5, "3", True, (3,)] for option in ("maxsize", "max_traces")},
    # `filter_jit` sets these options itself.
    **{option: [0, None, "x"] for option in OF_JIT},
}


@pytest.mark.parametrize("option", BAD_OPTIONS)
def test_bad_options_are_refused_by_name(option):
    is_ours = option in ("block", "maxsize", "max_traces")
    for wrap in [eqxjit.filter_jit] if is_ours else [eqxjit.filter_jit, eqx.filter_jit]:
        for value in BAD_OPTIONS[option]:
            for positional in ((), (documented,)):
                with pytest.raises((TypeError, ValueError), match=option):
                    wrap(*positional, **{option: value})(documented)


INSTEAD = {
    "static_argnums": "static",
    "static_argnames": "static",
    "donate_argnums": "donate=",
    "donate_argnames": "donate=",
    "in_shardings": "jax.device_put",
    "out_shardings": "eqx.filter_shard",
}


@pytest.mark.parametrize("option", INSTEAD)
def test_an_option_that_is_decided_is_answered_for_alone(option):
    with pytest.raises(ValueError, match=rf"^`filter_jit` can't take `{option}`\. ") as raised:
        eqxjit.filter_jit(documented, **{option: 0})
    for text in {*INSTEAD.values()}:
        assert (text in str(raised.value)) == (text == INSTEAD[option])


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("max_trace", "Did you mean `max_traces`? "),
        ("inlined", "Did you mean `inline`? "),
        ("zzz", ""),
    ],
)
def test_an_unknown_option_is_said_to_be_ours(option, hint):
    with pytest.raises(TypeError) as raised:
        eqxjit.filter_jit(inline=True, **{option: 1})
    start = f"filter_jit() got an unexpected keyword argument '{option}'. {hint}It takes `donate`"
    assert str(raised.value).startswith(start)


@both
def test_an_unknown_option_is_named(filter_jit):
    for wrap in (filter_jit, lambda fun, **options: filter_jit(**options)(fun)):
        with pytest.raises(TypeError, match="max_trace"):
            wrap(documented, inline=True, max_trace=1)


# --- Arguments of `jax.jit` are passed on -----------------------------------------------------


@both
def test_inline_and_keep_unused_are_passed_on(filter_jit):
    def lowered(**options):
        f = filter_jit(lambda x, unused: jnp.sin(x) + 1, **options)
        return jax.jit(lambda x: f(x, jnp.ones((7, 7)))).lower(x).as_text()

    assert lowered(inline=True).count(" call @") == 0
    assert lowered(inline=False).count(" call @") == lowered().count(" call @") == 1
    f = filter_jit(lambda x, unused: x, keep_unused=True)
    assert "7x7" in f.lower(x, jnp.ones((7, 7))).as_text()
    assert "7x7" not in filter_jit(lambda x, unused: x).lower(x, jnp.ones((7, 7))).as_text()


@both
def test_compiler_options_are_passed_on(filter_jit):
    f = filter_jit(lambda x: 2 * x, compiler_options={"xla_cpu_enable_fast_math": True})
    assert_same(warm(f, x), 2 * x)
    with pytest.raises(Exception, match="xla_no_such_option"):
        filter_jit(lambda x: x, compiler_options={"xla_no_such_option": True})(x)


# --- What the wrapper takes over --------------------------------------------------------------


@every_callable
def test_a_wrapper_looks_like_its_function(fun):
    ours, upstream = eqxjit.filter_jit(fun), eqx.filter_jit(fun)
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
        expected = getattr(fun, attribute, None)
        assert getattr(ours, attribute, None) == expected
        # If the function lacks the attribute, Equinox shows its wrapper's own, or a placeholder.
        assert not isinstance(expected, str) or getattr(upstream, attribute) == expected
    signature = inspect.signature(ours)
    assert signature == inspect.signature(upstream) == inspect.signature(fun)
    assert_same(ours.__wrapped__, fun)
    assert_same(upstream.__wrapped__, fun)
    assert ours.__wrapped__ is fun or not inspect.isfunction(fun)
    assert repr(ours).startswith("filter_jit(")


@both
def test_introspection(filter_jit):
    f = filter_jit(documented)
    assert callable(f)
    assert f
    assert f.__annotations__ == documented.__annotations__
    assert typing.get_type_hints(f) == typing.get_type_hints(documented)
    assert inspect.unwrap(f) is documented
    assert inspect.getsource(f) == inspect.getsource(documented)
    assert "Scales." in pydoc.render_doc(f)
    assert inspect.getdoc(f) == "Scales."
    assert not inspect.iscoroutinefunction(f)
    assert not getattr(f, "__isabstractmethod__", False)
    for thing in (f, Model(x).step):
        with pytest.raises(AttributeError, match="no_such_attribute"):
            _ = thing.no_such_attribute
    wrapper = functools.wraps(f)(lambda *args: f(*args))
    assert inspect.signature(wrapper) == inspect.signature(documented)


class Shy:
    @eqxjit.filter_jit
    def step(self):
        return 1

    def __repr__(self):
        raise ZeroDivisionError


MLP = eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0))


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda: eqxjit.filter_jit(documented, donate="none"), r"filter_jit\(documented\)"),
        (lambda: eqxjit.filter_jit(Model(x)), r"filter_jit\(Model\(.*weight=f32\[3\].*\)\)"),
        (lambda: eqxjit.filter_jit(MLP), r"filter_jit\(MLP\( layers=\( Linear\(.{1,60}"),
        (lambda: Shy().step, r"<bound filter_jit\(Shy.step\) of Shy object>"),
    ],
)
def test_the_repr_is_one_short_line(make, pattern):
    assert re.fullmatch(pattern, repr(make()))


# --- The cache --------------------------------------------------------------------------------


def test_cache_info():
    """It returns a named tuple, like `functools.lru_cache`."""
    f = eqxjit.filter_jit(lambda x, n: x * n)
    info = f.cache_info()
    assert info == (0, 0, 1024, 0)
    assert info == eqxjit.types.CacheInfo(entries=0, traces=0, maxsize=1024)
    assert info._fields == ("entries", "traces", "maxsize", "hits")
    for args in ((x, 2), (x, 3), (jnp.ones(7), 3)):
        for _ in range(CALLS):
            f(*args)
    n_hits = 3 * (CALLS - 1)
    assert f.cache_info() == (2, 3, 1024, n_hits)
    shown = f"CacheInfo(entries=2, traces=3, maxsize=1024, hits={n_hits})"
    assert repr(f.cache_info()) == shown
    # Only the outer function's trace calls it.
    outer = jax.jit(lambda x: f(x, 2) + f(x, 2))
    for _ in range(CALLS):
        outer(x)
    race(lambda _: [f(x, 2) for _ in range(200)])
    assert f.cache_info() == (2, 3, 1024, n_hits + 2 + 200 * THREADS)
    f.clear_cache()
    assert f.cache_info() == (0, 0, 1024, 0)


def test_what_is_no_hit():
    f = eqxjit.filter_jit(lambda x: eqx.error_if(x, x[0] < 0, "negative"))
    for i in range(1, CALLS):
        f(x)
        with pytest.raises(Exception, match="negative"):
            f(-x)
        f.lower(x).compile()(x)
        assert f.cache_info().hits == i - 1
    jax.clear_caches()
    f(x)
    assert (f.cache_info().hits, f.cache_info().traces) == (CALLS - 2, 2)


# --- What tools read of functions they read of jitted ones ------------------------------------


class Shape(eqx.Module):
    side: jax.Array

    @eqxjit.filter_jit
    def area(self, scale: "float" = 1.0) -> "jax.Array":
        """The area."""
        return self.side**2 * scale

    def diagonal(self):
        return self.side * 2**0.5


def plain(x: "Shape", n: int = 2) -> "Shape":
    return x


@pytest.mark.parametrize(
    "name", ["__closure__", "__code__", "__defaults__", "__globals__", "__kwdefaults__"]
)
def test_attributes_of_python_functions(name):
    assert getattr(eqxjit.filter_jit(plain), name) is getattr(plain, name)
    with pytest.raises(AttributeError):
        getattr(eqxjit.filter_jit(eqx.nn.Identity()), name)
    with pytest.raises(AttributeError):
        getattr(eqxjit.filter_jit(max), name)


def test_a_bound_function():
    shape = Shape(jnp.ones(()))
    bound, fun = shape.area, Shape.area.__wrapped__
    texts = bound.__name__, bound.__qualname__, bound.__doc__
    assert texts == ("area", "Shape.area", "The area.")
    assert bound.__self__ is shape
    assert bound.__func__ is Shape.area
    assert bound.__code__ is fun.__code__
    assert typing.get_type_hints(bound) == {"scale": float, "return": jax.Array}
    assert typing.get_type_hints(eqxjit.filter_jit(plain))["x"] is Shape
    assert [*inspect.signature(bound).parameters] == ["scale"]
    assert inspect.getdoc(bound) == "The area."
    assert "The area." in pydoc.plain(pydoc.render_doc(bound))


def test_a_method_that_is_wrapped():
    shape, counter = Shape(jnp.ones(())), collections.Counter()
    for method in (shape.diagonal, counter.most_common):
        wrapped = eqxjit.filter_jit(method)
        assert wrapped.__func__ is method.__func__
        assert type(wrapped.__self__) is type(method.__self__)
    assert eqxjit.filter_jit(counter.most_common).__self__ is counter
    assert not hasattr(eqxjit.filter_jit(plain), "__self__")


def test_what_cannot_be_hashed_says_what_helps():
    shape = Shape(jnp.ones(()))
    for fun in (shape.area, eqxjit.filter_jit(eqx.Partial(plain, x))):
        with pytest.raises(TypeError, match="Pass a lambda that calls it"):
            hash(fun)
    with pytest.raises(TypeError, match="Pass a lambda that calls it"):
        jax.lax.switch(0, [shape.area, shape.area])
    assert jax.lax.switch(0, [lambda: shape.area(), lambda: shape.area()]) == 1
