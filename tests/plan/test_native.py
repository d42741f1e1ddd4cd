"""The native back end: what is asked of C alone, beside the tests that all back ends pass."""

import collections
import contextlib
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
from eqxjit._plan import native
from tests.support.allocations import with_failing_allocation
from tests.support.helpers import Hooked, assert_same
from tests.support.inside import is_native
from tests.support.models import Layer, Point
from tests.support.processes import run
from tests.support.sides import CALLS

_native = pytest.importorskip("eqxjit._native")
pytestmark = pytest.mark.skipif(not eqxjit.native_enabled(), reason="the back end is switched off")

X = jnp.arange(3.0)


def tree():
    """Of every node that the back end reads and makes."""
    return {
        "layers": [Layer(X * i, [X, 1.5]) for i in range(6)],
        "point": Point(X, {"b": X, 1: (X, None)}.get("b")),
        "arrays": [X] * 7,
        "numbers": [*range(8)],
        "numpy": np.ones(2),
        "ordered": collections.OrderedDict(b=X, a=2),
        "default": collections.defaultdict(list, a=X),
        "static": (Layer, "text", 0.0, -0.0, float("nan"), ("a", "b"), (1, "a"), True, jnp.float32),
        "partial": eqx.Partial(Layer, X),
        "empty": ((), [], {}),
    }


def test_every_node_goes_in_and_out():
    f, theirs = (
        jit(lambda t, *rest, k=1: (t, rest, k)) for jit in (eqxjit.filter_jit, eqx.filter_jit)
    )
    expected = theirs(tree(), X, 2, k=X)
    for _ in range(CALLS):
        assert_same(f(tree(), X, 2, k=X), expected)
    assert is_native(f)


@pytest.mark.parametrize(
    "call",
    [
        lambda f: f(X),
        lambda f: f(X, 1, X, 3),
        lambda f: f(X, 1, X, 3, k=X),
        lambda f: f(X, k=X, j=2),
        lambda f: f(X, X, j=X),
    ],
)
def test_however_the_parameters_are_filled(call):
    """Each is a plan of its own, which serves no other's call."""

    def g(x, /, y=5, *rest, j=6, k=7, **more):
        return x, y, rest, j, k, more

    f = eqxjit.filter_jit(g)
    for _ in range(CALLS):
        assert_same(call(f), call(g))
    assert is_native(f)
    assert_same(f(X, 1, 2), g(X, 1, 2))


def test_it_is_for_all_but_what_is_rare():
    def g(x, **more):
        return x, more

    f = eqxjit.filter_jit(g)
    for _ in range(CALLS):
        assert_same(f(X, a=X, b=2), (X, {"a": X, "b": 2}))
    assert not is_native(f)


def _counts(objects):
    gc.collect()
    return [sys.getrefcount(each) for each in objects]


@pytest.mark.parametrize("what", ["calls", "misses", "raises"])
def test_references_are_counted(what, hook):
    """A reference too many, or too few, for each call would show a thousand times."""
    hooked = Hooked()
    model = {"layers": [Layer(X + 1, [X, 1.5])] * 5, "d": {"a": X, "b": (X, hooked)}}
    f = eqxjit.filter_jit(lambda t, x: (t, x))
    for _ in range(CALLS):
        f(model, X)
    assert is_native(f)
    match, *_ = _found(_native.Match, lambda match: match(model, X))
    objects = [model, *model["layers"], model["d"], X, model["d"]["b"], 1.5, Layer, hooked, match]
    objects += [vars(model["layers"][0]), native.ArrayImpl, "weight"]
    arguments, expected = (model, X), tuple
    if what == "misses":
        arguments, expected = (model, 1), type(None)
    elif what == "raises":
        hook(lambda: 1 / 0)
        expected = type(None)
    before = _counts(objects)
    n_objects = len(gc.get_objects())
    for _ in range(1_000):
        assert type(match(*arguments)) is expected
    after = _counts(objects)
    assert all(abs(b - a) < 20 for b, a in zip(before, after, strict=True)), (before, after)
    assert len(gc.get_objects()) - n_objects < 100


