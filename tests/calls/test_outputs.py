"""Outputs: a call returns what the function returned, and new containers in each call."""

import collections
import dataclasses
import functools
import gc
import math
import weakref
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxjit
from tests.support import inside
from tests.support.helpers import Twins, assert_same, assert_specialized
from tests.support.models import Point
from tests.support.sides import CALLS, both

x = jnp.arange(3.0)


class Layer(eqx.Module):
    weight: Any
    bias: Any = None
    name: str = eqx.field(static=True, default="layer")

    def __call__(self, x):
        return self.weight * x


class Child(Layer):
    extra: Any = 1

    @property
    def doubled(self):
        return 2 * self.weight


class Slotted(eqx.Module):
    """A class with slots, whose instances have a different memory layout."""

    __slots__ = ("note",)
    weight: Any


Scalar = TypeVar("Scalar")


class Typed(eqx.Module, Generic[Scalar]):
    weight: Any
    class_: int = 1


class PointChild(Point):
    """A subclass, with a method and an attribute of its own."""

    @property
    def total(self):
        return self.x + self.y


Replaced = collections.namedtuple("Replaced", "x y")
_new = Replaced.__new__
Replaced.__new__ = lambda cls, *args: _new(cls, *args)


class Opaque:
    """A class that isn't a pytree, so its objects are static."""


opaque = Opaque()
index = eqx.nn.StateIndex(jnp.zeros(3))

RETURNED = {
    "array": lambda x: x + 1,
    "bfloat16": lambda x: x.astype(jnp.bfloat16),
    "typed keys": lambda x: jax.random.split(jax.random.key(x[0].astype(int)), 3),
    "nothing": lambda x: (),
    "static float": lambda x: -0.0,
    "NaN": lambda x: float("nan"),
    "an argument": lambda x: x,
    "the same array twice": lambda x: [y := x * 2, y, (y, x)],
    "NumPy constant": lambda x: (np.ones(3, np.float32), np.float32(2), np.arange(3), x),
    "named tuple's subclass": lambda x: PointChild(x),
    "named tuple of another `__new__`": lambda x: Replaced(x, 1),
    "Modules": lambda x: Layer(Layer(x, 1, name="a"), [Layer(x + 1), None], name="b"),
    "Module's subclass": lambda x: Child(x, x + 1, "c", x + 2),
    "Module with a slot": lambda x: Slotted(x),
    "generic Module": lambda x: [Typed[float](x), Typed(1, x)],
    "State": lambda x: eqx.nn.State(index).set(index, x),
    "a large tree": lambda x: [{"x": x + i, "i": i, "p": Point(i, (x,))} for i in range(12)],
    "items that differ in a type": lambda x: [(x, one) for one in (1, True, 1.0) * 3],
    "items that differ in a static field": lambda x: [Layer(x, name=str(i)) for i in range(9)],
    "deep": lambda x: functools.reduce(lambda t, i: [t, {"i": i}], range(40), x),
}


@pytest.mark.parametrize("name", RETURNED)
def test_everything_comes_out_as_upstream_returns_it(name):
    fun = RETURNED[name]
    twins = Twins(fun)
    for i in range(CALLS):
        ours, theirs = twins.ours(x + i), twins.upstream(x + i)
        assert_same(ours, theirs)
        for node, twin in zip(nodes(ours), nodes(theirs), strict=True):
            assert type(node) is type(twin)
            assert list(vars_of(node)) == list(vars_of(twin))
    assert_specialized(twins.ours.jitted)
    assert (twins.ours.traces, twins.upstream.traces) == (1, 1)


def nodes(tree):
    """Return a tree, and all trees below it."""
    found = [tree]
    for node in found:
        if not jtu.all_leaves([node]) and node is not None:
            found.extend(jtu.tree_leaves(node, is_leaf=lambda child, node=node: child is not node))
    return found


def vars_of(node):
    """Return the names of an object's attributes, in order."""
    return node if isinstance(node, dict) else getattr(node, "__dict__", {})


@both
def test_modules_come_out_whole(filter_jit):
    """A returned Module is like one that its class created: frozen, equal, with all attributes."""
    f = filter_jit(lambda x: Child(x, (x, 1), "name", x + 2))
    for i in range(CALLS):
        out, made = f(x + i), Child(x + i, (x + i, 1), "name", x + i + 2)
        assert bool(eqx.tree_equal(out, made))
        assert_same((out.doubled, out(x)), (made.doubled, made(x)))
        assert (repr(out), vars(out).keys()) == (repr(made), vars(made).keys())
        with pytest.raises(dataclasses.FrozenInstanceError):
            out.weight = x
        assert_same(eqx.tree_at(lambda m: m.bias[0], out, x).bias[0], x)


@both
def test_static_objects_come_out_by_identity(filter_jit):
    """This holds for hashable and unhashable objects."""
    values = [opaque, jnp.linspace, {1, 2}, bytearray(b"a"), collections.deque([1]), slice(1, 2)]
    holder = Layer(jnp.tanh, bias=opaque)
    f = filter_jit(lambda x: {"values": values, "module": holder, "x": x})
    for _ in range(CALLS):
        out = f(x)
        assert [*map(id, out["values"])] == [*map(id, values)]
        assert out["module"].weight is jnp.tanh
        assert out["module"].bias is opaque
        assert_same(out["x"], x)


