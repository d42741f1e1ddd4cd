"""The native back end: what is asked of C alone, beside the tests that all back ends pass."""

import collections
import contextlib
import gc
import itertools
import operator
import sys
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eqxjit
from eqxjit._spec.static import freeze
from eqxjit._spec.tree import ARRAY, DICT, SEQUENCE, Static
from tests.support import nodes
from tests.support.helpers import SPECIALIZING, Hooked, Own, assert_same
from tests.support.inside import n_fast
from tests.support.models import Layer, Point
from tests.support.paths import C, Caller, Jitted, Path, dispatcher
from tests.support.processes import run
from tests.support.profile import PROFILE
from tests.support.sides import CALLS

_native = pytest.importorskip("eqxjit._native")
pytestmark = pytest.mark.skipif(
    not eqxjit.native_enabled() or not SPECIALIZING, reason="the back end is switched off"
)

X = jnp.arange(3.0)


def tree():
    """Of every node that the back end reads and makes."""
    return {
        "layers": [Layer(X * i, [X, 1.5]) for i in range(6)],
        "point": Point(X, {"b": X, "c": (X, None)}),
        "numpy": np.ones(2),
        "ordered": collections.OrderedDict(b=X, a=2),
        "static": (Layer, "text", 0.0, -0.0, float("nan"), ("a", "b"), (1, "a"), True, jnp.float32),
        "bag": nodes.Bag("label", X),
        "checked": nodes.CheckedPair(X, 2),
        "deep": Layer(X, X, [{"a": (1, [2.5, {3}])}, nodes.Settings([b"4"]), slice(1, 2), Own(1)]),
        "empty": ((), [], {}, nodes.Empty(), nodes.Nothing()),
    }


def path_of(*args: Any, **kwargs: Any) -> Path:
    def fun(*args: Any, **kwargs: Any) -> None:
        raise AssertionError

    return Path(C, fun, lambda args, kwargs: (args, kwargs, [X, "own"]), *args, **kwargs)


# --- References -------------------------------------------------------------------------------

N_CALLS = {"fast": 2_000, "thorough": 1_000_000}[PROFILE]


def _counts(objects):
    gc.collect()
    return [sys.getrefcount(each) for each in objects]


def _repeated(path, what, hook, value):
    """What is repeated: a match and its output, a match that fails, or one that raises."""
    if what == "calls":

        def called():
            path.run(value, X)

        assert path(value, X) is not None
        return called
    if what == "misses":
        others = [{**value, "empty": 1}, {**value, "bag": nodes.Bag("other", X)}, {}, X]
        others += [{**value, "deep": Layer(X, X, [{"a": (1, [2.5, {4}])}])}]

        def missed():
            for other in others:
                assert path.run(other, X) is Caller.refused
            assert path.run(value) is Caller.refused
            assert path.run(value, x=X) is Caller.refused

        return missed
    hook(lambda: 1 / 0)

    def raised():
        with contextlib.suppress(ZeroDivisionError):
            path.run(value, X)
            raise AssertionError

    return raised


@pytest.mark.parametrize("what", ["calls", "misses", "raises"])
def test_references_are_counted(what, hook):
    """A reference too many, or too few, for each call would show as often."""
    hooked = Hooked()
    value = {**tree(), "hooked": (X, hooked)}
    path = path_of(value, X)
    action = _repeated(path, what, hook, value)
    objects = [value, *value.values(), *value["layers"], X, 1.5, hooked, Layer, "weight", path.spec]
    objects += [vars(value["layers"][0]), path.fast, path.entry, path.output, path.entry.outs, Own]
    objects += [ARRAY, None, True, value["deep"].config, value["deep"].config[0]]
    for _ in range(100):
        action()
    before, n_blocks = _counts(objects), sys.getallocatedblocks()
    for _ in range(N_CALLS):
        action()
    after = _counts(objects)
    assert all(abs(b - a) < 20 for b, a in zip(before, after, strict=True)), (before, after)
    assert abs(sys.getallocatedblocks() - n_blocks) < 1_000


def test_cycles_through_specs_are_collected():
    class Plain:
        pass

    plain = Plain()
    f = eqxjit.filter_jit(lambda x, s: (x, s))
    plain.function = f
    for _ in range(CALLS):
        f(X, plain)
    assert n_fast(f) == 1
    ref = weakref.ref(plain)
    del plain, f
    for _ in range(3):
        gc.collect()
    assert ref() is None


# --- What users run in the middle of a walk -----------------------------------------------------

