"""What is traced, what is static, and that a call can pass and return each kind of node."""

import collections
import operator
from typing import Any

import equinox as eqx
import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqxjit
from tests.support import nodes
from tests.support.helpers import Twins, assert_same, assert_specialized
from tests.support.models import Point
from tests.support.sides import CALLS, both

# --- Leaves -----------------------------------------------------------------------------------


def _array(dtype, shape=(2,)):
    return jnp.ones(shape, dtype)


DYNAMIC = {
    "bfloat16": _array(jnp.bfloat16),
    "float8": _array(jnp.float8_e4m3fn),
    "int4": _array(jnp.int4),
    "complex64": _array(jnp.complex64),
    "weakly typed array": jnp.asarray(2.0),
    "empty array": _array(jnp.float32, (0, 3)),
    "typed key": jax.random.key(0),
    "typed keys": jax.random.split(jax.random.key(0, impl="rbg"), 3),
    "raw key": jax.random.PRNGKey(0),
    "numpy float32": np.ones(2, np.float32),
    "numpy int64": np.arange(3),
    "numpy zero-dimensional": np.array(1.5, np.float32),
    "numpy not contiguous": np.arange(6, dtype=np.int32)[::2],
    "numpy subclass": np.ones(2, np.float32).view(type("Sub", (np.ndarray,), {})),
    "numpy float64 scalar": np.float64(1.5),
}

STATIC = {
    "bool": True,
    "big int": 10**30,
    "float": 1.5,
    "str": "tanh",
    "function": jnp.tanh,
    "jax type": jnp.float32,
    "dtype": np.dtype("float32"),
    "enum": nodes.Colour.RED,
    "frozen dataclass": nodes.Config(1e-3),
    "frozenset": frozenset({1, 2}),
    "object": object(),
    "shape": jax.ShapeDtypeStruct((2,), jnp.float32),
    "method of a plain object": [1].append,
}
if hasattr(jax, "new_ref"):
    # `equinox.is_array` says that a reference isn't a `jax.Array`.
    STATIC["ref"] = jax.new_ref(jnp.zeros(2))


def describe(x):
    """Return how JAX traces a value, or that it is static."""
    return str(x.aval) if isinstance(x, jax.core.Tracer) else None


def everywhere(leaf):
    """Return a leaf as an argument, and within nodes of several kinds."""
    return leaf, (1, leaf), {"leaf": leaf}, eqx.nn.Lambda(leaf), eqx.Partial(max, leaf)


@pytest.mark.parametrize("name", DYNAMIC)
def test_arrays_are_traced(name):
    value = DYNAMIC[name]
    twins = Twins(lambda *tree: (tree, [describe(leaf) for leaf in jax.tree.leaves(tree)]))
    _, seen = twins(*everywhere(value))
    assert [kind is not None for kind in seen] == [
        leaf is value for leaf in jax.tree.leaves(everywhere(value))
    ]
    assert twins.ours.traces == 1


@pytest.mark.parametrize("name", STATIC)
def test_all_else_is_static(name):
    tree = everywhere(STATIC[name])
    twins = Twins(lambda *tree: (jnp.zeros(()), jax.tree.leaves(tree)))
    _, leaves = twins(*tree)
    assert [*map(id, leaves)] == [*map(id, jax.tree.leaves(tree))]
    assert twins.ours.traces == 1


# --- Nodes ------------------------------------------------------------------------------------


class Inner(eqx.Module):
    weight: jax.Array
    bias: jax.Array | None
    power: int = eqx.field(static=True)
    activation: Any = jnp.tanh

    def __call__(self, x):
        return self.activation(self.weight * x) ** self.power


class TupleSubclass(tuple):
    """A static leaf, because JAX registers exact types, not subclasses."""


w = jnp.arange(1.0, 3.0)
NODES = {
    "Module": Inner(w, None, 2),
    "Module with converters": nodes.Converted(w, [4, 2]),
    "Module under inheritance": nodes.Derived(w, w + 1, 2),
    "Module with wrapper fields": nodes.wrapper(nodes.plus_one, w),
    "equinox layers": eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0)),
    "named tuple": Point(w, Point(1, w)),
    "tuple subclass": TupleSubclass((1, 2)),
    "lists and dicts": {"b": [w, 1, [], [w]], "a": 1, "c": {}, "d": {"e": (w, ())}},
    "OrderedDict": collections.OrderedDict(b=w, a=w + 1),
    "defaultdict": collections.defaultdict(list, b=w, a=w + 1),
    "None within": (None, [None, w], {"a": None}),
    "jax Partial": jtu.Partial(operator.mul, w, key=w),
    "equinox Partial": eqx.Partial(Inner(w, None, 2), w),
    "bound method": Inner(w, None, 2).__call__,
    "nn.State and its Module": nodes.batch_norm(),
    "flax dataclass": nodes.FlaxState(w, 0.1),
    "FrozenDict": flax.core.freeze({"b": {"w": w}, "a": w}),
    "registered dataclass": nodes.Record([w, 2], "node"),
    "own node": nodes.Bag("own", w, 2, {"a": w}),
    "optax state": optax.adam(1e-3).init({"w": w, "b": w}),
    "optax masked": optax.masked(optax.adam(0.1), {"w": True, "b": False}).init({"w": w, "b": w}),
    "wrapper": eqxjit.filter_jit(Inner(w, None, 2)),
    "upstream's wrapper": eqx.filter_jit(Inner(w, None, 2)),
}


def moved(tree, by):
    """Return the tree with different values in its inexact arrays."""
    return jax.tree.map(lambda leaf: leaf + by if eqx.is_inexact_array(leaf) else leaf, tree)


@pytest.mark.parametrize("name", NODES)
def test_each_node_goes_in_and_out(name):
    """In each call, the function gets what was passed, and the caller what was returned."""
    tree = NODES[name]
    seen = []

    def f(tree, n):
        seen.append(jax.tree.structure(tree))
        return moved(tree, n)

    twins = Twins(f)
    for i in range(CALLS):
        argument = moved(tree, i)
        ours, theirs = twins.ours(argument, 2), twins.upstream(argument, 2)
        assert_same(ours, theirs)
        assert_same(ours, moved(argument, 2))
        assert type(ours) is type(tree)
    assert seen == [jax.tree.structure(tree)] * 2
    assert_specialized(twins.ours.jitted)


@both
def test_an_outdated_state_is_refused(filter_jit):
    """Flattening an outdated `eqx.nn.State` raises an error, in a warm call, too."""
    index = eqx.nn.StateIndex(jnp.zeros(()))
    f = filter_jit(lambda state: state.get(index) + 1)
    for _ in range(CALLS):
        state = eqx.nn.State(index)
        assert f(state) == 1
        assert f(state.set(index, jnp.ones(()))) == 2
        with pytest.raises(ValueError, match="state"):
            f(state)
