"""Tests of the native back end alone. All other tests run with both back ends."""

import collections
import contextlib
import gc
import itertools
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.fast.paths import C, Caller, Path
from tests.support import nodes
from tests.support.helpers import SPECIALIZING, Hooked, Own, assert_same, assert_specialized
from tests.support.models import Point
from tests.support.nodes import Layer
from tests.support.processes import run
from tests.support.profile import PROFILE
from tests.support.sides import CALLS

_native = pytest.importorskip("eqxjit._native")
pytestmark = pytest.mark.skipif(
    not eqxjit.native_enabled() or not SPECIALIZING, reason="the back end is switched off"
)

X = jnp.arange(3.0)


def tree():
    """Return a tree with each kind of node and static object that the back end reads."""
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
    """Return an action: a call that matches, calls that don't, or a call whose guard raises."""
    if what == "calls":

        def match():
            path.run(value, X)

        assert path(value, X) is not None
        return match
    if what == "misses":
        others = [{**value, "empty": 1}, {**value, "bag": nodes.Bag("other", X)}, {}, X]
        others += [{**value, "deep": Layer(X, X, [{"a": (1, [2.5, {4}])}])}]
        others += [{**value, "layers": [*value["layers"][:-1], Layer(X, [X, each])]} for each in X]

        def miss():
            # The second time, what differs is compared first.
            for other in [each for each in others for _ in range(2)]:
                assert path.run(other, X) is Caller.no_match
            assert path.run(value) is Caller.no_match
            assert path.run(value, x=X) is Caller.no_match

        return miss
    hook(lambda: 1 / 0)

    def fail():
        with contextlib.suppress(ZeroDivisionError):
            path.run(value, X)
            raise AssertionError

    return fail


@pytest.mark.parametrize("what", ["calls", "misses", "raises"])
def test_references_are_counted(what, hook):
    """If each call took a reference too many or too few, the counts would differ by thousands."""
    hooked = Hooked()
    value = {**tree(), "hooked": (X, hooked)}
    path = path_of(value, X)
    action = _repeated(path, what, hook, value)
    objects = [value, *value.values(), *value["layers"], X, 1.5, hooked, Layer, "weight", path.spec]
    objects += [vars(value["layers"][0]), path.fast, path.output, Own, None, True]
    objects += [value["deep"].size, value["deep"].size[0]]
    for _ in range(100):
        action()
    before, n_blocks = _counts(objects), sys.getallocatedblocks()
    for _ in range(N_CALLS):
        action()
    after = _counts(objects)
    assert all(abs(b - a) < 20 for b, a in zip(before, after, strict=True)), (before, after)
    assert abs(sys.getallocatedblocks() - n_blocks) < 1_000


# --- The user's code in the middle of a walk ----------------------------------------------------

# Each change has a function that creates an argument with a `Hooked` object in it, and a function
# that changes this argument. The `hash` of the `Hooked` object calls the latter.
CHANGES = {
    "a list loses its items": (lambda h: [h, X, X], lambda t: t.clear()),
    "a list gets more": (lambda h: [h, X, X], lambda t: t.extend([X] * 100)),
    "a dict loses its items": (lambda h: {"a": h, "b": X}, lambda t: t.clear()),
    "a Module loses its fields": (lambda h: Layer(h, X), lambda t: vars(t).clear()),
    "a Module gets another dict": (
        lambda h: Layer(h, X),
        lambda t: object.__setattr__(t, "__dict__", {}),
    ),
    "a list in a static list": (lambda h: Layer(X, X, [[h, 2], h]), lambda t: t.size[0].clear()),
    "a static dict": (lambda h: Layer(X, X, {"a": h, "b": 1}), lambda t: t.size.clear()),
    "a static field is replaced": (
        lambda h: Layer(X, X, [h, h]),
        lambda t: object.__setattr__(t, "size", None),
    ),
    "a static dataclass": (
        lambda h: Layer(X, X, nodes.Settings([h, 1])),
        lambda t: setattr(t.size, "value", None),
    ),
    "a node's children": (lambda h: nodes.Bag("l", [h], [h]), lambda t: t.items.clear()),
}


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_containers_that_change_in_the_middle_of_a_walk(change, is_second, hook):
    """The interrupted call may find anything, but Python survives and the next call is right.

    Only the container holds a reference to each part, so the change frees the parts.
    """
    make, action = CHANGES[change]
    f = eqxjit.filter_jit(lambda t, x: x * 2)
    for _ in range(CALLS):
        assert_same(f(make(Hooked()), X), X * 2)
    assert_specialized(f)
    for number in range(1, 6):
        value, counter = make(Hooked()), itertools.count(1)
        if is_second:
            # The next call compares the `Hooked` object first.
            assert_same(f(make(Own(2)), X), X * 2)

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
    """A guard runs code that drops all fast paths, including the one that is being matched."""
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


# --- Without the native back end --------------------------------------------------------------


def test_python_serves_without_the_native_back_end():
    """It may be switched off, missing, or a stale build from before a `git pull`."""
    run(
        """
        import contextlib, io, os, sys
        import equinox as eqx, jax, jax.numpy as jnp

        def imported():
            for name in [*sys.modules]:
                if name.startswith("eqxjit") and name != "eqxjit._native":
                    del sys.modules[name]
            import eqxjit
            return eqxjit

        def check(eqxjit):
            assert not eqxjit.native_enabled()
            model = eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0))
            f = eqxjit.filter_jit(lambda model, x: (model, model(x)))
            for _ in range(4):
                out, y = f(model, jnp.ones(2))
            assert eqx.tree_equal(out, model)
            assert f.specialized_source() is not None

        os.environ["EQXJIT_NATIVE"] = "0"
        check(imported())
        os.environ["EQXJIT_NATIVE"] = ""
        import eqxjit._native as native
        native.INTERFACE -= 1
        check(imported())
        from eqxjit.__main__ import main
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            main(["--info"])
        assert "built for a different version of eqxjit" in shown.getvalue()
        sys.modules["eqxjit._native"] = None
        check(imported())
        os.environ["EQXJIT_NATIVE"] = "1"
        try:
            imported()
        except ImportError as error:
            assert "EQXJIT_NATIVE=1" in str(error)
        else:
            raise AssertionError("imported")
        """
    )
