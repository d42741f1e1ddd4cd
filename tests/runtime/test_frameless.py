"""Warm calls that the native back end makes by itself: as those of the generated function."""

import functools
import gc
import itertools
import sys
import types
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from eqxjit._runtime import miss as _miss
from tests.support.allocations import with_failing_allocation
from tests.support.helpers import (
    OF_FRAMELESS_CALLS,
    assert_same,
    our_frames,
    outcome,
    warm,
)
from tests.support.hiding import reads_fields
from tests.support.inside import keep_frames
from tests.support.places import OUR_FILES
from tests.support.processes import run
from tests.support.sides import CALLS

_native = pytest.importorskip("eqxjit._native")
pytestmark = OF_FRAMELESS_CALLS

X = jnp.arange(3.0)


def is_frameless(f):
    return type(f.__call__) is _native.Call


@reads_fields
def test_a_warm_call_makes_no_frame():
    model = eqx.nn.MLP(3, 3, 4, 1, key=jax.random.key(0))
    f = eqxjit.filter_jit(lambda model, x, k=2: (model, k * model(x)))
    warm(f, model, X)
    assert is_frameless(f)
    assert our_frames(lambda: f(model, X)) == []
    assert our_frames(lambda: f(x=X, model=model)) == []


def two(a, b):
    return a, b


def optional(a, b=3, c=X):
    return a, b, c


def positional(a, b=4, /, c=5):
    return a, b, c


def by_name(a, *, k, j=7):
    return a, k, j


@pytest.mark.parametrize(
    ("fun", "call"),
    [
        (two, lambda f: f(X, b=X)),
        (optional, lambda f: f(X)),
        (positional, lambda f: f(X)),
        (by_name, lambda f: f(X, k=X)),
    ],
)
def test_arguments_are_bound_as_python_binds_them(fun, call):
    """In all ways to pass up to three values of five names, the wrong ones included."""
    f = eqxjit.filter_jit(fun)
    warm(call, f)
    assert is_frameless(f)
    values = [X, X + 1, 2]
    for n_positional, n_named in itertools.product(range(4), range(4)):
        for chosen in itertools.permutations(["a", "b", "c", "k", "other"], n_named):
            args = values[:n_positional]
            kwargs = {name: values[i % 3] for i, name in enumerate(chosen)}
            expected = outcome(fun, *args, **kwargs)
            if isinstance(expected, TypeError):
                assert str(outcome(f, *args, **kwargs)) == str(expected)
            elif n_named < 3:
                assert_same(warm(f, *args, **kwargs), expected)


def test_names_that_are_put_together_at_run_time(monkeypatch):
    f = eqxjit.filter_jit(lambda tree, other=2: (tree, other))
    warm(f, X, other=X)
    assert is_frameless(f)
    monkeypatch.setattr(_miss, "partition", None)
    tree, other = "".join(["tr", "ee"]), "".join(["ot", "her"])
    assert_same(f(**{other: X + 1, tree: X}), (X, X + 1))
    assert_same(f(X, **{other: X + 1}), (X, X + 1))


def test_what_python_refuses_is_refused():
    """Though it would match what was served before."""
    f = eqxjit.filter_jit(lambda a, b: (a, b))
    warm(f, X, None)
    assert is_frameless(f)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'"):
        f(X)
    g = eqxjit.filter_jit(by_name)
    warm(lambda: g(X, k=X, j=X))
    assert is_frameless(g)
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        g(X, X, X)
    h = eqxjit.filter_jit(positional)
    warm(h, X, X, X)
    assert is_frameless(h)
    with pytest.raises(TypeError, match="positional-only"):
        h(X, b=X, c=X)


def test_a_name_is_known_by_what_it_says():
    """Python makes names in calls the same object; those that come by `**` may be others."""
    f = eqxjit.filter_jit(two)
    warm(f, X, X + 1)
    name = "".join(["", "b"])
    assert_same(f(X, **{name: X + 1}), (X, X + 1))
    assert_same(f(**{"".join(["b", ""]): X, "a": X + 1}), (X + 1, X))


def test_what_is_traced_and_compiled_meanwhile_is_counted_and_explained():
    f = eqxjit.filter_jit(lambda x: x * 2)
    warm(f, X)
    assert is_frameless(f)
    longer = jnp.arange(4.0)
    for _ in range(2):
        assert_same(f(longer), longer * 2)
    assert [trace.reason for trace in f.traces()][1:] == [
        "shape: `x` was float32[3], is float32[4]"
    ]
    info = f.cache_info()
    assert (info.traces, info.recompilations, info.hits) == (2, 0, CALLS)