@both
def test_a_static_object_made_while_tracing_is_one(filter_jit):
    """The function is traced once, so each call returns the same object."""
    f = filter_jit(lambda x: (x, Opaque(), lambda: x.shape))
    _, first, function = f(x)
    for i in range(CALLS):
        _, again, again_function = f(x + i)
        assert again is first
        assert again_function is function
        assert function() == (3,)
    _, other, _ = f(jnp.ones(4))
    assert other is not first


@both
def test_containers_are_fresh_on_every_call(filter_jit):
    """A change of one call's result doesn't show in the next call's result."""

    def make(x):
        return {"list": [x, [1]], "dict": {"a": x}, "module": Layer([x], {"k": 1})}

    f = filter_jit(make)
    previous = []
    for i in range(2 * CALLS):
        out = f(x + i)
        assert_same(out, make(x + i))
        for node in nodes(out):
            if isinstance(node, (list, dict, Layer)):
                assert all(node is not old for old in previous)
                previous.append(node)
        out["list"][1].append("changed")
        out["list"].clear()
        out["dict"]["b"] = "changed"
        out["module"].bias.clear()
        object.__setattr__(out["module"], "name", "changed")
        out["extra"] = 1


def of_its_shape(x):
    if x.ndim == 0:
        return {"dtype": str(x.dtype), "kind": Layer(x)}, Typed(x)
    return [Layer(row, i) for i, row in enumerate(x)], Child(x, x.shape)


@both
def test_the_output_is_that_of_the_trace_that_ran(filter_jit):
    """The inputs have one structure, but several shapes and dtypes, and the calls alternate."""
    f = filter_jit(of_its_shape)
    inputs = [jnp.ones(()), jnp.ones(3), jnp.ones(4), jnp.ones((), bool), jnp.ones((0, 2))]
    for i in range(2 * CALLS):
        for value in inputs if i % 2 else inputs[::-1]:
            assert_same(f(value), of_its_shape(value))


@dataclasses.dataclass(frozen=True)
class Config:
    n: int
    note: Any = dataclasses.field(default=None, compare=False)


class AllEqual:
    def __init__(self, note):
        self.note = note

    def __eq__(self, other):
        return type(other) is AllEqual

    def __hash__(self):
        return 0


class Noted(tuple):
    note = None


def noted(note):
    made = Noted((1,))
    made.note = note
    return made


EQUAL_BUT_NOT_ALIKE = {
    "a field that isn't compared": (lambda note: Config(1, note), lambda made: made.note),
    "an `==` of its own": (AllEqual, lambda made: made.note),
    "a subclass of a container": (noted, lambda made: made.note),
    "a key of a dict": (lambda note: {AllEqual(note): 1}, lambda made: next(iter(made)).note),
}


@pytest.mark.parametrize("container", [list, Layer])
@pytest.mark.parametrize(("first", "then"), [(0, 1), (1, 2), (2, 0), (1, 1)])
def test_traces_that_return_so_many_arrays(first, then, container):
    """JAX returns a single array as it is, and several arrays in a list."""

    def f(x):
        arrays = [x + i for i in range((first, then)[x.ndim])]
        if container is Layer:
            return Layer(arrays[0] if len(arrays) == 1 else arrays)
        return arrays

    twins = Twins(f)
    for _ in range(2):
        twins(jnp.float32(1))
        assert_specialized(twins.ours.jitted)
        twins(x)
        with jax.disable_jit():
            assert_same(twins.ours(x), f(x))
        assert_same(jax.vmap(twins.ours)(jnp.eye(3)), jax.vmap(f)(jnp.eye(3)))
        assert_same(jax.jit(twins.ours)(x), jax.jit(f)(x))
    compiled = twins.ours.jitted.lower(x).compile()
    for _ in range(CALLS):
        assert_same(compiled(x), f(x))


@both
@pytest.mark.parametrize("name", EQUAL_BUT_NOT_ALIKE)
def test_a_static_object_is_that_of_the_trace_that_ran(filter_jit, name):
    """The objects of two traces may be equal and still differ."""
    make, note_of = EQUAL_BUT_NOT_ALIKE[name]
    f = filter_jit(lambda x: Layer(x, name=make(x.shape)))
    for _ in range(CALLS):
        for n in (1, 2, 1):
            assert note_of(f(jnp.ones(n)).name) == (n,)


@both
def test_what_is_called_for_its_effect_alone(filter_jit):
    """Without an output to wait for, the effect still happens in every call."""
    seen = []

    @filter_jit
    def f(x):
        jax.debug.callback(lambda x: seen.append(float(x.sum())), x)

    for i in range(CALLS):
        assert f(x * i) is None
        jax.effects_barrier()
    assert seen == [3.0 * i for i in range(CALLS)]


# --- Whose static objects are returned, and how long they live ---------------------------------

