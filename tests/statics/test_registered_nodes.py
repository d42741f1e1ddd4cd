"""JAX's registry decides what is a node and how it is taken apart, whatever its class.

The classes are drawn: their bases, how they are registered and when, which fields are children, in
which order, and where their objects are. `jax.jit`, `jax.tree_util` and Equinox say what is right.
"""

import collections
import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.tree_util import GetAttrKey, SequenceKey

import eqxjit
from tests.support.helpers import SPECIALIZING, Twins, assert_same, outcome

FIELDS = ("a", "b", "scale")


# --- Classes: `make(cls, a, b, scale)` is an object of one, `read(object)` its three values ------


def by_items(cls, *values):
    return cls(values)


def by_arguments(cls, *values):
    return cls(*values)


def by_keys(cls, *values):
    return cls(zip(FIELDS, values, strict=True))


read_items = tuple


def read_values(value):
    return (*value.values(),)


def read_fields(value):
    return tuple([getattr(value, name) for name in FIELDS])


class TypedTuple(typing.NamedTuple):
    a: Any
    b: Any = 1.0
    scale: Any = 1.0


def namedtuple():
    return collections.namedtuple("Plain", FIELDS)


def namedtuple_with_methods():
    class Methods(namedtuple()):
        def __new__(cls, a, b, scale=1.0):
            return super().__new__(cls, a, b, scale)

        def total(self):
            return self.a + self.b

    return Methods


def below_a_registered_namedtuple():
    base = namedtuple()
    jax.tree_util.register_pytree_node(
        base, lambda t: ((t[2], t[0]), t[1]), lambda b, c: base(c[1], b, c[0])
    )
    return type("Below", (base,), {})


def below(base):
    return lambda: type("Sub", (base,), {})


@dataclasses.dataclass
class _Fields:
    a: Any
    b: Any
    scale: Any


def frozen_dataclass():
    return dataclasses.make_dataclass("Frozen", FIELDS, frozen=True)


def plain_class():
    class Plain:
        def __init__(self, a, b, scale):
            self.a, self.b, self.scale = a, b, scale

        def __eq__(self, other):
            return type(other) is Plain and vars(other) == vars(self)

        def __hash__(self):
            return hash((self.a, self.b, self.scale))

    return Plain


#: How to create a class, to create an object of it, and to read the object.
BASES: dict[str, tuple[Any, Any, Any]] = {
    "namedtuple": (namedtuple, by_arguments, read_fields),
    "NamedTuple's subclass": (below(TypedTuple), by_arguments, read_fields),
    "namedtuple with methods": (namedtuple_with_methods, by_arguments, read_fields),
    "below a registered namedtuple": (below_a_registered_namedtuple, by_arguments, read_fields),
    "tuple": (below(tuple), by_items, read_items),
    "list": (below(list), by_items, read_items),
    "dict": (below(dict), by_keys, read_values),
    "dataclass": (below(_Fields), by_arguments, read_fields),
    "frozen dataclass": (frozen_dataclass, by_arguments, read_fields),
    "plain class": (plain_class, by_arguments, read_fields),
}

WAYS = ("node", "node with keys", "node class", "dataclass", "static")


@dataclasses.dataclass
class Kind:
    """A random class: how to create its objects, read them, and register it."""

    cls: type
    make: Callable[..., Any]
    read: Callable[[Any], tuple[Any, ...]]
    way: str
    order: list[int]

    def flatten(self, value):
        values = self.read(value)
        rest = tuple([v for i, v in enumerate(values) if i not in self.order])
        return [values[i] for i in self.order], rest

    def unflatten(self, rest, children):
        assert type(children) is tuple
        values, others = dict(zip(self.order, children, strict=True)), iter(rest)
        return self.make(*[values[i] if i in values else next(others) for i in range(3)])

    def register(self) -> None:
        tree_util = jax.tree_util
        match self.way:
            case "node":
                tree_util.register_pytree_node(self.cls, self.flatten, self.unflatten)
            case "node with keys":

                def with_keys(value):
                    children, rest = self.flatten(value)
                    return [(SequenceKey(i), child) for i, child in enumerate(children)], rest

                tree_util.register_pytree_with_keys(self.cls, with_keys, self.unflatten)
            case "node class":
                self.cls.tree_flatten = lambda value: self.flatten(value)
                self.cls.tree_unflatten = staticmethod(self.unflatten)
                tree_util.register_pytree_node_class(self.cls)
            case "dataclass":
                names = [FIELDS[i] for i in self.order]
                rest = [name for name in FIELDS if name not in names]
                if self.read is read_fields:
                    tree_util.register_dataclass(self.cls, names, rest)
                else:
                    tree_util.register_pytree_node(self.cls, self.flatten, self.unflatten)
            case "static":
                tree_util.register_static(self.cls)


