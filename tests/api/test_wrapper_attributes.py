"""The public surface: how a function is wrapped, its options, and what the wrapper offers."""

import functools
import inspect
import operator
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
from tests.support.threads import race

# --- How a function is wrapped ----------------------------------------------------------------


def test_both_names_are_one_object():
    assert eqxjit.fast_filter_jit is eqxjit.filter_jit
    assert {"filter_jit", "fast_filter_jit", "currently_jitting"} <= set(eqxjit.__all__)
    assert all(hasattr(eqxjit, name) for name in eqxjit.__all__)


@both
def test_the_forms_of_the_decorator(filter_jit):
    @filter_jit
    def bare(x):
        return 2 * x

    @filter_jit(donate="none")
    def with_options(x):
        return 2 * x

    @filter_jit()
    def without_options(x):
        return 2 * x

    def function(x):
        return 2 * x

    for f in [
        bare,
        with_options,
        without_options,
        filter_jit(function),
        filter_jit(fun=function),
        filter_jit(function, donate="none"),
        filter_jit(function, inline=True),
        filter_jit(inline=True, donate="none")(function),
        functools.partial(filter_jit, donate="none")(function),
    ]:
        assert type(f) is type(bare)
        assert_same(warm(f, x), 2 * x)


def test_a_decorator_serves_several_functions():
    decorate = eqxjit.filter_jit(donate="none")
    double, triple = decorate(lambda x: 2 * x), decorate(lambda x: 3 * x)
    for _ in range(CALLS):
        assert_same((double(x), triple(x)), (2 * x, 3 * x))


@both
def test_options_are_keyword_only(filter_jit):
    with pytest.raises(TypeError):
        filter_jit(documented, "none")


# --- Options ----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("donate", ["ALL", "first", "", None, True, False, 1, ("all",), ["all"]])
def test_other_values_of_donate_are_refused(filter_jit, donate):
    with pytest.raises(ValueError, match="donate"):
        filter_jit(documented, donate=donate)
    with pytest.raises(ValueError, match="donate"):
        filter_jit(donate=donate)(documented)


@both
@pytest.mark.parametrize(
    "argument",
    ["static_argnums", "static_argnames", "donate_argnums", "in_shardings", "out_shardings"],
)
def test_jit_arguments_that_are_refused(filter_jit, argument):
    for value in (0, None, "x"):
        with pytest.raises(ValueError, match=argument):
            filter_jit(documented, **{argument: value})
        with pytest.raises(ValueError, match=argument):
            filter_jit(**{argument: value})(documented)


@pytest.mark.parametrize("block", ["a", None, (), 2])
def test_a_block_that_is_neither_true_nor_false_is_refused(block):
    with pytest.raises(ValueError, match="block"):
        eqxjit.filter_jit(documented, block=block)


@pytest.mark.parametrize("option", ["maxsize", "max_traces"])
@pytest.mark.parametrize("bad", [0, -1, 1.5, "3", True, (3,)])
def test_a_bound_that_is_no_count_is_refused(option, bad):
    with pytest.raises(ValueError if type(bad) is int else TypeError, match=option):
        eqxjit.filter_jit(documented, **{option: bad})


# --- Arguments of `jax.jit` are passed on -----------------------------------------------------


@both
def test_inline_is_passed_on(filter_jit):
    def calls_in(**options):
        f = filter_jit(lambda x: jnp.sin(x) + 1, **options)
        return jax.jit(lambda x: f(x)).lower(x).as_text().count(" call @")

    assert calls_in(inline=True) == 0
    assert calls_in(inline=False) == calls_in() == 1


@both
def test_keep_unused_is_passed_on(filter_jit):
    def parameters(**options):
        f = filter_jit(lambda x, unused: x, **options)
        return f.lower(x, jnp.ones((7, 7))).as_text().count("7x7")

    assert parameters(keep_unused=True) > 0
    assert parameters() == parameters(keep_unused=False) == 0


@both
def test_compiler_options_are_passed_on(filter_jit):
    f = filter_jit(lambda x: 2 * x, compiler_options={"xla_cpu_enable_fast_math": True})
    assert_same(warm(f, x), 2 * x)
    for _ in range(CALLS):
        with pytest.raises(Exception, match="xla_no_such_option"):
            filter_jit(lambda x: x, compiler_options={"xla_no_such_option": True})(x)


@both
@pytest.mark.filterwarnings("ignore:.*(backend|device).*:DeprecationWarning")
@pytest.mark.parametrize("option", ["device", "backend"])
def test_device_and_backend_are_passed_on(filter_jit, option):
    value = {"device": jax.devices("cpu")[0], "backend": "cpu"}[option]
    f = filter_jit(lambda x: 2 * x, **{option: value})
    assert warm(f, x).devices() == {jax.devices("cpu")[0]}
    if option == "backend":
        with pytest.raises(Exception, match="no_such"):
            filter_jit(lambda x: 2 * x, backend="no_such")(x)


