"""Plans made in C, straight from treedefs: they are those that Python makes by way of a plan."""

import collections
import dataclasses
import functools
import gc
import sys
import types
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings

import eqxjit
from eqxjit import _compat
from eqxjit._plan import native, native_planner
from eqxjit._plan.build import Example, build
from eqxjit._plan.inputs import Inputs
from eqxjit._plan.plan import Static
from eqxjit._plan.signature import Signature
from eqxjit._runtime import specialize
from eqxjit._trees.array_layout import ArrayLayout
from eqxjit._trees.given import NOTHING, Given
from eqxjit._trees.key_cache import KnownKey
from eqxjit._trees.out_spec import OutSpec
from eqxjit._trees.partition import DYNAMIC, partition, split_leaves
from eqxjit._trees.static_key import ByContent
from tests.support.allocations import with_failing_allocation
from tests.support.helpers import SPECIALIZING
from tests.support.inside import ARRAY_INSTRUCTION, native_shape_of
from tests.support.models import Layer, Point, mlp
from tests.support.profile import SCENARIOS
from tests.support.strategies import pairs

pytestmark = pytest.mark.skipif(
    not eqxjit.native_enabled(), reason="There is no native back end, or it is off."
)

X = jnp.arange(3.0)


class Named(collections.namedtuple("Named", "x y")):
    """Its class does more than make the tuple."""

    def __new__(cls, x, y):
        return super().__new__(cls, x, y)


def static_half(value):
    leaves, treedef = jax.tree.flatten(value)
    return split_leaves(leaves)[1], treedef


def programs(fun, *args, **kwargs):
    """The instructions for a call by a plan, and those that are made without one, expanded."""
    signature = Signature(fun, "f", "f")
    bound = signature.binder(lambda *bound: bound)(*args, **kwargs)
    arrays, static = partition(bound)
    leaves, treedef = static_half(fun(*args, **kwargs))
    inputs = Given(static, NOTHING)
    out_spec = OutSpec(treedef, leaves, inputs)
    if out_spec.varies:
        # That takes a plan.
        leaves, treedef = static_half(())
        out_spec = OutSpec(treedef, leaves, inputs)
    example = Example(*bound, static, inputs, arrays, [])
    plan = build(signature, ArrayLayout(0, 0), 0, [out_spec], example, False, lambda: None)
    seen = []
    spy = mock.Mock(side_effect=lambda *args: seen.append(args))
    with (
        mock.patch.object(native, "native_call", spy),
        mock.patch.object(native_planner, "native_call", spy),
    ):
        native.encode(plan, lambda: None)
        native_planner.plan_natively(signature, 0, static, *out_spec.resolve(inputs))
    return [
        (names, expanded(inputs), expanded(output), n_arrays)
        for names, inputs, output, _, n_arrays, *_ in seen
    ], len(seen[1][1])


def expanded(program):
    """A program without repetitions, so that it doesn't matter which of them were found."""
    result, at = [], 0
    while at < len(program):
        op, keeps, n, size, first, second, third = program[at]
        below = expanded(program[at + 1 : at + size])
        if op in (native._REPEAT, native._MAKE_RUN):
            result += below * n
        elif op in (native._ARRAY_RUN, native._TAKE_RUN):
            result += [("array", shown(first), shown(second))] * n
        elif op in (ARRAY_INSTRUCTION, native._TAKE):
            result.append(("array", shown(first), shown(second)))
        elif op in (native._SAME_RUN, native._CONSTANT_RUN):
            result += [("item", *shown(value)) for value in first]
        elif op in (native._IS, native._SAME, native._CONSTANT):
            result.append(("item", *shown(first)))
        elif op in (native._HELD_OR, native._TYPE_AND):
            # Which object is looked at first differs where they are alike.
            predicate = third if op == native._HELD_OR else second
            result.append(("container", shown(first), shown(predicate)))
        elif op == native._IS_OR:
            result.append(("equal", type(first), shown(second)))
        else:
            objects = shown(first), shown(second), shown(third)
            result += [(op, keeps, n, len(below), *objects), *below]
        at += size
    return result


