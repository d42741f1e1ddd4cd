"""The call plan: what the generated guards hold for, and which one fails first."""

import collections
import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import eqxjit
from eqxjit._diagnostics import description as _description
from eqxjit._diagnostics import history as _history
from eqxjit._plan.budget import Budget
from eqxjit._plan.build import Example, build
from eqxjit._plan.call_source import Links, generate
from eqxjit._plan.check import first_mismatch
from eqxjit._plan.native import encode, native_enabled
from eqxjit._plan.native_planner import plan_natively
from eqxjit._plan.signature import VAR_KEYWORD, VAR_POSITIONAL, Signature
from eqxjit._runtime.traced import CacheMiss
from eqxjit._trees.array_layout import ArrayLayout
from eqxjit._trees.given import NOTHING, Given
from eqxjit._trees.numpy_inputs import NumpyInputs
from eqxjit._trees.out_spec import OutSpec
from eqxjit._trees.partition import partition
from tests.support.profile import SCENARIOS
from tests.support.strategies import pairs

X = jnp.arange(3.0)


def ignore(*_):
    pass


def planned(fun, *args, **kwargs):
    """Return the plan of a call, and a function that returns whether its guards hold.

    It asks generated Python, and the native back end with a program made of the plan, and with one
    made without it: all must agree.
    """
    signature = Signature(fun, "f", "f")
    args, kwargs = signature.binder(lambda args, kwargs: (args, kwargs))(*args, **kwargs)
    leaves, static = partition((args, kwargs))
    inputs = Given(static, NOTHING)
    out_tree = jax.tree.structure(())
    out_spec = OutSpec(out_tree, (), inputs)
    example = Example(args, kwargs, static, inputs, leaves, [])
    layout = ArrayLayout(0, 0)
    plan = build(signature, layout, 0, [out_spec], example, False, ignore)
    entry = SimpleNamespace(
        unclassified=False,
        rebuild=ignore,
        returns_given=lambda _: False,
        is_unmodified=lambda _=None: True,
    )
    jitted, otherwise = lambda *_: [], lambda *_, **__: "otherwise"
    own = NumpyInputs()
    links = Links(jitted, otherwise, *[ignore] * 4, own.own, own.own_arrays, itertools.repeat(None))
    programs = [None]
    if native_enabled():
        programs += [encode(plan, ignore)]
        kinds = {parameter.kind for parameter in signature.parameters}
        if kinds.isdisjoint((VAR_POSITIONAL, VAR_KEYWORD)):
            programs += [plan_natively(signature, 0, static, (), out_tree)]
    calls = []
    for native in programs:
        source = generate(plan, native, entry, "entry", CacheMiss, Budget(1.0, 0))
        calls.append(source.make(*links))

    def holds(*args, **kwargs):
        [held] = {call(*args, **kwargs) == () for call in calls}
        return held

    return plan, holds


def mismatch(plan, *args, **kwargs):
    return first_mismatch(
        plan, *plan.signature.binder(lambda args, kwargs: (args, kwargs))(*args, **kwargs)
    )


@settings(max_examples=SCENARIOS)
@given(pairs())
def test_generated_guards_hold_where_the_plan_finds_no_mismatch(pair):
    tree, other = pair
    try:
        plan, holds = planned(lambda tree: None, tree())
    except Exception:
        # What the generic path alone serves.
        return
    assert mismatch(plan, tree()) is None
    assert holds(tree())
    assert holds(other()) is (mismatch(plan, other()) is None)


class Layer(eqx.Module):
    weight: Any
    sizes: Any = eqx.field(static=True, default=(1, 2))


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_pytree_with_keys_class
class Registered:
    def __init__(self, child, data):
        self.child, self.data = child, data

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("child"), self.child)], self.data

    @classmethod
    def tree_unflatten(cls, data, children):
        return cls(*children, data)


def with_attribute(module):
    object.__setattr__(module, "another", 1)
    return module


DEEP = {"layers": [Layer(X), Layer(X, (1, 3))]}