@pytest.mark.parametrize("option", ["backend", "device"])
def test_a_deprecated_option_warns_once(option):
    value = "cpu" if option == "backend" else jax.devices("cpu")[0]
    # Options that were there before aren't checked again.
    for filter_jit, new in ((eqx.filter_jit, {}), (eqxjit.filter_jit, {"maxsize": 77})):
        with pytest.warns(DeprecationWarning, match="backend and device") as caught:
            filter_jit(lambda x: 2 * x, **{option: value}, **new)(jnp.ones(2))
        assert len(caught) == 1


# --- What the wrapper takes over --------------------------------------------------------------


@every_callable
def test_a_wrapper_looks_like_its_function(fun):
    ours, upstream = eqxjit.filter_jit(fun), eqx.filter_jit(fun)
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
        expected = getattr(fun, attribute, None)
        assert getattr(ours, attribute, None) == expected
        # Where there is none, upstream shows its wrapper's own, or a placeholder.
        assert not isinstance(expected, str) or getattr(upstream, attribute) == expected
    signature = inspect.signature(ours)
    assert signature == inspect.signature(upstream) == inspect.signature(fun)
    assert_same(ours.__wrapped__, fun)
    assert_same(upstream.__wrapped__, fun)
    assert ours.__wrapped__ is fun or not inspect.isfunction(fun)
    assert repr(ours).startswith("filter_jit(")


@both
def test_annotations_are_the_functions(filter_jit):
    f = filter_jit(documented)
    assert f.__annotations__ == documented.__annotations__
    assert typing.get_type_hints(f) == typing.get_type_hints(documented)


@both
def test_introspection(filter_jit):
    f = filter_jit(documented)
    assert callable(f)
    assert f
    assert inspect.unwrap(f) is documented
    assert inspect.getsource(f) == inspect.getsource(documented)
    assert "Scales." in pydoc.render_doc(f)
    assert inspect.getdoc(f) == "Scales."
    assert not inspect.iscoroutinefunction(f)
    assert not hasattr(f, "no_such_attribute")
    assert {"lower", "__wrapped__"} <= {*dir(f), "__wrapped__"}
    wrapper = functools.wraps(f)(lambda *args: f(*args))
    assert wrapper.__name__ == "documented"
    assert inspect.signature(wrapper) == inspect.signature(documented)
    assert not getattr(f, "__isabstractmethod__", False)


def test_an_attribute_that_is_not_there_is_named():
    f = eqxjit.filter_jit(documented)
    with pytest.raises(AttributeError, match="no_such_attribute"):
        _ = f.no_such_attribute
    with pytest.raises(AttributeError, match="no_such_attribute"):
        _ = Model(x).step.no_such_attribute


@both
def test_it_is_called_by_what_calls_functions(filter_jit):
    f = filter_jit(lambda x, y=1: x * y)
    for i in range(CALLS):
        a = x + i
        assert_same(operator.call(f, a, y=a), a * a)
        assert_same([*map(f, [a, a])], [a, a])
        assert_same(functools.partial(f, y=a)(a), a * a)
        assert_same(functools.reduce(f, [a, a, a]), a * a * a)
        assert_same(f.__call__(a), a)


class Small(eqx.Module):
    weight: jax.Array

    @eqxjit.filter_jit
    def step(self):
        return self


class Large(eqx.Module):
    mlp: eqx.nn.MLP

    @eqxjit.filter_jit(donate="all")
    def step(self):
        return self


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
        (lambda: eqxjit.filter_jit(documented), r"filter_jit\(documented\)"),
        (lambda: eqxjit.filter_jit(documented, donate="none"), r"filter_jit\(documented\)"),
        (
            lambda: eqxjit.filter_jit(documented, donate="all"),
            r"filter.*documented, donate='all'\)",
        ),
        (lambda: eqxjit.filter_jit(lambda x: x), r"filter_jit\(.*<lambda>\)"),
        (lambda: eqxjit.filter_jit(Model(x)), r"filter_jit\(Model\(.*weight=f32\[3\].*\)\)"),
        (lambda: eqxjit.filter_jit(Model(x).step), r"filter_jit\(.*step.*\)"),
        (lambda: eqxjit.filter_jit(MLP), r"filter_jit\(MLP\( layers=\( Linear\(.{1,60}"),
        (lambda: Small(x).step, r"<bound filter_jit\(.*Small.step\) of .*\(weight=f32\[3\]\)>"),
        (
            lambda: Large(MLP).step,
            r"<bound filter_jit\(.*Large.step, donate='all'\) of .*Large\( mlp=MLP\(.{1,99}",
        ),
        (lambda: Shy().step, r"<bound .* of Shy object>"),
    ],
)
def test_the_repr_is_one_short_line(make, pattern):
    assert re.fullmatch(pattern, repr(make()))