@st.composite
def kinds(draw):
    make_class, make, read = BASES[draw(st.sampled_from([*BASES]))]
    cls = make_class()
    way = draw(st.sampled_from(WAYS))
    # The other fields are metadata, which must not hold arrays.
    order = draw(st.permutations(draw(st.sampled_from([(0, 1), (0, 1, 2)]))))
    order = [] if way == "static" else order
    return Kind(cls, functools.partial(make, cls), read, way, order)


# --- Places of an object: how it is put there, and how it is found -------------------------------


class Holder(eqx.Module):
    content: Any
    weight: Any = 2.0


class StaticHolder(eqx.Module):
    weight: Any
    content: Any = eqx.field(static=True)


PLACES: dict[str, tuple[Any, Any]] = {
    "argument": (lambda t: t, lambda v: v),
    "list": (lambda t: [t, 1], lambda v: v[0]),
    "dict": (lambda t: {"k": (t,)}, lambda v: v["k"][0]),
    "field": (Holder, lambda v: v.content),
    "field of a list of fields": (lambda t: [Holder([t])], lambda v: v[0].content[0]),
}

places = st.sampled_from([*PLACES.values()])


def compute(kind, find):
    def function(tree):
        value = find(tree)
        a, b, scale = kind.read(value)
        return {
            "sum": a * scale - 2.0 * b,
            "same": tree,
            "new": kind.make(b, a + b, scale),
            "nested": [kind.make(a, kind.make(b, a, scale), scale)],
        }

    return function


def numbers(kind, n=0):
    return values(n) if kind.order else (1.0 + n, 7.0 - n)


def values(n=0):
    return jnp.arange(3.0) + n, 7.0 - jnp.arange(3.0) - n


@settings(max_examples=40)
@given(kind=kinds(), place=places, is_late=st.booleans(), scale=st.sampled_from([10.0, 3, None]))
def test_arguments_fields_and_outputs(kind, place, is_late, scale):
    put, find = place
    f = Twins(compute(kind, find))
    number = np.float32(2) if scale is None and 2 in kind.order else scale or 2

    def both(n):
        tree = put(kind.make(*numbers(kind, n), number))
        expected, found = outcome(f.upstream, tree), outcome(f.ours, tree)
        if isinstance(expected, Exception):
            assert isinstance(found, Exception)
            return
        assert_same(found, expected)
        assert type(find(found["same"])) is kind.cls
        assert_same([*kind.read(found["new"])], [*kind.read(expected["new"])])

    for n in range(3 if is_late else 0):
        both(n)
    kind.register()
    for n in range(5):
        both(n)
    f.assert_no_more_traces()


@settings(max_examples=20)
@given(kind=kinds(), is_late=st.booleans())
def test_static_values(kind, is_late):
    f = eqxjit.filter_jit(lambda holder: holder.weight * kind.read(holder.content)[0])

    def check():
        for first in (1, 2, 1, 1, 2):
            holder = StaticHolder(jnp.ones(2), kind.make(first, 2, "x"))
            assert f(holder).tolist() == [first, first]

    if is_late:
        check()
    kind.register()
    check()