def _found(cls, serves):
    """Return the objects of the back end that pass a test."""
    return [each for each in gc.get_objects() if type(each) is cls and serves(each)]


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
    assert is_native(f)
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
    """Neither the flat arrays, nor what is kept, nor parts of an output."""
    f = eqxjit.filter_jit(lambda t, x: (t, [x, Point(t["b"], t["c"])]))
    config = [1]

    def model():
        return {"a": X, "b": Looking(X), "c": [X, Layer(X, Hooked(), config), Looking(X), X]}

    for _ in range(CALLS):
        f(model(), X)
    assert is_native(f)
    hook(_look)
    out, [x, (b, c)] = f(model(), X)
    assert_same((out["a"], x, b.child, c[3]), (X, X, X, X))
    assert out["c"][1].config is config
    for part in (out["c"], c):
        assert gc.is_tracked(part)


def test_each_call_gets_its_own_static_objects_back():
    class Named(eqx.Module):
        first: str = eqx.field(static=True)
        config: Any = eqx.field(static=True)
        weight: Any = None

    def models():
        return [Named("a", [i], X) for i in (1, 1, 1, 1, 2)], {"b": Named("b", [3], X)}

    f = eqxjit.filter_jit(lambda *args, k: (k, args))
    for _ in range(CALLS):
        run_of, other = models()
        # The same object twice is for generated Python.
        (again,), (runs, others) = f(run_of, other, k=[named := models()[0][0]])
        assert others["b"].config is other["b"].config
        assert again.config is named.config
        for ours, theirs in zip(runs, run_of, strict=True):
            assert ours.config is theirs.config
    assert is_native(f)


def test_a_static_container_is_compared_by_what_it_holds_then_by_its_key():
    def model(config):
        return Layer(X, [X], config)

    f = eqxjit.filter_jit(lambda t: t.weight * 2)
    config = [[1, 2.5], {"a": (1,)}]
    for _ in range(CALLS):
        f(model(config))
    assert is_native(f)
    match, *_ = _found(_native.Match, lambda match: match(model(config)))
    # Equal, with elements of its own.
    assert match(model([[1, float("2.5")], {"a": (1,)}])) is not None
    for changed in ([[1, 2.5]], [[1, 2.5], {"a": (True,)}], ([1, 2.5], {"a": (1,)}), None):
        assert match(model(changed)) is None
    config[0][0] = True
    assert match(model(config)) is None


def test_an_interrupt_in_a_guard_is_the_callers(hook):
    f = eqxjit.filter_jit(lambda t, x: x * 2)
    for _ in range(CALLS):
        f([Hooked()], X)

    def interrupt():
        hook(lambda: None)
        raise KeyboardInterrupt

    hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        f([Hooked()], X)
    assert_same(f([Hooked()], X), X * 2)


def test_numpy_arrays_are_copied():
    f = eqxjit.filter_jit(lambda a, b: [a + b[0], b])
    value = np.zeros(3, np.float32)
    for _ in range(CALLS):
        out = f(value, [value] * 5)
    assert is_native(f)
    for i in range(50):
        value[:] = i
        out = f(value, [value] * 5)
        value[:] = -1
        assert out[0].tolist() == [2 * i] * 3


def test_modules_are_as_upstream_makes_them():
    def g(m):
        return eqx.tree_at(lambda m: m.weight, m, m.weight + 1)

    f = eqxjit.filter_jit(g)
    model = Layer(X, "a", ("b", 3))
    for _ in range(CALLS):
        out = f(model)
    theirs = eqx.filter_jit(g)(model)
    assert is_native(f)
    assert list(vars(out)) == list(vars(theirs))
    assert type(out) is Layer
    assert out.config == ("b", 3)
    assert weakref.ref(out)() is out
    with pytest.raises(Exception, match="annot"):
        out.weight = 1
    assert vars(out) is not vars(f(model))


class OddText(str):
    __hash__ = str.__hash__

    def __eq__(self, other):
        raise AssertionError("a guard compares keys of another class")