def test_the_repr_of_what_was_lowered_and_compiled():
    f = eqxjit.filter_jit(documented)
    for lowered, name in (
        (f.lower(x, y=3), "documented(x: float32[3], y=3)"),
        (eqxjit.filter_jit(Model(x)).lower(x), "Model(x: float32[3], fun: Model with 1 array)"),
    ):
        assert repr(lowered) == f"<Lowered {name}>"
        assert repr(lowered.compile()) == f"<Compiled {name}>"
    many = eqxjit.filter_jit(lambda **kwargs: 1).lower(**{f"number_{i}": i for i in range(50)})
    assert repr(many).startswith("<Lowered <lambda>(number_0=0, number_1=1, ")
    assert repr(many).endswith("...)>")
    assert len(repr(many)) < 150


def test_the_repr_while_traced():
    seen = []
    jax.jit(lambda x: seen.append(repr(eqxjit.filter_jit(Model(x)))))(x)
    assert "filter_jit(Model(" in seen[0]


# --- The cache --------------------------------------------------------------------------------


def test_cache_info():
    """As of `functools.lru_cache`: a named tuple."""
    f = eqxjit.filter_jit(lambda x, n: x * n)
    info = f.cache_info()
    assert info == (0, 0, 1024, 0)
    assert info == eqxjit.types.CacheInfo(entries=0, traces=0, maxsize=1024)
    assert info._fields == ("entries", "traces", "maxsize", "hits")
    for _ in range(CALLS):
        f(x, 2)  # one structure
    assert f.cache_info() == (1, 1, 1024, CALLS - 1)
    for _ in range(CALLS):
        f(x, 3)  # another static value
        f(jnp.ones(7), 3)  # another shape
    n_hits = 3 * (CALLS - 1)
    assert f.cache_info() == (2, 3, 1024, n_hits)
    shown = f"CacheInfo(entries=2, traces=3, maxsize=1024, hits={n_hits})"
    assert repr(f.cache_info()) == shown


def test_hits_are_the_calls_that_trace_nothing():
    """Of all wrappers of a function, on all paths, in a specialised call as in any other."""
    f = eqxjit.filter_jit(Model(x))
    wrappers = [f, f, eqxjit.filter_jit(Model(x + 1))]
    f.clear_cache()  # Of the other tests of such a Module.
    assert f.cache_info().hits == 0
    for i in range(10 * CALLS):
        wrappers[i % 3](jnp.ones((i % 2 + 1, 3), [int, float][i % 4 // 2]))
        info = f.cache_info()
        assert info.hits == i + 1 - info.traces
    assert f.cache_info().traces == 4
    f.clear_cache()
    assert f.cache_info().hits == 0
    warm(f, x)
    assert f.cache_info()[1:] == (1, 1024, CALLS - 1)


def test_what_is_no_hit():
    f = eqxjit.filter_jit(lambda x: eqx.error_if(x, x[0] < 0, "negative"))
    for i in range(1, CALLS):
        f(x)
        with pytest.raises(Exception, match="negative"):
            f(-x)
        with jax.disable_jit():
            f(x)
        with pytest.raises(TypeError):
            f()
        assert f.cache_info().hits == i - 1
    hits = f.cache_info().hits
    compiled = f.lower(x).compile()
    for _ in range(CALLS):
        compiled(x)
    assert f.cache_info().hits == hits
    jax.clear_caches()
    f(x)
    assert (f.cache_info().hits, f.cache_info().traces) == (hits, 2)


def test_hits_inside_other_functions():
    f = eqxjit.filter_jit(lambda x: x * 2)
    outer = jax.jit(lambda x: f(x) + f(x) + f(x))
    for _ in range(CALLS):
        outer(x)
    # Only the outer function's trace calls it.
    assert f.cache_info()[1:] == (1, 1024, 2)


def test_hits_of_threads():
    f = eqxjit.filter_jit(lambda x: x * 2)
    f(x)
    n_threads, n_calls = 4, 500
    race(lambda _: [f(x) for _ in range(n_calls)], n_threads)
    assert f.cache_info()[1:] == (1, 1024, n_threads * n_calls)


def test_clear_cache():
    traces = []
    f = eqxjit.filter_jit(lambda x: traces.append(1) or 2 * x)
    for times in range(1, 4):
        for _ in range(CALLS):
            assert_same(f(x), 2 * x)
        assert len(traces) == times
        f.clear_cache()
        assert f.cache_info() == (0, 0, 1024, 0)


@both
def test_the_signature_of_its_type(filter_jit):
    f = filter_jit(lambda x, *, n: x * n)
    assert callable(type(f))
    inspect.signature(type(f))


@pytest.mark.skipif(not eqxjit.native_enabled(), reason="the class has a slot, which isn't called")
@both
def test_the_call_of_its_type(filter_jit):
    f = filter_jit(lambda x, *, n: x * n)
    for _ in range(CALLS):
        assert type(f).__call__(f, jnp.ones(2), n=3).tolist() == [3, 3]
    with pytest.raises(TypeError):
        type(f).__call__(f)
    assert callable(type(f))
    inspect.signature(type(f))