def shown(value):
    """What is compared of an object in an instruction: of most, which one it is."""
    if isinstance(value, functools.partial):
        return value.func, [*map(shown, value.args)], [*map(key, value.keywords.values())]
    if isinstance(value, types.MethodType):
        return value.__func__, key(value.__self__.key)
    if isinstance(value, Static):
        return value.match, type(value.value), key(value.key), value.may_become_node
    if isinstance(value, tuple | dict | _compat.PyTreeDef):
        return type(value), repr(value)
    if type(value) in (int, float, str, bytes, bool):
        return type(value), repr(value)
    if isinstance(value, ByContent):
        return repr(value.value)
    return "object", id(value)


class Unknown:
    """A class that may yet be registered as one of nodes."""


UNKNOWN = Unknown()


class Meta(type):
    """Its classes don't compare by identity, their objects do."""

    def __eq__(cls, other):
        return cls is other

    __hash__ = type.__hash__


class OfMeta(metaclass=Meta):
    pass


@dataclasses.dataclass(frozen=True)
class Settings:
    rate: object


def objects():
    """Objects that compare by identity, and others, of a few classes."""
    layers = [Layer(X, Unknown(), Unknown()) for _ in range(3)]
    functions = [jnp.tanh, max, len, lambda: 1, lambda: 2]
    return [Unknown(), UNKNOWN, OfMeta, Meta, Unknown, OfMeta(), OfMeta(), *functions, *layers]


def key(value):
    """What is compared of a typed static key."""
    return value.typed if isinstance(value, KnownKey) else value