def test_a_compilation_for_another_device_is_counted():
    run(
        """
        import jax, jax.numpy as jnp
        import eqxjit
        from eqxjit import _native
        from tests.support import inside

        x = jnp.ones(3)
        f = eqxjit.filter_jit(lambda x, n: x * n)
        for _ in range(4):
            f(x, 2)
        assert type(f.__call__) is _native.Call
        moved = jax.device_put(x, jax.devices()[1])
        for _ in range(4):
            assert f(n=2, x=moved).devices() == {jax.devices()[1]}
        assert f.cache_info()[1:3] == (1, 1), f.cache_info()
        assert f.traces()[-1].is_recompilation
        assert f.traces()[-1].arguments["n"] == "2"
        # Looked at, as any program is.
        assert inside.blocks(f) == [False]
        assert type(f.__call__) is _native.Call
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
    )


def test_transformations_of_a_warm_function():
    f = eqxjit.filter_jit(lambda w, x: jnp.tanh(w * x).sum())
    w = jnp.float32(0.5)
    warm(f, w, X)

    def plain(w, x):
        return jnp.tanh(w * x).sum()

    xs = jnp.stack([X, X + 1])
    for _ in range(2):
        assert_same(jax.vmap(f, (None, 0))(w, xs), jax.vmap(jax.jit(plain), (None, 0))(w, xs))
        assert_same(jax.grad(f)(w, X), jax.grad(jax.jit(plain))(w, X))
        assert_same(jax.jit(jax.grad(f))(w, X), jax.jit(jax.grad(jax.jit(plain)))(w, X))
        assert_same(jax.hessian(f)(w, X), jax.hessian(jax.jit(plain))(w, X))
        with jax.disable_jit():
            assert_same(f(w, X), plain(w, X))
    assert_same(warm(f, w, X), jax.jit(plain)(w, X))
    assert is_frameless(f)


def test_an_output_of_another_trace():
    """A static value that depends on the shape comes back as the trace that ran has it."""
    f = eqxjit.filter_jit(lambda x, s: (x, f"{s}{x.shape[0]}", {s: 1} if x.shape[0] > 3 else s))
    warm(f, X, "a")
    assert_same(f(jnp.ones(4), "a"), (jnp.ones(4), "a4", {"a": 1}))
    for _ in range(CALLS):
        assert_same(f(jnp.ones(4), "a"), (jnp.ones(4), "a4", {"a": 1}))
        assert_same(f(X, "a"), (X, "a3", "a"))


def test_an_error_of_a_warm_call_is_explained():
    f = eqxjit.filter_jit(lambda x, y: x + y, donate="all")
    warm(lambda: f(X + 0, X + 1))
    assert is_frameless(f)
    gone = X + 0
    f(gone, X + 1)
    with pytest.raises(
        (ValueError, RuntimeError), match="The array `x` has been deleted"
    ) as caught:
        f(gone, X + 1)
    ours = [entry for entry in caught.traceback if str(entry.path).startswith(OUR_FILES)]
    assert len(ours) <= 2
    assert_same(f(X + 0, X + 1), X + X + 1)


def test_the_context_of_an_error_is_the_callers():
    f = eqxjit.filter_jit(lambda x: x, donate="all")
    warm(lambda: f(X + 0))
    gone = X + 0
    gone.delete()
    try:
        try:
            raise KeyError("outer")
        except KeyError:
            f(gone)
    except (ValueError, RuntimeError) as error:
        chain = []
        while error is not None:
            chain.append(type(error))
            error = error.__context__
        assert KeyError in chain


def test_a_finaliser_in_the_middle_compiles_what_it_likes():
    """What another function compiles, even one of the same name, is no concern of the call."""
    f = eqxjit.filter_jit(two)
    warm(f, X, X)
    results = []

    class Child:
        def __del__(self):
            def two(x):
                return x * len(results)

            results.append(jax.jit(two)(X))

    # Cyclic garbage, found while the call makes its tuples.
    threshold = gc.get_threshold()
    try:
        for _ in range(5):
            child = Child()
            child.me = child
            del child
            gc.set_threshold(1)
            assert_same(f(X, X + 1), (X, X + 1))
            gc.set_threshold(*threshold)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert len(results) == 5
    assert f.cache_info()[1:3] == (1, 0)


def test_what_the_function_shows_of_itself():
    f = eqxjit.filter_jit(two)
    warm(f, X, X)
    assert is_frameless(f)
    assert f.__call__.__name__ == "two"
    assert "two" in repr(f.__call__)
    assert "def two(a, b):" in f.specialized_source()
    with pytest.raises(AttributeError, match="nothing_such"):
        f.__call__.nothing_such  # noqa: B018


def test_it_is_freed_with_its_wrapper():
    f = eqxjit.filter_jit(lambda x: x)
    warm(f, X)
    call = f.__call__
    alive = [
        weakref.ref(part) for part in gc.get_referents(call) if type(part) is types.FunctionType
    ]
    assert alive
    f.clear_cache()
    assert_same(f(X), X)
    del f, call
    gc.collect()
    assert [part() for part in alive] == [None] * len(alive)


def test_a_frame_is_kept_where_jax_does_not_show_whose_program_it_looks_for(monkeypatch):
    keep_frames(monkeypatch)
    f = eqxjit.filter_jit(lambda a, b: (a, b))
    warm(f, X, X)
    assert not is_frameless(f)
    assert_same(f(X, jnp.ones(4)), (X, jnp.ones(4)))


@pytest.mark.parametrize("what", ["calls", "by name", "other structures", "errors"])
def test_calls_keep_nothing(what):
    f = eqxjit.filter_jit(lambda t, x, k=X: (t, x, k), donate="all-except-first")
    model, gone = {"a": X, "b": (X, 1)}, X + 1
    warm(lambda: f(model, X + 1, X + 2))
    warm(lambda: f([X], X + 1, X + 2))
    gone.delete()

    def call():
        if what == "calls":
            f(model, X + 1, X + 2)
        elif what == "by name":
            f(x=X + 1, k=X + 2, t=model)
        elif what == "other structures":
            f(model, X + 1, X + 2)
            f([X], X + 1, X + 2)
        else:
            assert "deleted" in str(outcome(f, model, gone, X + 2))

    def counts():
        gc.collect()
        objects = [model, X, f.__call__, gone, 1]
        return [sys.getrefcount(each) for each in objects], len(gc.get_objects())

    for _ in range(20):
        call()
    before, n_before = counts()
    for _ in range(300):
        call()
    after, n_after = counts()
    assert all(abs(b - a) < 20 for b, a in zip(before, after, strict=True)), (before, after)
    assert abs(n_after - n_before) < 100


class Entry:
    __slots__ = ("unclassified",)

    def __init__(self):
        self.unclassified = False


def made(f, **fields):
    """A `Call` by hand, with the parts of a warm function, and what is given in their place."""
    parts = gc.get_referents(f.__call__)
    [match] = [part for part in parts if type(part) is _native.Match]
    [rebuild] = [part for part in parts if type(part) is _native.Rebuild]

    def unexpected(*_, **__):
        raise MemoryError

    others = ("retrace", "explain", "finish", "owner", "otherwise")
    fields = {
        **dict.fromkeys(others, unexpected),
        "jitted": lambda *arrays: [*arrays],
        "names": ("t", "x"),
        "defaults": (None, None),
        "n_positional": 2,
        "entry": Entry(),
        "slot": Entry.unclassified,
        "miss": KeyError,
        "hits": itertools.repeat(None),
        **fields,
    }
    order = "jitted names defaults n_positional otherwise entry slot miss retrace explain finish"
    return _native.Call(match, rebuild, *(fields[name] for name in f"{order} hits owner".split()))


def of_two():
    f = eqxjit.filter_jit(lambda t, x: (t, x))
    warm(f, {"a": [X] * 5, "b": (X, 1)}, X)
    return f, {"a": [X] * 5, "b": (X, 1)}


def test_every_allocation_may_fail():
    """With what JAX does in Python's place: its own code can't bear that."""
    f, model = of_two()
    call = made(f)
    for action in [lambda: call(model, X), lambda: call(model, x=X)]:
        n_served = 0
        for n in range(100):
            result = with_failing_allocation(n, action)
            n_served += result is not None
            if n > 60:
                assert_same(result, (model, X))
        assert n_served < 100


def test_what_is_in_flight():
    """The innermost call of that entry, with its arguments as they were passed; and none later."""
    f, model = of_two()
    outer, inner = Entry(), Entry()
    seen = []

    def look(*arrays):
        seen.append([_native.in_flight(entry) for entry in (outer, inner, Entry())])
        return [*arrays]

    call = made(f, entry=inner, jitted=look, owner="inner")

    def nest(*arrays):
        call(model, x=X)
        return look(*arrays)

    made(f, entry=outer, jitted=nest, owner="outer")(model, X)
    in_outer = ("outer", (model, X), {})
    assert seen == [[in_outer, ("inner", (model,), {"x": X}), None], [in_outer, None, None]]
    assert _native.in_flight(outer) is None


def test_an_error_is_the_one_that_was_raised():
    """With its traceback and its context; what explains it has it at hand, or raises another."""
    f, model = of_two()
    seen = []

    def raising(*_):
        raise ValueError("from inside")

    def explain(*args, **kwargs):
        seen.append((sys.exc_info()[1], args, kwargs))

    def clearer(*_, **__):
        raise TypeError("clearer") from None

    try:
        raise KeyError("outer")
    except KeyError:
        with pytest.raises(ValueError, match="from inside") as caught:
            made(f, jitted=raising, explain=explain)(model, x=X)
        assert isinstance(sys.exc_info()[1], KeyError)
    assert caught.traceback[-1].name == "raising"
    assert isinstance(caught.value.__context__, KeyError)
    assert seen == [(caught.value, (model,), {"x": X})]
    with pytest.raises(TypeError, match="clearer") as caught:
        made(f, jitted=raising, explain=clearer)(model, x=X)
    assert isinstance(caught.value.__context__, ValueError)


def test_an_error_holds_no_array():
    """Once it is caught: no cycle through its traceback waits for garbage collection."""
    f = eqxjit.filter_jit(lambda a, b: a + b, donate="all")
    warm(lambda: f(X + 0, X + 1))
    assert is_frameless(f)
    gone, other = X + 0, X + 1
    alive = weakref.ref(other)
    gone.delete()
    gc.disable()
    try:
        assert "deleted" in str(outcome(f, gone, other))
        del other
        assert alive() is None
    finally:
        gc.enable()


class Holder(Entry):
    """In a cycle with what holds it."""

    def __call__(self, *_, **__):
        raise AssertionError

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration


@pytest.mark.parametrize(
    "field",
    [
        "jitted",
        "otherwise",
        "entry",
        "miss",
        "retrace",
        "fail",
        "finish",
        "hits",
        "owner",
    ],
)
def test_cycles_are_collected(field):
    f, _ = of_two()
    holder = Holder()
    holder.call = made(f, **{field: holder})
    alive = weakref.ref(holder)
    del holder
    gc.collect()
    assert alive() is None


def a_class():
    class Wrapper(_native.Delegate):
        __slots__ = ("__weakref__",)
        __call__ = _native.Delegate.target

    return _native.call_directly(Wrapper)


def test_a_delegate_calls_its_target():
    """By position, by name, unpacked; and what is called may put another target in its place."""
    f = a_class()()
    with pytest.raises(AttributeError):
        f()

    def first(*args, **kwargs):
        f.target = max
        gc.collect()
        return args, kwargs

    f.__call__ = first
    del first
    assert f(1, b=2) == ((1,), {"b": 2})
    assert f(1, 2) == f(*[2, 1]) == 2
    assert f([], default=3) == 3
    del f.target
    with pytest.raises(AttributeError):
        f(1)


def test_a_subclass_that_has_its_own_call():
    class Own(a_class()):
        __slots__ = ()

        def __call__(self, x):
            return "own", x

    own = Own()
    own.target = max
    assert own(1) == ("own", 1)
    for other in (int, 3):
        with pytest.raises(TypeError, match="subclass of Delegate"):
            _native.call_directly(other)


def test_a_cycle_through_a_delegate_is_collected():
    f = a_class()()
    f.target = types.MethodType(lambda self: self, f)
    gone = weakref.ref(f)
    cls = weakref.ref(type(f))
    del f
    gc.collect()
    assert gone() is None
    assert cls() is None


@pytest.mark.parametrize("make", [lambda f: f, lambda f: f.lower(X).compile()])
def test_wrappers_are_called_without_a_look_at_their_slot(make):
    """As their types say to CPython; the value is that of `Py_TPFLAGS_HAVE_VECTORCALL`."""
    assert type(make(eqxjit.filter_jit(lambda x: x))).__flags__ & (1 << 11)


def test_a_wrapper_that_calls_itself_exhausts_python_and_not_the_stack():
    one, other = (eqxjit.filter_jit(lambda x: x) for _ in range(2))
    one.__call__ = one
    with pytest.raises(RecursionError):
        one(X)
    one.__call__ = functools.partial(other)
    other.__call__ = one
    with pytest.raises(RecursionError):
        other(X)