@pytest.mark.parametrize("order", [*itertools.permutations("abc")])
def test_dicts_match_in_whatever_order_they_were_filled(order):
    f = eqxjit.filter_jit(lambda d: d["a"] + d["b"] + d["c"])
    values = {"a": X, "b": X + 1, "c": X + 2}
    for _ in range(CALLS):
        f({name: values[name] for name in order})
    [match] = _found(_native.Match, lambda match: match(values))
    for names in itertools.permutations("abc"):
        assert match({name: values[name] for name in names}) == (*values.values(),)
        made_anew = {bytes([ord(name)]).decode(): values[name] for name in names}
        assert match(made_anew) == (*values.values(),)
        assert match({**made_anew, "d": X}) is None
        for other in names:
            assert match({"d" if name == other else name: X for name in names}) is None
            odd = {OddText(name) if name == other else name: values[name] for name in names}
            assert match(odd) is None


def test_cycles_through_constants_are_collected():
    class Static:
        pass

    static = Static()
    f = eqxjit.filter_jit(lambda x, s: (x, s))
    static.function = f
    for _ in range(CALLS):
        f(X, static)
    assert is_native(f)
    ref = weakref.ref(static)
    del static, f
    for _ in range(3):
        gc.collect()
    assert ref() is None


ARRAY = (0, False, 0, 1, native.ArrayImpl, bool, None)
ARRAY_RUN = (native._ARRAY_RUN, False, 5, 1, native.ArrayImpl, bool, None)


@pytest.mark.parametrize(
    "instructions",
    [
        [],
        ([],),
        ((),),
        ((99, False, 0, 1, None, None, None),),
        ((-1, False, 0, 1, None, None, None),),
        ((0, False, 0, 0, None, None, None),),
        ((0, False, 0, 2, None, None, None),),
        ((0, False, -1, 1, None, None, None),),
        (("0", False, 0, 1, None, None, None),),
        ((native._SAME_RUN, False, 1, 1, None, None, None),),
        ((native._SAME_RUN, False, 2, 1, (1,), None, None),),
    ],
)
def test_programs_out_of_bounds_are_refused(instructions):
    with pytest.raises((TypeError, ValueError)):
        _native.Program(instructions)


def test_calls_that_do_not_fit_a_program():
    match = _native.Match(_native.Program((ARRAY,)), None, None, None, (), 0, 1, 0)
    assert match(X) == (X,)
    assert match() is None
    assert match(X, X) is None
    with pytest.raises(TypeError):
        match(X, x=1)
    with pytest.raises(TypeError):
        _native.Match(None, None, None, None, (), 0, 1, 0)
    for numbers in [(2, 1, 0), (-1, 1, 0), (0, 1, -1)]:
        with pytest.raises(ValueError, match="bounds"):
            _native.Match(_native.Program((ARRAY,)), None, None, None, (), *numbers)
    # More arrays, or fewer, than it was told of.
    assert _native.Match(_native.Program((ARRAY,)), None, None, None, (), 0, 0, 0)(X) is None
    assert _native.Match(_native.Program((ARRAY,)), None, None, None, (), 0, 2, 0)(X) is None
    array, kinds = (
        (0, False, 0, 1, native.ArrayImpl, lambda value: type(value) is np.ndarray, None),
        [],
    )
    match = _native.Match(
        _native.Program((array,)),
        lambda value: kinds.append(value) or X,
        np.ndarray,
        lambda values: kinds.append(values) or ([X] if values[0].ndim else None),
        (),
        *(0, 1, 0),
    )
    value, scalar = np.ones(2), np.float32(1)
    assert (match(value), match(X), match(1), match(scalar)) == ((X,), (X,), None, None)
    assert kinds == [[value]]
    assert match(np.ones(())) is None
    kinds.clear()
    array = (*array[:5], lambda value: type(value) is np.float32, None)
    of_scalars = _native.Match(
        _native.Program((array,)),
        lambda value: kinds.append(value) or X,
        np.ndarray,
        bool,
        (),
        0,
        1,
        0,
    )
    assert (of_scalars(scalar), kinds) == ((X,), [scalar])
    for other in ([X, X], (X,), 1):
        assert (
            _native.Match(
                _native.Program((ARRAY,)), str, np.ndarray, lambda _, it=other: it, (), 0, 1, 0
            )(value)
            is None
        )
    take = (native._TAKE, False, 0, 1, None, None, None)
    rebuild = _native.Rebuild(_native.Program((take,)))
    assert rebuild([X]) is X
    assert rebuild(X) is X
    with pytest.raises(SystemError):
        rebuild([])
    for arguments in [(), ({0: [X]},), ([X], None), ([X], (), 1)]:
        with pytest.raises(TypeError):
            rebuild(*arguments)
    with pytest.raises(SystemError):
        _native.Rebuild(_native.Program((ARRAY,)))([X])
    with pytest.raises(SystemError):
        _native.Rebuild(_native.Program(()))([X])