#: What was planned, what comes, and the path of the first difference below the argument.
CASES = {
    "an array": (X, 1.0, ""),
    "no array": (1, X, ""),
    "True for 1": ([1, "a"], [True, "a"], "[0]"),
    "-0.0": ((1, 0.0), (1, -0.0), "[1]"),
    "a longer list": ([X], [X, X], ""),
    "a longer list, below": ({"a": [X]}, {"a": [X, X]}, "['a']"),
    "a tuple": ([X], (X,), ""),
    "a run of arrays": ([X] * 9, [X] * 7 + [2, X], "[7]"),
    "a run of numbers": ([X, *range(300, 320)], [X, *range(300, 319), 319.0], "[20]"),
    "a run of zeros": ([0.0] * 5, [0.0] * 3 + [-0.0, 0.0], "[3]"),
    "a run of layers": ([Layer(X)] * 6, [Layer(X)] * 5 + [Layer(X, (1, 3))], "[5].sizes"),
    "a dict": ({"a": X, "b": 1}, {"a": X, "b": 2}, "['b']"),
    "a dict's keys": ({"a": X}, {"b": X}, ""),
    "keys of another type": ({1: X}, {True: X}, ""),
    "keys of types": ({1: X, 2.0: X}, {True: X, 2.0: X}, ""),
    "an ordered dict": (
        collections.OrderedDict(a=X, b=1),
        collections.OrderedDict(b=1, a=X),
        "",
    ),
    "a named tuple": (Point(X, 1), Point(X, 2), ".y"),
    "a static field": (Layer(X), Layer(X, [1, 2]), ".sizes"),
    "a field": (Layer(X), Layer(1), ".weight"),
    "a field more": (Layer(X), with_attribute(Layer(X)), ""),
    "nested": (DEEP, {"layers": [Layer(X), Layer(2, (1, 3))]}, "['layers'][1].weight"),
    "metadata": (Registered(X, [1]), Registered(X, [2]), ""),
    "a child": (Registered(X, 1), Registered(2, 1), ".child"),
    "None": ([None], [X], "[0]"),
    "a NumPy array": (np.ones(2), [np.ones(2)], ""),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_mismatch_is_named(case):
    value, other, path = CASES[case]
    plan, holds = planned(lambda tree: None, value)
    assert mismatch(plan, value) is None
    assert holds(value)
    assert mismatch(plan, other) == f"tree{path}"
    assert not holds(other)


@pytest.mark.parametrize("value", [(1, 2), ("a", "b"), (1, "a"), 1000, 1.5, "text", b"text", [1]])
def test_equal_values_need_not_be_the_same(value):
    plan, holds = planned(lambda tree: None, Layer(X, value))
    same = eval(repr(value))
    assert same is not value or type(value) is str
    assert mismatch(plan, Layer(X, same)) is None
    assert holds(Layer(X, same))


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (lambda f: f(X, 1, 2, c=3, d=4, e=5), None),
        (lambda f: f(X, 0, 2, c=3, d=4, e=5), "b"),
        (lambda f: f(X, 1, 0, c=3, d=4, e=5), "rest[0]"),
        (lambda f: f(X, 1, c=3, d=4, e=5), "rest[0]"),
        (lambda f: f(X, 1, 2, 3, c=3, d=4, e=5), "rest[1]"),
        (lambda f: f(X, 1, 2, c=0, d=4, e=5), "c"),
        (lambda f: f(X, 1, 2, d=4, e=5), "c"),
        (lambda f: f(X, 1, 2, c=3, d=0, e=5), "more['d']"),
        (lambda f: f(X, 1, 2, c=3, d=4), "more['e']"),
        (lambda f: f(X, 1, 2, c=3, d=4, e=5, g=6), "more['g']"),
    ],
)
def test_arguments_are_named_as_the_user_does(call, path):
    def fun(a, b, *rest, c=0, **more):
        raise AssertionError

    plan, holds = planned(fun, X, 1, 2, c=3, d=4, e=5)
    assert call(lambda *args, **kwargs: mismatch(plan, *args, **kwargs)) == path
    assert call(holds) is (path is None)


def test_a_large_tree_is_explained_by_its_first_guard_that_fails(monkeypatch):
    monkeypatch.setattr(_history, "template_of", lambda *_: _description.Template(UNKNOWN, ()))
    f = eqxjit.filter_jit(lambda model, x: x)
    for _ in range(3):
        f(DEEP, X)
    assert f.specialized_source() is not None
    f({"layers": [Layer(X), Layer(X, (1, 4))]}, X)
    assert "the first that differs is `model['layers'][1].sizes`" in f.traces()[-1].reason


UNKNOWN = _description.UNKNOWN