RETURNING = {
    "the first": lambda x, a, b: (x * a.n, a),
    "the second": lambda x, a, b: (x * a.n, b),
    "both": lambda x, a, b: (x * a.n, b, a),
    "none": lambda x, a, b: x * a.n,
}


@pytest.mark.parametrize("which", RETURNING)
def test_each_argument_is_returned_as_the_function_does(which):
    body = RETURNING[which]
    f = eqxjit.filter_jit(body)
    one, two = Config(2, "one"), Config(2, "two")
    for arguments in [(one, two), (two, one)]:
        for _ in range(CALLS):
            result, expected = f(x, *arguments), body(x, *arguments)
            for got, want in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
                assert got is want or isinstance(got, jax.Array)
    # There is at most one more trace.
    assert f.cache_info().traces <= 2


def test_objects_that_layers_share_cost_no_trace():
    class Shared(eqx.Module):
        x: jax.Array
        config: Config = eqx.field(static=True)

    f = eqxjit.filter_jit(lambda layers: jax.tree.map(lambda x: x + 1, layers))
    shared = Config(1)
    for configs in ([shared] * 2, [Config(1)] * 2, [Config(1), Config(1)]):
        layers = [Shared(x, config) for config in configs]
        for _ in range(CALLS):
            layers = f(layers)
        assert all(each.config is own for each, own in zip(layers, configs, strict=True))
    assert f.cache_info().traces == 1


def test_what_dropped_programs_returned_is_dropped():
    class Own:
        pass

    f = eqxjit.filter_jit(lambda x: (x, Own()))
    alive = []
    for _ in range(10):
        jax.clear_caches()
        f(x)
        alive.append(weakref.ref(f(x)[1]))
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 2
    assert f(x)[1] is alive[-1]()


# --- Static objects of outputs are compared by identity -------------------------------------------


class Frame:
    """Like a pandas table or a sparse matrix: its `==` has no truth value."""

    __hash__ = None

    def __eq__(self, other):
        raise ValueError("The truth value of a Frame is ambiguous.")


class NoHash:
    def __hash__(self):
        raise ValueError("no hash")


class EqualsAll:
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


@jtu.register_pytree_node_class
class WithMetadata:
    def __init__(self, x, metadata):
        self.x, self.metadata = x, metadata

    def tree_flatten(self):
        return (self.x,), self.metadata

    @classmethod
    def tree_unflatten(cls, metadata, children):
        return cls(*children, metadata)


HOLD = {
    "a leaf": (lambda v, x: (x, v), lambda out: out[1]),
    "a field": (lambda v, x: Layer(x, v), lambda out: out.bias),
    "a static field": (lambda v, x: Layer(x, name=v), lambda out: out.name),
    "a list in a static field": (lambda v, x: Layer(x, name=[v]), lambda out: out.name[0]),
    "a tuple in a static field": (lambda v, x: Layer(x, name=(v,)), lambda out: out.name[0]),
    "metadata": (lambda v, x: WithMetadata(x, v), lambda out: out.metadata),
    "a tuple as metadata": (
        lambda v, x: [WithMetadata(x, ("a", v))],
        lambda out: out[0].metadata[1],
    ),
}


@pytest.mark.parametrize("kind", [Frame, NoHash, EqualsAll])
@pytest.mark.parametrize("where", HOLD)
def test_the_user_s_methods_have_no_say_in_outputs(kind, where):
    """Equinox may return the object of another shape's trace, or raise the error of its `==`."""
    put, get = HOLD[where]
    made = {}

    def f(x):
        made[x.shape] = kind()
        return put(made[x.shape], x)

    f = eqxjit.filter_jit(f)
    for n in (3, 4) * CALLS:
        assert get(f(jnp.ones(n))) is made[n,]


@both
def test_keys_of_a_dict_have_no_say_in_outputs(filter_jit):
    class Key:
        def __init__(self, number):
            self.number = number

        def __lt__(self, other):
            return self.number < other.number

        def __eq__(self, other):
            raise ValueError("compared")

        __hash__ = object.__hash__

    keys = Key(1), Key(2)
    f = filter_jit(lambda x: dict.fromkeys(keys, x))
    for n in (3, 4) * CALLS:
        assert [*map(id, f(jnp.ones(n)))] == [*map(id, keys)]


def test_a_static_object_that_comes_in_belongs_to_its_caller():
    """Equinox returns the first of several equal objects to all callers."""
    f = eqxjit.filter_jit(lambda x, static: (x, static))
    statics = [EqualsAll(), EqualsAll()]
    for n in (3, 4) * CALLS:
        for static in statics:
            assert f(jnp.ones(n), static)[1] is static
    assert f.cache_info().traces == 2


def test_equal_constants_of_outputs_are_one_structure():
    """Traces for several shapes share the code that combines outputs."""
    f = eqxjit.filter_jit(lambda x: [{1: x, 2: -0.0}, Layer(x, name=(1, "a"))])
    for n in (3, 4) * CALLS:
        out = f(jnp.ones(n))
        assert math.copysign(1, out[0][2]) == -1
    [entry] = inside.table(f).entries.values()
    assert len({id(out) for out, _ in entry.outs.values()}) == 1