def test_every_allocation_may_fail():
    model = {"a": [X] * 5, "b": Layer(X, (X, 1)), "c": Point(X, X), "d": ()}
    model["e"] = (frozenset(range(9)), 2j, ("a", (0.0, 10**20)))
    f = eqxjit.filter_jit(lambda t: t)
    for _ in range(CALLS):
        f(model)
    model["e"] = (frozenset(range(9)), complex(0, 2), ("a", (-0.0 + 0, 10**20)))
    match, *_ = _found(_native.Match, lambda match: match(model))
    arrays = list(match(model))
    [rebuild] = _found(_native.Rebuild, lambda rebuild: _makes(rebuild, arrays, model))
    # JAX's own code, which is asked about NumPy's arrays, doesn't bear it.
    run = _native.Program(((native._SEQUENCE, False, 5, 2, list, None, None), ARRAY_RUN))
    of_numpy = _native.Match(run, str, np.ndarray, list, (), 0, 5, 0)
    for action, argument in [(match, model), (rebuild, arrays), (of_numpy, [np.ones(2)] * 5)]:
        for n in range(200):
            result = with_failing_allocation(n, action, argument)
            if n > 100:
                assert result is not None
    assert_same(f(model), model)


def _makes(rebuild, arrays, expected):
    try:
        made = rebuild(arrays)
    except SystemError:
        return False
    return isinstance(made, dict) and made.keys() == expected.keys()


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
        ("1", "import sys; sys.modules['eqxjit._native'] = None"),
        ("1", _BUILT_EARLIER),
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
        assert "bind_match" not in f.specialized_source()
        """
    )


@pytest.mark.parametrize(
    ("create", "expected"),
    [
        ("_testcapi.run_in_subinterp(program)", {"works"}),
        ("interpreters.run_string(interpreters.create(), program)", {"refused", "works"}),
    ],
)
def test_other_interpreters_have_their_own_or_none(create, expected):
    """One that shares the GIL may have it; JAX itself can't be imported in either."""
    pytest.importorskip("_testcapi")
    printed = run(
        f"""
        import importlib, importlib.util
        import _testcapi

        program = '''if True:
            from importlib.machinery import ExtensionFileLoader
            from importlib.util import module_from_spec, spec_from_loader

            loader = ExtensionFileLoader("eqxjit._native", {_native.__file__!r})
            try:
                module = module_from_spec(spec_from_loader(loader.name, loader))
                loader.exec_module(module)
                same = module.Held(list, 0, (), (value := 10**9,), (), [], None, value)
                print("works" if same([value]) and not same([1]) else "is wrong", flush=True)
            except ImportError:
                print("refused", flush=True)
        '''
        names = ("_interpreters", "_xxsubinterpreters")
        [name, *_] = filter(importlib.util.find_spec, names)
        interpreters = importlib.import_module(name)
        {create}
        """
    )
    assert printed.strip() in (
        expected if sys.version_info < (3, 12) or "run_in" in create else {"refused"}
    )


@pytest.mark.parametrize("what", ["calls", "misses"])
def test_a_million_calls_keep_nothing(what):
    model = {"layers": [Layer(X, [X, 1.5], (i, [i])) for i in range(2)], "d": {"a": X}}
    f = eqxjit.filter_jit(lambda t, x: (t, x))
    for _ in range(CALLS):
        f(model, X)
    assert is_native(f)
    match, *_ = _found(_native.Match, lambda match: match(model, X))
    arguments = (model, X if what == "calls" else 1)
    for _ in range(1_000):
        match(*arguments)
    objects = [model, *model["layers"], X, model["layers"][0].config, Layer, 1.5]
    before, n_blocks = _counts(objects), sys.getallocatedblocks()
    for _ in range(1_000_000):
        match(*arguments)
    assert _counts(objects) == before
    assert abs(sys.getallocatedblocks() - n_blocks) < 1_000