TREES = {
    "an array": lambda: X,
    "an MLP": mlp,
    "MLPs": lambda: [mlp() for _ in range(10)],
    "layers that differ": lambda: [Layer(X, X, i) for i in range(10)],
    "runs of the same": lambda: [Layer(X, "a", f"name {i // 4}") for i in range(15)],
    "fields that are equal": lambda: [Layer(X, config=1000.0 if i % 3 else 1000) for i in range(9)],
    "a leaf that is also in a field": lambda: [Layer(UNKNOWN, UNKNOWN, UNKNOWN), UNKNOWN, X],
    "runs of two and three": lambda: [*[Layer(X, 1)] * 2, *[Layer(X, 2)] * 3, Layer(X, 2.0), X],
    "tuples in fields": lambda: [Layer(X, jnp.tanh, (i // 5, "a")) for i in range(10)],
    "lists in fields": lambda: [Layer(X, config=[i // 5, "a"]) for i in range(10)],
    "two, and then a run": lambda: [Point(X, 1), Point(X, 1), X, X, X, X, Point(X, 1), Point(X, 1)],
    "arrays and others": lambda: [X, X, X, 1, X, X, X, X, "a", X, None, None, None, None, X],
    "numbers": lambda: (1, 2.0, True, "a", b"b", 1000, -5, -6, 256, 257, 1 << 70),
    "zeros": lambda: [0.0, -0.0, 0, False, float("nan"), X],
    "few numbers": lambda: [0.0, float("nan"), 1000],
    "objects": objects,
    "dataclasses": lambda: [Settings(1), Settings(1.0), Layer(X, Settings((0.0,)), Settings([]))],
    "functions": lambda: [jax.nn.relu] * 5 + [jnp.tanh, jax.nn.relu],
    "dicts": lambda: {"b": 1, "a": {"c": X, "d": {}}, "e": {2: X, 1: 1}, "f": {b"g": X}},
    "dicts with other keys": lambda: {"t": {(1, 2): X, (1, 3): 1}, "n": {1.5: X}},
    "ordered dicts": lambda: collections.OrderedDict(b=X, a=collections.OrderedDict()),
    "defaultdicts": lambda: collections.defaultdict(list, {"b": X, "a": 1}),
    "named tuples": lambda: (Point(X, 1), Point(None, ()), [Point(X, X)] * 5),
    "named tuples of a kind": lambda: Named(X, 1),
    "partials": lambda: eqx.Partial(max, X, key=X),
    "NumPy": lambda: [np.ones(2), np.float32(1), np.ones(2), np.ones(2), X],
    "states": lambda: optax.adamw(1e-3).init(eqx.filter(mlp(), eqx.is_array)),
    "nothing": lambda: [(), [], {}, None, Point((), None)],
    "a transformer's attention": lambda: eqx.nn.MultiheadAttention(2, 4, key=jax.random.key(0)),
}


@pytest.mark.parametrize("kind", TREES)
def test_the_same_as_by_a_plan(kind):
    tree = TREES[kind]()
    for fun, arguments in [
        (lambda tree, x: x, (tree, X)),
        (lambda tree, x: (tree, x), (tree, X)),
        (lambda x, tree: [tree, tree], (X, tree)),
    ]:
        (by_plan, natively), _ = programs(fun, *arguments)
        assert natively == by_plan


def test_one_object_of_each_class_is_asked_about():
    leaves = [Unknown() for _ in range(9)]
    layers = [Layer(X, config=Unknown()) for _ in range(9)]
    signature = Signature(lambda tree: None, "f", "f")
    _, static = partition((([leaves, layers, Settings(1)],), {}))
    with mock.patch.object(Inputs, "static", autospec=True, side_effect=Inputs.static) as spy:
        native_planner.plan_natively(signature, 0, static, *static_half(()))
    asked = [(type(call.args[1]), call.args[2]) for call in spy.mock_calls]
    assert sorted(asked, key=str) == [(Settings, True), (Unknown, False), (Unknown, True)]


@settings(max_examples=SCENARIOS)
@given(pairs())
def test_the_same_as_by_a_plan_for_any_tree(pair):
    tree, _ = pair
    value = tree()
    try:
        (by_plan, natively), _ = programs(lambda tree: tree, value)
    except Exception:
        # For a plan, or for the generic path. `test_plan.py` has trees that mustn't come here.
        return
    assert natively == by_plan


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda f: f(X, 1), ["a", "b", "c", "d"]),
        (lambda f: f(X, 1, d=X, c=2), ["a", "b", "c", "d"]),
        (lambda f: f(X, d=X, b=2), ["a", "b", "d", "c"]),
        (lambda f: f(X), ["a", "b", "c", "d"]),
    ],
)
def test_parameters_in_the_order_of_their_arrays(call, names):
    def f(a, /, b=1, *, c=X, d=None):
        return (a, b)

    (by_plan, natively), _ = call(functools.partial(programs, f))
    assert natively == by_plan
    assert natively[0] == names


def test_what_is_alike_is_planned_once():
    for tree in ([mlp() for _ in range(100)], [[1, Layer(X, "a")] for _ in range(100)], [X] * 100):
        _, size = programs(lambda tree: tree, tree)
        assert size < 40


def test_what_is_for_a_plan():
    def chain(depth):
        return X if not depth else [chain(depth - 1)]

    holey = mlp()
    object.__delattr__(holey.layers[0], "use_bias")
    for tree in (holey, chain(250)):
        static = partition(((tree,), {}))[1]
        with pytest.raises((ValueError, RecursionError)):
            native_planner.plan_natively(
                Signature(lambda tree: tree, "f", "f"), 0, static, (), jax.tree.structure(())
            )
    for fun, args, kwargs in [(lambda *rest: 0, (X, X), {}), (lambda **more: 0, (), {"a": X})]:
        static = partition((args, kwargs))[1]
        with pytest.raises(native.Unsupported):
            native_planner.plan_natively(
                Signature(fun, "f", "f"), 0, static, (), jax.tree.structure(())
            )


def columns_of(tree):
    leaves, treedef = static_half(tree)
    return [*_compat.treedef_columns(treedef), leaves]


def plan(*columns, inputs=True, static_of=None, shape_of=None):
    """Plan by hand."""
    constants = _compat.LEAF_KIND, _compat.KIND_CLASSES, DYNAMIC, _compat.MISSING
    array = (_compat.ArrayImpl, bool) if inputs else (None, None)
    shape_of = shape_of or native_shape_of(inputs)
    return _compat._native.plan(*columns, *constants, *array, shape_of, None, static_of)


def changed(place, value):
    def change(columns):
        columns[place] = value(columns[place])

    return change


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        changed(0, lambda kinds: kinds[1:]),
        changed(1, lambda arities: (*arities[:-1], 1)),
        changed(1, lambda arities: (*arities[:-1], 5)),
        changed(1, lambda arities: (*arities[:-1], -1)),
        changed(1, lambda arities: (*arities[:-1], "2")),
        changed(2, lambda metadata: (1,) * len(metadata)),
        changed(3, lambda classes: (1,) * len(classes)),
        changed(4, lambda leaves: leaves[1:]),
        changed(4, lambda leaves: (*leaves, 1)),
    ],
)
def test_columns_that_do_not_fit_are_refused(change, inputs):
    columns = columns_of(((X, mlp(), {"a": 1}), {}))
    plan(*columns, inputs=inputs, static_of=lambda *_: ())
    change(columns)
    with pytest.raises((ValueError, TypeError)):
        plan(*columns, inputs=inputs, static_of=lambda *_: ())


@pytest.mark.parametrize("answer", [None, [], ValueError])
def test_answers_that_do_not_fit_are_refused(answer):
    def static_of(value, is_leaf):
        if answer is ValueError:
            raise answer
        return answer

    with pytest.raises((ValueError, TypeError)):
        plan(*columns_of(((jnp.tanh,), {})), static_of=static_of)
    for shape in (answer, (0,), ("0", (), 0), (0, [], 0)):
        with pytest.raises((ValueError, TypeError)):
            plan(*columns_of((({},), {})), shape_of=lambda cls, shape=shape: shape)


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize(
    ("names", "n"),
    [
        (("weight", "extra", "config"), 1),
        (("weight", "extra", "config"), 3),
        (("weight", "extra", "config"), -1),
        (("weight", "extra", "config", "more"), 2),
        (("weight", "extra", "more", "config"), 3),
        (("weight", "config"), 1),
        (("weight",), 2),
    ],
)
def test_fields_that_do_not_fit_are_refused(names, n, inputs):
    def shape_of(cls):
        return (*native_shape_of(inputs)(cls)[:1], names, n) if cls is Layer else (1, (), 0)

    columns = columns_of(([Layer(X, X)], [])) if inputs else columns_of([Layer(X, X)])
    with pytest.raises(ValueError, match="isn't whole"):
        plan(*columns, inputs=inputs, shape_of=shape_of)


def test_every_allocation_may_fail():
    tree = ([X] * 5, {"a": X, "b": 1.5}, [Layer(X, i // 4) for i in range(6)], (1, 2, 3, 4, "a"))
    for columns, inputs in [(columns_of(((tree,), {})), True), (columns_of(tree), False)]:
        expected = plan(*columns, inputs=inputs)
        for n in range(600):
            result = with_failing_allocation(n, plan, *columns, inputs=inputs)
            assert result is None or result == expected
        assert result == expected


def test_planning_keeps_nothing():
    tree = (X, mlp(), [Layer(X, i // 4) for i in range(9)], {"a": 1.5, "b": "c"}, jnp.tanh)
    leaves, inputs = columns_of(tree), columns_of(((tree,), {}))
    known = (((native._IS, False, 0, 1, jnp.tanh, None, None)),)

    def counts():
        gc.collect()
        objects = [*leaves, *inputs, X, None, True, jnp.tanh, Layer, "weight", known]
        return [sys.getrefcount(each) for each in objects], len(gc.get_objects())

    def use():
        plan(*inputs, static_of=lambda *_: known)
        plan(*leaves, inputs=False)
        with pytest.raises(TypeError):
            plan(*inputs, static_of=lambda *_: None)

    for _ in range(20):
        use()
    before, n_before = counts()
    for _ in range(300):
        use()
    after, n_after = counts()
    assert all(abs(b - a) < 20 for b, a in zip(before, after, strict=True))
    assert abs(n_after - n_before) < 100


@pytest.mark.skipif(not SPECIALIZING, reason="nothing is specialised")
class TestCalls:
    @pytest.fixture
    def plans(self, monkeypatch):
        """The plans that are made."""
        made, original = [], specialize.build
        monkeypatch.setattr(specialize, "build", lambda *a: made.append(a) or original(*a))
        return made

    def test_no_plan_is_made_of_a_training_step(self, plans):
        optimiser = optax.adamw(1e-3)

        @eqxjit.filter_jit
        def step(model, state, x):
            grads = eqx.filter_grad(lambda model: jnp.sum(model(x) ** 2))(model)
            updates, state = optimiser.update(grads, state, eqx.filter(model, eqx.is_array))
            return eqx.apply_updates(model, updates), state

        model = eqx.nn.MLP(3, 3, 4, 1, activation=lambda x: jnp.sin(x), key=jax.random.key(0))
        state = optimiser.init(eqx.filter(model, eqx.is_array))
        for _ in range(4):
            model, state = step(model, state, X)
        assert type(step.__call__) is _compat._native.Call
        assert not plans

    def test_no_structure_is_too_large(self, plans):
        f = eqxjit.filter_jit(lambda tree, x: x + 1)
        tree = [[i, float(i), None] for i in range(30_000)]
        for i in range(3):
            assert f(tree, X + i).tolist() == (X + i + 1).tolist()
        assert not plans
        assert type(f.__call__) is _compat._native.Call

    def test_what_is_handed_back_takes_a_plan(self, plans):
        f = eqxjit.filter_jit(lambda tree, x: (tree, x + 1))
        for _ in range(4):
            config = [1, 2]
            layer, _ = f(Layer(X, config=config), X)
            assert layer.config is config
        assert plans

    def test_what_comes_twice_takes_a_plan(self, plans):
        """Which has it looked at once a call."""
        f = eqxjit.filter_jit(lambda tree, x: x + 1)
        config = [1, 2]
        for _ in range(4):
            f([Layer(X, config=config), Layer(X, config=config)], X)
        assert plans

    def test_a_plan_is_made_when_someone_asks(self, plans):
        f = eqxjit.filter_jit(lambda tree, x: (tree, x + 1))
        tree = [mlp() for _ in range(3)]
        for _ in range(3):
            f(tree, X)
        assert not plans
        source = f.specialized_source()
        assert "def _lambda(tree, x):" in source
        assert len(plans) == 1
        # It shows what C checks and makes.
        assert "is MLP" in source
        assert "bind_match" not in source

    def test_a_call_that_python_cannot_make_has_a_source(self):
        """Where only a node's own flatten tells what is handed back."""
        f = eqxjit.filter_jit(lambda tree, x: (tree, x + 1))
        for _ in range(4):
            f([jax.tree_util.Partial(len, Layer(X, config=[1, 2])) for _ in range(5)], X)
        source = f.specialized_source()
        assert "bind_match" in source
        assert "def _lambda(tree, x):" in source

    @pytest.mark.parametrize(("n", "name"), [(0, "array"), (1, "array"), (2, "arrays")])
    def test_its_source_names_what_jax_returns(self, plans, n, name):
        """JAX returns the only array of an output as it is."""
        f = eqxjit.filter_jit(lambda x: ([x] * n, "text"))
        for _ in range(3):
            f(X)
        assert not plans
        assert f" {name} = jitted(" in f.specialized_source()