@settings(max_examples=12)
@given(kind=kinds(), place=places)
def test_beside_calls(kind, place):
    """Nodes in transformations, in closures, ahead of time, and in wrapped callables."""
    put, find = place
    kind.register()
    tree = put(kind.make(*numbers(kind), 10.0))
    function = compute(kind, find)
    expected = eqx.filter_jit(function)(tree)
    f = eqxjit.filter_jit(function)
    assert_same(f.lower(tree).compile()(tree), expected)
    gradient = jax.grad(eqxjit.filter_jit(lambda t, x: jnp.sum(function(t)["sum"] * x)), argnums=1)
    partial = eqxjit.filter_jit(eqx.Partial(lambda t, x: function(t), tree))
    for _ in range(3):
        inner = jax.jit(lambda x: f(tree)["sum"] + x)(1.0)
        assert_same(inner, jnp.asarray(expected["sum"] + 1.0))
        assert_same(gradient(tree, jnp.ones(3)), jnp.ones(3) * expected["sum"])
        assert_same(partial(1), expected)
    assert_same(partial.__wrapped__.args[0], tree)
    assert_same(eqxjit.freeze(function, tree)(), expected)
    frozen = eqxjit.freeze(lambda t, x: (function(t)["sum"] + x, t), tree, max_constant_bytes=0)
    assert_same(frozen(1.0), (expected["sum"] + 1.0, tree))
    if not kind.order:
        return
    packed = eqxjit.pack(tree, optimizer=None)
    found = packed.unpack()
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert_same(jax.tree.leaves(eqx.filter(found, eqx.is_array)), arrays_of(tree))
    assert_same(eqxjit.filter_jit(lambda p: function(p.unpack()))(packed)["sum"], expected["sum"])
    assert_same(jax.tree.leaves(packed.repack(found).unpack()), jax.tree.leaves(found))


def arrays_of(tree):
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


# --- By hand -------------------------------------------------------------------------------------


def test_an_explanation_names_the_children_as_jax_does():
    cls = namedtuple()
    jax.tree_util.register_pytree_with_keys(
        cls,
        lambda t: (((GetAttrKey("second"), t.b), (GetAttrKey("first"), t.a)), t.scale),
        lambda scale, children: cls(children[1], children[0], scale),
    )
    f = eqxjit.filter_jit(lambda t: t.a * t.scale)
    f(cls(jnp.ones(2), jnp.ones(3), 1.0))
    f(cls(jnp.ones(2), jnp.ones(4), 1.0))
    f(cls(jnp.ones(2), jnp.ones(4), 2.0))
    _, shape, scale = [str(trace) for trace in f.traces()]
    assert all(part in shape for part in ("t.second", "float32[3]", "float32[4]"))
    assert "1.0" in scale
    assert "2.0" in scale


def test_objects_whose_class_is_registered_between_warm_calls():
    """The objects were static before, and their `==` ignores the array in them."""

    class Named:
        def __init__(self, name, x):
            self.name, self.x = name, x

        def __eq__(self, other):
            return type(other) is Named and self.name == other.name

        def __hash__(self):
            return hash(self.name)

    f = eqxjit.filter_jit(lambda named, y: named.x * y)
    for _ in range(3):
        assert f(Named("a", jnp.ones(2)), jnp.ones(2)).tolist() == [1, 1]
    jax.tree_util.register_pytree_node(Named, lambda n: ((n.x,), n.name), lambda n, c: Named(n, *c))
    for n in range(3):
        assert f(Named("a", jnp.full(2, n)), jnp.ones(2)).tolist() == [n, n]


@pytest.mark.skipif(not SPECIALIZING, reason="the slow path flattens once")
def test_a_flatten_function_that_changes_its_answer_within_a_call_is_refused():
    answers = []

    class Moody:
        def __init__(self, x):
            self.x = x

    def flatten(moody):
        return (moody.x,), answers.pop(0) if answers else "calm"

    jax.tree_util.register_pytree_node(Moody, flatten, lambda _, c: Moody(*c))
    f = eqxjit.filter_jit(lambda moody, y: moody.x * y)
    for _ in range(3):
        assert f(Moody(jnp.full(3, 2.0)), jnp.ones(3))[0] == 2
    # The first answer is that to the guards; the second comes when the new shape is traced.
    answers[:] = ["calm", "angry"]
    with pytest.raises(ValueError, match="flattened twice in one call"):
        f(Moody(jnp.ones((2, 3))), jnp.ones((2, 3)))
    assert f(Moody(jnp.full(3, 2.0)), jnp.ones(3))[0] == 2
