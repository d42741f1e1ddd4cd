"""Under JAX's transformations, a `Packed` gives the results of its tree in as few operations."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import eqxjit
from tests.support.helpers import assert_same, warm


@functools.cache
def model():
    """Return a model whose leaves have only two shapes, so that little is compiled."""
    return built(jr.key(0))


def built(key):
    return eqx.nn.MLP(4, 4, 4, 2, activation=jnp.tanh, key=key)


def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def packed_loss(packed, x):
    return loss(packed.unpack(), x)


def arrays(tree):
    return eqx.filter(tree, eqx.is_inexact_array)


def assert_close(packed, tree):
    """Check that the `Packed` of a derivative holds the derivatives of the tree."""
    assert isinstance(packed, eqxjit.Packed)
    got, expected = jax.tree.leaves(packed.unpack()), jax.tree.leaves(tree)
    for one, other in zip(filter(eqx.is_array, got), filter(eqx.is_array, expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.fixture
def x():
    return jr.normal(jr.key(1), (5, 4))


@pytest.fixture
def packed():
    """Return a `Packed` with the biases in a buffer, and the matrices outside."""
    return eqxjit.pack(model(), max_leaf_bytes=32, optimizer=None)


GRADIENTS = {
    "grad": eqx.filter_grad,
    "jitted": lambda loss: eqxjit.filter_jit(eqx.filter_grad(loss)),
    "with the value": lambda loss: lambda p, x: eqx.filter_value_and_grad(loss)(p, x)[1],
    "checkpoint": lambda loss: eqx.filter_grad(eqx.filter_checkpoint(loss)),
    "for each example": lambda loss: (
        lambda p, x: jax.vmap(lambda row: eqx.filter_grad(loss)(p, row[None]))(x)
    ),
}


@pytest.mark.parametrize("transform", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients(transform, packed, x):
    gradient = warm(transform(packed_loss), packed, x)
    assert gradient.layout is packed.layout
    assert_close(gradient, transform(loss)(model(), x))


def flat(tree):
    return ravel_pytree(arrays(tree))


def test_hessian(x):
    """The Hessian is computed by forward mode over reverse mode."""
    packed = eqxjit.pack(model(), optimizer=None)
    dynamic, static = eqx.partition(packed, eqx.is_inexact_array)
    got = jax.jit(jax.hessian(lambda p: packed_loss(eqx.combine(p, static), x)))(dynamic)
    [[matrix]] = [inner.arrays for inner in got.arrays]
    vector, rebuild = flat(model())
    other = eqx.filter(model(), eqx.is_inexact_array, inverse=True)
    expected = jax.jit(jax.hessian(lambda v: loss(eqx.combine(rebuild(v), other), x)))(vector)
    np.testing.assert_allclose(matrix, expected, rtol=1e-4, atol=1e-6)


def test_vmap_over_a_packed(x):
    """An ensemble is packed and called inside `vmap`, and unpacked outside."""
    keys = jr.split(jr.key(0), 3)
    ensemble = eqx.filter_vmap(built)(keys)
    packed = eqx.filter_vmap(lambda key: eqxjit.pack(built(key), optimizer=None))(keys)
    assert packed.layout is eqxjit.pack(model(), optimizer=None).layout
    assert_same(packed.unpack(), ensemble)
    got = eqxjit.filter_jit(eqx.filter_vmap(packed_loss, in_axes=(eqx.if_array(0), None)))(
        packed, x
    )
    expected = eqx.filter_vmap(loss, in_axes=(eqx.if_array(0), None))(ensemble, x)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_along_another_axis(x, axis):
    packed = eqxjit.pack(model(), optimizer=None)
    stacked = jax.tree.map(lambda a: jnp.stack([a, 2 * a], axis), packed)
    got = eqx.filter_vmap(packed_loss, in_axes=(eqx.if_array(axis), None))(stacked, x)
    twice = packed.repack(jax.tree.map(lambda a: 2 * a if eqx.is_array(a) else a, model()))
    expected = [packed_loss(packed, x), packed_loss(twice, x)]
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_scan(packed, x):
    """A loop of gradient descent carries the `Packed`, and stacks it."""
    dynamic, static = eqx.partition(packed, eqx.is_array)

    def step(dynamic, x):
        packed = eqx.combine(dynamic, static)
        gradient = eqx.filter_grad(packed_loss)(packed, x[None])
        packed = eqx.apply_updates(packed, jax.tree.map(lambda g: -0.1 * g, gradient))
        dynamic = eqx.filter(packed, eqx.is_array)
        return dynamic, dynamic

    last, all_ = jax.jit(lambda dynamic, x: jax.lax.scan(step, dynamic, x))(dynamic, x)
    tree = model()
    for row in x:
        gradient = eqx.filter_grad(loss)(tree, row[None])
        tree = eqx.apply_updates(tree, jax.tree.map(lambda g: -0.1 * g, gradient))
    assert_close(eqx.combine(last, static), tree)
    stacked = eqx.combine(all_, static).unpack()
    assert stacked.layers[0].weight.shape == (5, 4, 4)
    np.testing.assert_array_equal(
        stacked.layers[0].weight[-1], eqx.combine(last, static).unpack().layers[0].weight
    )


def test_pack_inside_transformations(x):
    def through_pack(tree, x):
        return packed_loss(eqxjit.pack(tree, optimizer=None), x)

    expected = eqx.filter_grad(loss)(model(), x)
    gradient = eqx.filter_grad(through_pack)
    for transformed in (gradient, eqxjit.filter_jit(gradient)):
        got = transformed(model(), x)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    # Leaves with and without the mapped axis share a buffer.
    half = eqx.tree_at(lambda m: m.layers[0].bias, model(), jnp.ones((3, 4)))
    axes = jax.tree.map(lambda _: None, half, is_leaf=eqx.is_array)
    axes = eqx.tree_at(lambda m: m.layers[0].bias, axes, 0, is_leaf=lambda a: a is None)
    got = eqx.filter_vmap(through_pack, in_axes=(axes, None))(half, x)
    expected = eqx.filter_vmap(loss, in_axes=(axes, None))(half, x)
    np.testing.assert_allclose(got, expected, rtol=2e-6)


# --- What derivatives cost --------------------------------------------------------------------


def equations(jaxpr):
    """Return all equations of a jaxpr, those of inner jaxprs included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


@pytest.mark.parametrize("depth", [2, 10])
def test_the_transpose_is_one_concatenation_for_each_buffer(depth):
    packed = eqxjit.pack(
        eqx.nn.MLP(3, 2, 4, depth, activation=jnp.tanh, key=jr.key(0)), optimizer=None
    )
    x = jnp.ones((5, 3))
    dynamic, static = eqx.partition(packed, eqx.is_array)
    jaxpr = jax.make_jaxpr(jax.grad(lambda p: packed_loss(eqx.combine(p, static), x)))(dynamic)
    found = list(equations(jaxpr.jaxpr))
    names = [equation.primitive.name for equation in found]
    n_buffers = len(packed.arrays)
    assert names.count("concatenate") == n_buffers
    sizes = {array.size for array in packed.arrays}
    of_buffer_size = [
        equation.primitive.name
        for equation in found
        if equation.primitive.name != "jit"  # the equations inside are counted, too
        for out in equation.outvars
        if getattr(out.aval, "shape", ()) in {(size,) for size in sizes}
    ]
    assert of_buffer_size == ["concatenate"] * n_buffers
    assert not {"pad", "scatter-add", "scatter", "dynamic_update_slice"}.intersection(names)
