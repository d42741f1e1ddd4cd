"""Arrays on many devices, as `test_devices.py` runs it: in a process with eight of them.

By hand: `XLA_FLAGS=--xla_force_host_platform_device_count=8 pytest -n0` and this file.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import eqxjit
from tests.running.test_asynchronous import classed
from tests.support.helpers import Counted, Twins, assert_same, assert_specialized
from tests.support.models import arrays
from tests.support.sides import CALLS, both


@pytest.fixture(autouse=True)
def _eight_devices():
    assert jax.device_count() == 8, "run `test_devices.py`, which starts a process with 8 devices"


@functools.cache
def mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)


def over(*axes):
    """Return the sharding that splits an array's dimensions over these axes of the mesh."""
    return NamedSharding(mesh(), PartitionSpec(*axes))


def array(*shape, dtype=jnp.float32):
    """Return an array with its own buffer on the first device, to which it isn't committed."""
    size = np.prod(shape, dtype=int)
    return jnp.asarray(np.linspace(-1.0, 1.0, size).reshape(shape), dtype) + jnp.zeros((), dtype)


def placements(tree):
    """Return where each array is, and whether it is committed to that place."""
    return [(leaf.sharding, leaf.committed) for leaf in arrays(tree)]


class PlacedTwins(Twins):
    """Both implementations, which must also leave their outputs in the same places."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        expected = self.upstream(*args, **kwargs)
        for _ in range(CALLS):
            result = self.ours(*args, **kwargs)
            assert_same(result, expected)
            assert placements(result) == placements(expected)
        self.assert_no_more_traces()
        assert_specialized(self.ours.jitted)
        return result  # pyright: ignore


class Layer(eqx.Module):
    weight: Any
    bias: Any
    activation: Any = jnp.tanh
    name: str = eqx.field(static=True, default="layer")

    def __call__(self, x):
        return self.activation(x @ self.weight + self.bias)


def layer(*axes):
    """Return a layer whose weight is split over these axes, and whose bias is split to match."""
    shardings = Layer(over(*axes), over(*axes[1:]), None)
    return eqx.filter_shard(Layer(array(8, 4), array(4)), shardings)


def put(tree, where):
    """Return a tree with its arrays on this device or sharding."""
    dynamic, static = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.device_put(dynamic, where), static)


def batch(*axes):
    return jax.device_put(array(16, 8), over(*axes))


#: How a weight of 8 by 4 is split.
SPLITS = {
    "not at all": (),
    "by columns": (None, "model"),
    "both ways": ("data", "model"),
    "rows over all devices": (("data", "model"),),
}


@pytest.mark.parametrize("split", SPLITS)
def test_inputs_and_outputs_keep_their_shardings(split):
    model, x = layer(*SPLITS[split]), batch("data")
    before = placements(model)

    def f(model, x, n):
        return model, model(x), n, jnp.arange(n), eqx.filter_shard(x, over("model"))

    same, y, _, count, sharded = PlacedTwins(f)(model, x, 3)
    assert placements(model) == before
    for leaf, (sharding, _) in zip(arrays(same), before, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert y.sharding.spec[0] == "data"
    assert len(count.sharding.device_set) == 8
    assert sharded.sharding.is_equivalent_to(over("model"), 2)


# --- Another sharding, another device ---------------------------------------------------------


def test_another_sharding_is_compiled_for_and_then_warm():
    """As with `jax.jit`, it is compiled once without a trace. For another mesh JAX traces again."""
    twins = PlacedTwins(lambda model, x: (model, model(x)))
    third = SingleDeviceSharding(jax.devices()[3])
    for _ in range(2):
        for axes in ((), ("data",), ("model",)):
            twins(layer(*axes), batch(*axes))
        for leaf in arrays(twins(*put((layer(), batch()), third))):
            assert leaf.sharding.device_set == third.device_set
    assert twins.upstream.traces == twins.ours.traces == 2
    assert twins.ours.jitted.cache_info()[:2] == (1, 2)


@both
def test_arrays_of_here_and_there(filter_jit):
    """JAX moves uncommitted arrays. Arrays committed to other devices are rejected without harm."""
    f = filter_jit(lambda model, x: model(x))
    model, x = layer("data", "model"), batch("data")
    expected, elsewhere = f(model, x), jax.device_put(np.asarray(x), jax.devices()[3])
    for _ in range(CALLS):
        with pytest.raises(ValueError, match="incompatible devices"):
            f(model, elsewhere)
        for movable in (np.asarray(x), jnp.asarray(np.asarray(x)), x):
            y = f(model, movable)
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
            assert len(y.sharding.device_set) == 8


# --- Meshes of the context, explicit axes -----------------------------------------------------


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_under_set_mesh(axis_type):
    """The mesh of the context decides, even if it changes between warm calls."""

    def f(x, n):
        # With explicit axes, the sharding is part of an array's type, so traces see it.
        return jnp.sin(x) * n, jnp.zeros(8), str(jax.typeof(x))

    twins = PlacedTwins(f)
    x, spec = np.asarray(array(8, 8)), PartitionSpec
    for _ in range(2):
        twins(x, 2)
        with jax.set_mesh(mesh(axis_type)):
            twins(x, 2)
            for axes in (("data",), ("model", "data")):
                y, zeros, seen = twins(jax.device_put(x, spec(*axes)), 2)
                assert y.sharding.is_equivalent_to(NamedSharding(mesh(axis_type), spec(*axes)), 2)
                assert len(zeros.sharding.device_set) == 8
                assert ("@data" in seen) == (axis_type is AxisType.Explicit)
    if axis_type is AxisType.Explicit:
        assert twins.ours.traces == 4


# --- shard_map --------------------------------------------------------------------------------


def _local(weight, x, n):
    return jax.lax.psum(x @ weight, "model") * n


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_inside_shard_map(outer):
    """The wrapped function gets tracers, cold and warm, and arrays in between."""
    weight, x = np.asarray(array(8, 4)), np.asarray(array(16, 8))
    specs = (PartitionSpec("model"), PartitionSpec("data", "model"))
    results = []
    for filter_jit in (eqx.filter_jit, eqxjit.filter_jit):
        local = Counted(filter_jit, _local)
        for n in (2, 2, 3):
            part = functools.partial(local, n=n)
            f = outer(
                jax.shard_map(part, mesh=mesh(), in_specs=specs, out_specs=PartitionSpec("data"))
            )
            results += [f(weight, x) for _ in range(CALLS)]
    theirs, ours = results[: len(results) // 2], results[len(results) // 2 :]
    assert_same(ours, theirs)
    assert placements(ours) == placements(theirs)
    np.testing.assert_allclose(results[0], x @ weight * 2, rtol=1e-5, atol=1e-6)


# --- Errors, and what is waited for -----------------------------------------------------------


def _mapped(f):
    return jax.shard_map(f, mesh=mesh(), in_specs=PartitionSpec("data"), out_specs=PartitionSpec())


HARMLESS = {
    "filter_shard": lambda x: eqx.filter_shard(x, over("model", "data")) + 1,
    "a product": lambda x: x @ x.T,
    "psum": _mapped(lambda x: jax.lax.psum(x, "data")),
    "inv": lambda x: jnp.linalg.inv(x.T @ x + jnp.eye(8)),
}


@pytest.mark.parametrize("axes", [(), ("data", "model")])
@pytest.mark.parametrize("kind", HARMLESS)
def test_which_programs_over_devices_are_waited_for(kind, axes):
    x = batch(*axes)
    # A new function, because wrappers of one function share programs.
    assert not classed(lambda x: HARMLESS[kind](x), x)
    assert classed(lambda x: HARMLESS[kind](eqx.error_if(x, x > 1, "above")), x)


# --- Training ---------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True], ids=["replicated", "split weights"])
def test_training(split):
    """Weights equal Equinox's bit for bit, and those of one device up to rounding."""
    optimizer = optax.adam(1e-2)

    def step(model, state, x, y):
        def loss(model):
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        value, gradients = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    def trained(filter_jit, where, batch_sharding):
        jitted = Counted(filter_jit, step, donate="all-except-first")
        model = eqx.nn.MLP(8, 8, 16, 2, key=jr.key(0))
        tree = model, optimizer.init(eqx.filter(model, eqx.is_array))
        model, state = jax.tree.map(
            lambda leaf: jax.device_put(leaf, where(leaf)) if eqx.is_array(leaf) else leaf, tree
        )
        losses = []
        for data in np.random.default_rng(0).normal(size=(12, 2, 16, 8)).astype(np.float32):
            data = jax.device_put(data, batch_sharding)
            x, y = data[0], data[1]
            old = arrays(state)
            with jax.transfer_guard("disallow"):
                model, state, value = jitted(model, state, x, y)
            assert all(leaf.is_deleted() for leaf in old)
            losses.append(value)
        assert jitted.traces == 1
        assert losses[-1] < losses[0]
        return arrays(model), arrays(state), losses

    def spread(leaf):
        return over(*["data"] * (split and leaf.ndim > 0))

    ours, theirs = (
        trained(f, spread, over(None, "data")) for f in (eqxjit.filter_jit, eqx.filter_jit)
    )
    alone = trained(eqx.filter_jit, lambda _: jax.devices()[0], jax.devices()[0])
    assert_same(ours, theirs)
    assert placements(ours) == placements(theirs)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), ours, alone)


# --- Packing ----------------------------------------------------------------------------------


def test_what_is_sharded_or_elsewhere_is_left_alone():
    sharded = jax.device_put(array(8, 2), over("data"))
    replicated = jax.device_put(array(3), over())
    elsewhere = jax.device_put(array(3), jax.devices()[1])
    tree = [array(4), sharded, array(2), replicated, elsewhere, array(5)]
    packed = eqxjit.pack(tree, optimizer=None)
    assert [a.shape for a in packed.arrays] == [(11,), (8, 2), (3,), (3,)]
    assert packed.arrays[1:] == (sharded, replicated, elsewhere)
    assert_same(packed.unpack(), tree)
    assert placements(packed.unpack()) == placements(tree)