CHANGES = {
    "a list loses its items": (lambda h: [h, X, X], lambda t: t.clear()),
    "a list gets more": (lambda h: [h, X, X], lambda t: t.extend([X] * 100)),
    "a dict loses its items": (lambda h: {"a": h, "b": X}, lambda t: t.clear()),
    "a dict gets more": (
        lambda h: {"a": h, "b": X},
        lambda t: t.update({str(i): X for i in range(99)}),
    ),
    "a Module loses its fields": (lambda h: Layer(h, X), lambda t: vars(t).clear()),
    "a Module gets another dict": (
        lambda h: Layer(h, X),
        lambda t: object.__setattr__(t, "__dict__", {}),
    ),
    "a Module loses a field": (
        lambda h: Layer(h, X),
        lambda t: object.__delattr__(t, "extra"),
    ),
    "a tuple's list": (lambda h: ([h], [X]), lambda t: (t[0].clear(), t[1].clear())),
    "a static list": (lambda h: Layer(X, X, [h, [h]]), lambda t: t.config.clear()),
    "a list in a static list": (lambda h: Layer(X, X, [[h, 2], h]), lambda t: t.config[0].clear()),
    "a static dict": (lambda h: Layer(X, X, {"a": h, "b": 1}), lambda t: t.config.clear()),
    "a static dict gets more": (
        lambda h: Layer(X, X, {"a": h, "b": 1}),
        lambda t: t.config.update(zip(range(99), range(99), strict=True)),
    ),
    "a static field is replaced": (
        lambda h: Layer(X, X, [h, h]),
        lambda t: object.__setattr__(t, "config", None),
    ),
    "a static dataclass": (
        lambda h: Layer(X, X, nodes.Settings([h, 1])),
        lambda t: setattr(t.config, "value", None),
    ),
    "a node's children": (lambda h: nodes.Bag("l", [h], [h]), lambda t: t.items.clear()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_containers_that_change_in_the_middle_of_a_walk(change, hook):
    """What is found then isn't promised, but that Python survives, and that the next call is right.

    Each part is kept by its container alone, which frees it.
    """
    make, action = CHANGES[change]
    f = eqxjit.filter_jit(lambda t, x: x * 2)
    for _ in range(CALLS):
        assert_same(f(make(Hooked()), X), X * 2)
    assert n_fast(f) == 1
    for number in range(1, 6):
        value, counter = make(Hooked()), itertools.count(1)

        def strike(value=value, counter=counter, number=number):
            if next(counter) == number:
                action(value)
                gc.collect()

        hook(strike)
        with contextlib.suppress(Exception):
            f(value, X)
        hook(lambda: None)
        assert_same(f(make(Hooked()), X), X * 2)


@pytest.mark.parametrize("action", ["clear", "drop", "change"])
def test_entries_that_go_in_the_middle_of_a_walk(action, hook):
    """The fast path that is being matched, and all others, are dropped by what a guard runs."""
    f = eqxjit.filter_jit(lambda t, x, n=0: x * 2 + n)
    for n in (1, 2):
        for _ in range(CALLS):
            f([Hooked()], X, n)

    def strike():
        hook(lambda: None)
        if action == "clear":
            f.clear_cache()
        elif action == "drop":
            eqx.clear_caches()
            jax.clear_caches()
        else:
            f([Hooked()], X, 3)
        gc.collect()

    for n in (1, 2, 1):
        hook(strike)
        assert_same(f([Hooked()], X, n), X * 2 + n)


class Looking:
    """A node whose flatten and unflatten look at all tuples and lists that there are."""

    def __init__(self, child):
        self.child = child


def _look():
    for each in gc.get_objects():
        if type(each) in (tuple, list, Point):
            assert list(each) is not None


def _flatten(node):
    _look()
    return (node.child,), None


def _unflatten(_, children):
    _look()
    return Looking(*children)


jax.tree_util.register_pytree_node(Looking, _flatten, _unflatten)


def test_nobody_finds_what_is_not_full_yet(hook):
    """Neither the flat arrays, nor static objects, nor parts of an output."""
    f = eqxjit.filter_jit(lambda t, x: (t, [x, Point(t["b"], t["c"])]))
    config = [1]

    def model():
        return {"a": X, "b": Looking(X), "c": [X, Layer(X, Hooked(), config), Looking(X), X]}

    for _ in range(CALLS):
        f(model(), X)
    assert n_fast(f) == 1
    hook(_look)
    out, [x, (b, c)] = f(model(), X)
    assert_same((out["a"], x, b.child, c[3]), (X, X, X, X))
    assert out["c"][1].config is config
    for part in (out["c"], c):
        assert gc.is_tracked(part)


# --- Outputs ----------------------------------------------------------------------------------


def test_each_call_gets_its_own_static_objects_back():
    f = eqxjit.filter_jit(lambda *args, k: (k, args))

    def models():
        return [Layer(X, X, [i]) for i in (1, 1, 2)], {"b": Layer(X, X, [3])}

    for _ in range(CALLS):
        first, other = models()
        (again,), (firsts, others) = f(first, other, k=[named := Layer(X, X, [1])])
        assert others["b"].config is other["b"].config
        assert again.config is named.config
        for ours, theirs in zip(firsts, first, strict=True):
            assert ours.config is theirs.config
    assert n_fast(f) == 1


class OddText(str):
    __hash__ = str.__hash__

    def __eq__(self, other):
        raise AssertionError("a guard compares keys of another class")


@pytest.mark.parametrize("order", [*itertools.permutations("abc")])
def test_dicts_match_in_whatever_order_they_were_filled(order):
    values = {"a": X, "b": X + 1, "c": X + 2}
    path = path_of({name: values[name] for name in order})
    for names in itertools.permutations("abc"):
        made_anew = {bytes([ord(name)]).decode(): values[name] for name in names}
        assert path(made_anew).arrays == (*values.values(),)
        assert path({**made_anew, "d": X}) is None
        for other in names:
            assert path({"d" if name == other else name: X for name in names}) is None
            odd = {OddText(name) if name == other else name: values[name] for name in names}
            assert path(odd) is None


# --- Malformed specs ----------------------------------------------------------------------------

EMPTY = (DICT, dict, ())


def fast_of(
    args=(SEQUENCE, tuple, None, ARRAY),
    kwargs=EMPTY,
    outs=((ARRAY, (), ()),),
    n_arrays=1,
    n_first=0,
    n_fun=0,
    jitted=None,
):
    jitted = jitted or Jitted(X)
    entry = _native.Flags()
    return _native.Fast(entry, jitted, args, kwargs, [*outs], n_arrays, n_first, n_fun)


def call_of(*args, fun_arrays=(), **kwargs):
    """A call that tries one fast path, made by hand."""
    return dispatcher(fast_of(*args, **kwargs), fun_arrays)


def test_keywords_are_found_by_their_text_in_whatever_order():
    names = tuple("".join(["name", str(i)]) for i in range(3))
    kwargs, jitted = (DICT, dict, names, *[ARRAY] * 3), Jitted(X)
    call = call_of((SEQUENCE, tuple, None), kwargs, n_arrays=3, jitted=jitted)
    for order in itertools.permutations(range(3)):
        call(**{f"name{i}": X + i for i in order})
        assert [*map(float, [array[0] for array in jitted.arrays])] == [0, 1, 2]
    for other in ("name", "name3", ""):
        assert call(**{"name0": X, "name1": X, other: X}) is Caller.refused
    odd = {"name0": X, "name1": X, OddText("name2"): X}
    assert call(**odd) is Caller.refused


_JUNK = [None, ARRAY, (), 0, 1, 3, -1, 99, "a", ("a",), [], {}, X, Static(1), tuple, list, dict]
_JUNK += [Layer, type, int, Point, (SEQUENCE, list, None, ARRAY), (DICT, dict, ("a",), ARRAY)]
_JUNK += [Static(freeze([1, 2.5])), Static((1, list, None, (3, Layer, ("x",), 2)))]


_COUNTS = [0, 0, 0, 1, 2, -1, sys.maxsize]


def _places(spec):
    yield ()
    if type(spec) is tuple:
        for i, part in enumerate(spec):
            for place in _places(part):
                yield (i, *place)


def _put(spec, place, junk):
    if not place:
        return junk
    i = place[0]
    return (*spec[:i], _put(spec[i], place[1:], junk), *spec[i + 1 :])


@settings(max_examples={"fast": 500, "thorough": 20_000}[PROFILE])
@given(data=st.data())
def test_specs_in_which_something_is_replaced(data):
    """Junk anywhere in what a fast path is made of: an exception, or some outcome, but no crash."""
    value = tree()
    path = path_of(value, k=X)
    _, _, _, args, kwargs = path.spec
    out = tuple(path.entry.outs[0])
    parts = [args, kwargs, out]
    for _ in range(data.draw(st.integers(1, 3))):
        which = data.draw(st.integers(0, 2))
        places = [*_places(parts[which])]
        place = places[data.draw(st.integers(0, 10**6)) % len(places)]
        parts[which] = _put(parts[which], place, data.draw(st.sampled_from(_JUNK)))
    n = path.entry.n_arrays + data.draw(st.sampled_from([0, 0, -1, 1]))
    expected = (SystemError, TypeError, ValueError, AttributeError, KeyError, AssertionError)
    expected += (OverflowError,)
    with contextlib.suppress(*expected):
        counts = data.draw(st.lists(st.sampled_from(_COUNTS), min_size=2, max_size=2))
        jitted = Jitted(path.output)
        call = call_of(parts[0], parts[1], [parts[2]], n, *counts, jitted=jitted)
        with contextlib.suppress(*expected):
            call(value, k=X)
        call(*[1, X, value][: data.draw(st.integers(0, 3))], k=X)


def test_calls_of_the_module_that_are_wrong():
    for wrong in [
        lambda: _native.Fast(),
        lambda: _native.Fast(None, None, EMPTY, EMPTY, [], 0, 0, 0),
        lambda: _native.connect(None, len),
        lambda: _native.connect(_native.Dispatcher(), len, None, (), (), (), ()),
        lambda: _native.Static(),
        lambda: _native.Static(1, 2, 3),
        lambda: _native.Static(frozen=1),
        lambda: _native.Static([]),
        lambda: _native.run(),
        lambda: _native.run(None, (), None),
        lambda: _native.same(1),
        lambda: _native.setup(),
        lambda: _native.call_directly(int),
        lambda: _native.in_flight(None, None),
    ]:
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(AttributeError):
        _native.run(None, len, [])
    assert _native.in_flight() is None
    assert _native.in_flight(object()) is None


# --- Memory -----------------------------------------------------------------------------------


def with_failing_allocation(n: int, action: Callable[[], Any]) -> Any:
    """What a call returns while Python's `n`th allocation fails; None for a `MemoryError`.

    Other threads would fail instead, pytest-xdist's among them: none runs meanwhile.
    """
    testcapi = pytest.importorskip("_testcapi")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    testcapi.set_nomemory(n, n + 1)
    try:
        return action()
    except MemoryError:
        return None
    finally:
        testcapi.remove_mem_hooks()
        sys.setswitchinterval(interval)


@pytest.mark.skipif(
    sys.version_info[:3] in ((3, 12, 1), (3, 13, 0)),
    reason="they crash by themselves: `(lambda *a: 1)(*[1] * 50)` with failing allocations",
)
def test_every_allocation_may_fail():
    """What follows a `MemoryError` is right; JAX's own code doesn't bear it, and is left out."""
    value = {
        "a": [X] * 5,
        "b": Layer(X, (X, 1), [1.5, {"c": (2,)}, nodes.Settings("d")]),
        "c": Point(X, X),
        "d": (),
        "e": (frozenset(range(9)), 2j, ("a", (0.0, 10**20))),
    }
    path = path_of(*[value, X] * 10, k=X)
    arguments = [value, X] * 10
    made = path(*arguments, k=X)
    flags, (_, _, _, args, kwargs) = path.entry, path.spec
    outs, n = path.entry.outs, path.entry.n_arrays
    types = type(path.fast)

    actions = [
        lambda: path.run(*arguments, k=X),
        lambda: types(flags, path.jitted, args, kwargs, outs, n, 0, 0),
        lambda: _native.run(path, lambda *arrays: 1, [X] * 50),
        lambda: _native.Static("frozen"),
        lambda: _native.Dispatcher(),
    ]
    for action in actions:
        for n_th in range(400):
            result = with_failing_allocation(n_th, action)
            if n_th > 390:
                assert result is not None
    again = path(*arguments, k=X)
    assert all(map(operator.is_, again.arrays, made.arrays))
    assert_same(again.made, made.made)


# --- Processes and interpreters -----------------------------------------------------------------

# As `git pull` leaves it in a checkout.
_BUILT_EARLIER = """
        import sys, eqxjit._native
        eqxjit._native.INTERFACE -= 1
        for name in [*sys.modules]:
            if name.startswith("eqxjit") and name != "eqxjit._native":
                del sys.modules[name]
"""


@pytest.mark.parametrize(
    ("setting", "prelude"),
    [
        ("0", ""),
        ("", "import sys; sys.modules['eqxjit._native'] = None"),
        ("", _BUILT_EARLIER),
    ],
)
def test_python_serves_without_it(setting, prelude):
    run(
        f"""
        import os
        os.environ["EQXJIT_NATIVE"] = "{setting}"
        {prelude}
        import equinox as eqx, jax, jax.numpy as jnp
        import eqxjit

        assert not eqxjit.native_enabled()
        model = eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0))
        f = eqxjit.filter_jit(lambda model, x: (model, model(x)))
        for _ in range(4):
            out, y = f(model, jnp.ones(2))
        assert eqx.tree_equal(out, model)
        assert f.specialized_source() is not None
        """
    )
