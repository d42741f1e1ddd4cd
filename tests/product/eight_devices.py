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
from tests.runtime.test_asynchronous import LARGE, checked, classed
from tests.runtime.test_donation import DONATE, ignore_warning
from tests.support import foreign
from tests.support.helpers import Counted, Twins, assert_same, assert_specialized
from tests.support.inside import blocks
from tests.support.models import arrays
from tests.support.sides import CALLS, both


@pytest.fixture(autouse=True)
def _eight_devices():
    assert jax.device_count() == 8, "run `test_devices.py`, which starts a process with 8 devices"


@functools.cache
def mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)


def over(*axes):
    """The sharding that splits an array's dimensions over these axes of the mesh."""
    return NamedSharding(mesh(), PartitionSpec(*axes))


def array(*shape, dtype=jnp.float32):
    """A buffer of its own on the first device, where JAX chose to put it."""
    size = np.prod(shape, dtype=int)
    return jnp.asarray(np.linspace(-1.0, 1.0, size).reshape(shape), dtype) + jnp.zeros((), dtype)


def placements(tree):
    """Where each array is, and whether it has to stay there."""
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
    """A layer whose weight is split over these axes, and its bias as the weight's columns are."""
    shardings = Layer(over(*axes), over(*axes[1:]), None)
    return eqx.filter_shard(Layer(array(8, 4), array(4)), shardings)


def put(tree, where):
    """The same tree, with its arrays there."""
    dynamic, static = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.device_put(dynamic, where), static)


def batch(*axes):
    return jax.device_put(array(16, 8), over(*axes))


#: How a weight of 8 by 4 is split.
SPLITS = {
    "not at all": (),
    "by rows": ("data",),
    "by columns": (None, "model"),
    "both ways": ("data", "model"),
    "rows over all devices": (("data", "model"),),
}


# --- Where outputs are ------------------------------------------------------------------------


@pytest.mark.parametrize("split", SPLITS)
def test_inputs_and_outputs_keep_their_shardings(split):
    model, x = layer(*SPLITS[split]), batch("data")
    before = placements(model)
    kept, y, _, count = PlacedTwins(lambda model, x, n: (model, model(x), n, jnp.arange(n)))(
        model, x, 3
    )
    assert placements(model) == before
    for leaf, (sharding, _) in zip(arrays(kept), before, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert y.sharding.spec[0] == "data"
    assert len(count.sharding.device_set) == 8


@pytest.mark.parametrize("split", SPLITS)
def test_filter_shard_inside(split):
    """Also of what comes from the host, or from another sharding."""
    sharding = over(*SPLITS[split])

    def f(x):
        sharded = eqx.filter_shard({"x": x, "name": "x", "n": 2}, sharding)
        return sharded, eqx.filter_shard(x * sharded["n"], over("model"))

    twins = PlacedTwins(f)
    for x in (array(8, 4), jax.device_put(array(8, 4), over("model")), np.ones((8, 4), np.float32)):
        sharded, doubled = twins(x)
        assert sharded["x"].sharding.is_equivalent_to(sharding, 2)
        assert doubled.sharding.is_equivalent_to(over("model"), 2)
        assert (sharded["name"], sharded["n"]) == ("x", 2)


# --- Transfers and donation -------------------------------------------------------------------


@both
@pytest.mark.parametrize("donate", ["all-except-first", "none"])
def test_nothing_is_transferred(filter_jit, donate):
    """Not even by the call that compiles."""
    f = filter_jit(lambda model, x: (model, model(x), jnp.ones(3)), donate=donate)
    bound = filter_jit(layer("data", "model"))
    model = layer("data", "model")
    batches = [batch("data") for _ in range(2 * CALLS)]
    with jax.transfer_guard("disallow"):
        for x in batches:
            bound(x)
            f(model, x)
        # The guard does see a transfer, in a warm call as well.
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
            f(model, np.ones((16, 8), np.float32))


def pointers(leaf):
    """Where the data of an array is, on each device."""
    return tuple([shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards])


@ignore_warning
@pytest.mark.parametrize("donate", DONATE)
@pytest.mark.parametrize("split", ["not at all", "both ways"])
def test_what_is_deleted_and_what_is_reused(split, donate):
    def f(model, momentum, x):
        momentum = jax.tree.map(lambda m: m * 0.9 + x.sum(), momentum)
        return eqx.apply_updates(model, momentum), momentum, x + 1

    ours, upstream = (f_jit(f, donate=donate) for f_jit in (eqxjit.filter_jit, eqx.filter_jit))
    for _ in range(CALLS):
        seen = []
        for jitted in (ours, upstream):
            model, momentum = layer(*SPLITS[split]), eqx.filter(layer(*SPLITS[split]), eqx.is_array)
            inputs = arrays((model, momentum, x := batch("data")))
            before = {pointers(leaf): i for i, leaf in enumerate(inputs)}
            out = jax.block_until_ready(jitted(model, momentum, x))
            reused = [before.get(pointers(leaf)) for leaf in arrays(out)]
            seen.append(([leaf.is_deleted() for leaf in inputs], reused, placements(out)))
        assert seen[0] == seen[1]
    if donate == "all":
        assert all(seen[0][0])
        assert None not in seen[0][1]


# --- Another sharding, another device ---------------------------------------------------------


def test_another_sharding_is_compiled_for_and_then_warm():
    """As by `jax.jit`: without tracing, and once."""
    twins = PlacedTwins(lambda model, x: model(x))
    for _ in range(2):
        for axes in ((), ("data",), ("model",)):
            twins(layer(*axes), batch(*axes))
    f = twins.ours.jitted
    assert twins.upstream.traces == twins.ours.traces == 1
    assert f.cache_info()[:2] == (1, 1)


def test_from_a_device_to_a_mesh_and_back():
    twins = PlacedTwins(lambda model, x, n: (model, model(x) * n))
    third, fifth = (SingleDeviceSharding(jax.devices()[i]) for i in (3, 5))
    for _ in range(2):
        for sharding in (third, over(), fifth):
            out = twins(*put((layer(), batch()), sharding), 2)
            for leaf in arrays(out):
                assert leaf.sharding.device_set == sharding.device_set
    # For a mesh JAX traces anew, for another device it compiles.
    assert twins.ours.traces == twins.upstream.traces == 2
    assert twins.ours.jitted.cache_info()[:2] == (1, 2)


@both
@pytest.mark.parametrize("warm", [1, CALLS])
def test_arrays_of_here_and_there(filter_jit, warm):
    """What JAX may move joins the others; what was put elsewhere is refused, and harms nothing."""
    f = filter_jit(lambda model, x: model(x))
    model, x = layer("data", "model"), batch("data")
    expected = np.asarray(f(model, x))
    for _ in range(warm - 1):
        f(model, x)
    elsewhere = jax.device_put(np.asarray(x), jax.devices()[3])
    for _ in range(CALLS):
        with pytest.raises(ValueError, match="incompatible devices"):
            f(model, elsewhere)
        for movable in (np.asarray(x), jnp.asarray(np.asarray(x))):
            y = f(model, movable)
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
            assert len(y.sharding.device_set) == 8
        np.testing.assert_array_equal(f(model, x), expected)


@both
def test_default_device_switched_between_calls(filter_jit):
    first, second, *_ = jax.devices()
    f = filter_jit(lambda x, n: (x * n, jnp.arange(3)))
    for _ in range(CALLS):
        for device in (first, second, None):
            with jax.default_device(device):
                outputs = f(np.ones(2, np.float32), 2)
            assert {output.devices().pop() for output in outputs} == {device or first}
    committed = jax.device_put(np.ones(2, np.float32), second)
    for _ in range(CALLS):
        assert f(committed, 2)[0].devices() == {second}


# --- Meshes of the context, explicit axes -----------------------------------------------------


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_under_set_mesh(axis_type):
    """The mesh of the context decides, entered and left between warm calls."""

    def f(x, n):
        # Where axes are explicit, the sharding is part of the type, which tracing sees.
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


def test_shard_map_inside():
    """A product whose inner dimension is split."""

    def f(model, x, n):
        specs = (PartitionSpec("model"), PartitionSpec("data", "model"))
        product = jax.shard_map(
            functools.partial(_local, n=n),
            mesh=mesh(),
            in_specs=specs,
            out_specs=PartitionSpec("data"),
        )
        return product(model.weight, x) + model.bias

    twins, model, x = PlacedTwins(f), layer("model"), batch("data", "model")
    for n in (2, 3):
        y = twins(model, x, n)
        assert y.sharding.is_equivalent_to(over("data"), 2)
        np.testing.assert_allclose(y, x @ model.weight * n + model.bias, rtol=1e-5)
    assert blocks(twins.ours.jitted) == [False, False]


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["eager", "jitted"])
def test_inside_shard_map(outer):
    """The wrapped function is given tracers, cold and warm; and arrays in between."""
    results, traces = [], []
    weight, x = np.asarray(array(8, 4)), np.asarray(array(16, 8))
    for filter_jit in (eqx.filter_jit, eqxjit.filter_jit):
        local = Counted(filter_jit, _local)
        specs = (PartitionSpec("model"), PartitionSpec("data", "model"))
        for n in (2, 2, 3):
            f = outer(
                jax.shard_map(
                    functools.partial(local, n=n),
                    mesh=mesh(),
                    in_specs=specs,
                    out_specs=PartitionSpec("data"),
                )
            )
            for _ in range(CALLS):
                y = f(weight, x)
                results.append((y, placements(y)))
        traces.append(local.traces)
    for ours, theirs in zip(results[len(results) // 2 :], results, strict=False):
        assert_same(ours[0], theirs[0])
        assert ours[1] == theirs[1]
    np.testing.assert_allclose(results[0][0], x @ weight * 2, rtol=1e-5, atol=1e-6)
    assert traces[1] <= traces[0]


# --- The arrays of the function ---------------------------------------------------------------


def test_a_bound_model():
    """Its weights may be split in another way in each wrapper of it."""
    for axes in SPLITS.values():
        results = []
        for filter_jit in (eqx.filter_jit, eqxjit.filter_jit):
            f = filter_jit(layer(*axes))
            results.append([f(batch("data")) for _ in range(CALLS)])
        assert_same(results[1], results[0])
        assert placements(results[1]) == placements(results[0])


@pytest.mark.parametrize("split", SPLITS)
def test_a_frozen_model(split):
    """Constants are where `jax.jit` puts those it closes over; what is passed stays where it is."""
    model = layer(*SPLITS[split])
    dynamic, static = eqx.partition(model, eqx.is_array)
    closure = Counted(jax.jit, lambda x: model(x))
    passed = jax.jit(lambda dynamic, x: eqx.combine(dynamic, static)(x))
    compiled_in, passed_along = eqxjit.freeze(model), eqxjit.freeze(model, max_constant_bytes=0)
    assert placements(arrays(passed_along)) == placements(model)
    for x in (batch("data"), batch("model"), jax.device_put(array(16, 8), jax.devices()[3])):
        twins = [(compiled_in, closure)]
        if len(x.sharding.device_set) == 8:
            twins.append((passed_along, functools.partial(passed, dynamic)))
        for ours, theirs in twins:
            expected = theirs(x)
            for _ in range(CALLS):
                y = ours(x)
                np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
                assert placements(y) == placements(expected)
    assert compiled_in.cache_info().traces == closure.traces
    assert passed_along.cache_info().traces == 1


# --- Errors, and what is waited for -----------------------------------------------------------


@both
def test_error_if_on_a_device_and_over_a_mesh(filter_jit):
    """It can't fail over a mesh of CPUs: JAX, upstream too, then waits for the device that did."""
    message = f"raised under {filter_jit.__module__}"  # equal messages would share a trace

    @filter_jit
    def f(x):
        nan = eqx.error_if(x, jnp.any(x > 1), message, on_error="nan")
        return eqx.error_if(x, jnp.any(x > 2), message) * 2, nan

    alone = jax.device_put(np.asarray(batch()), jax.devices()[3])
    for axes in [(), ("data",), ("data", "model")]:
        for _ in range(CALLS):
            doubled, nan = f(batch(*axes) + 1)
            np.testing.assert_array_equal(doubled, (batch() + 1) * 2)
            assert len(doubled.sharding.device_set) == 8
            assert np.isnan(nan).all()
            with pytest.raises(eqx.EquinoxRuntimeError, match=message):
                f(alone + 2)


def _mapped(f):
    return jax.shard_map(f, mesh=mesh(), in_specs=PartitionSpec("data"), out_specs=PartitionSpec())


HARMLESS = {
    "a reduction": lambda x: x.sum(),
    "filter_shard": lambda x: eqx.filter_shard(x, over("model", "data")) + 1,
    "a product": lambda x: x @ x.T,
    "psum": _mapped(lambda x: jax.lax.psum(x, "data")),
    "all_gather": lambda x: jax.lax.map(lambda y: eqx.filter_shard(y, over()), x),
    "random numbers": lambda x: jr.normal(jr.key(0), x.shape) * x,
    "sort": lambda x: jnp.sort(x, axis=0),
    "inv": lambda x: jnp.linalg.inv(x.T @ x + jnp.eye(8)),
    "top_k": lambda x: jax.lax.top_k(x, 2),
    "a gradient": jax.grad(lambda x: jnp.tanh(x @ x.T).sum()),
}


@pytest.fixture(params=["Shardy", "GSPMD"])
def _partitioner(request):
    """GSPMD marks shardings by foreign calls."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", request.param == "Shardy")
    yield
    jax.config.update("jax_use_shardy_partitioner", before)


@pytest.mark.usefixtures("_partitioner")
@pytest.mark.parametrize("axes", [(), ("data",), ("data", "model")])
@pytest.mark.parametrize("kind", HARMLESS)
def test_a_program_over_devices_is_not_waited_for(kind, axes):
    # A function of its own: those of one function share what was compiled.
    assert not classed(lambda x: HARMLESS[kind](x), batch(*axes))


@pytest.mark.parametrize("axes", [(), ("data",), ("data", "model")])
def test_a_callback_over_devices_is_waited_for(axes):
    x = batch(*axes)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    assert classed(lambda x: jax.pure_callback(np.asarray, shape, x), x)
    assert classed(lambda x: eqx.error_if(x, x > 1, "above"), x)


@foreign.needs_compiler
def test_a_foreign_call_is_waited_for_on_each_device():
    foreign.register()
    f, plain = eqxjit.filter_jit(checked), eqxjit.filter_jit(lambda x: x @ x)
    for device in jax.devices()[:2] * 2:
        x = jax.device_put(LARGE, device)
        for _ in range(CALLS):
            assert f(x).is_ready()
            plain(x)
            with pytest.raises(jax.errors.JaxRuntimeError, match="a negative number"):
                f(-x)
        assert (blocks(f), blocks(plain)) == ([True], [False])


# --- Transformations, compiling ahead of time -------------------------------------------------


def test_gradients_and_maps_of_a_warm_function():
    f = {name: fj(lambda w, x, n: jnp.tanh(x @ w) * n) for name, fj in _BOTH.items()}
    weight, x = layer("data", "model").weight, batch("data")
    for transform in (
        lambda f: jax.grad(lambda w: f(w, x, 2).sum()),
        lambda f: jax.jit(jax.grad(lambda w: f(w, x, 2).sum())),
        lambda f: lambda w: jax.vmap(f, (None, 0, None))(w, x, 2),
        lambda f: lambda w: jax.jvp(lambda w: f(w, x, 2), (w,), (w,)),
    ):
        for _ in range(CALLS):
            ours, theirs = (transform(f[name])(weight) for name in ("eqxjit", "equinox"))
            assert_same(ours, theirs)
            assert placements(ours) == placements(theirs)
            assert_same(f["eqxjit"](weight, x, 2), f["equinox"](weight, x, 2))


_BOTH = {"equinox": eqx.filter_jit, "eqxjit": eqxjit.filter_jit}


def test_compiled_ahead_of_time():
    """Like upstream's it takes arrays of the shardings that it was compiled for, and no others."""
    model, x = layer("data", "model"), batch("data")
    ours, theirs = (
        fj(lambda model, x: (model, model(x))).lower(model, x).compile() for fj in _BOTH.values()
    )
    for _ in range(CALLS):
        assert_same(ours(model, x), theirs(model, x))
        assert placements(ours(model, x)) == placements(theirs(model, x))
        with jax.transfer_guard("disallow"):
            ours(model, x)
        for compiled in (ours, theirs):
            with pytest.raises(ValueError, match="sharding"):
                compiled(model, batch("model"))


# --- Training ---------------------------------------------------------------------------------


@pytest.mark.parametrize("donate", ["all", "none"])
@pytest.mark.parametrize("split", [False, True], ids=["replicated", "split weights"])
def test_training(split, donate):
    """As upstream, bit for bit; as on one device, but for the order of sums."""
    optimizer = optax.adam(1e-2)

    def step(model, state, x, y):
        def loss(model):
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        value, gradients = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    def trained(jitted, where, batch_sharding):
        model = eqx.nn.MLP(8, 8, 16, 2, key=jr.key(0))
        state = optimizer.init(eqx.filter(model, eqx.is_array))
        model, state = jax.tree.map(
            lambda leaf: jax.device_put(leaf, where(leaf)) if eqx.is_array(leaf) else leaf,
            (model, state),
        )
        before, rng, losses = placements((model, state)), np.random.default_rng(0), []
        batches = [
            jax.device_put(rng.normal(size=(2, 16, 8)).astype(np.float32), batch_sharding)
            for _ in range(12)
        ]
        batches = [(data[0], data[1]) for data in batches]
        with jax.transfer_guard("disallow"):
            for x, y in batches:
                model, state, value = jitted(model, state, x, y)
                losses.append(value)
        after = placements((model, state))
        return (model, state, losses), before, after

    def over_mesh(leaf):
        return over(*["data"] * (split and leaf.ndim > 0))

    ours, upstream = (Counted(fj, step, donate=donate) for fj in reversed(_BOTH.values()))
    result, before, after = trained(ours, over_mesh, over(None, "data"))
    expected, _, expected_after = trained(upstream, over_mesh, over(None, "data"))
    alone, _, _ = trained(
        Counted(eqx.filter_jit, step), lambda _: jax.devices()[0], jax.devices()[0]
    )
    assert_same(arrays(result), arrays(expected))
    assert after == expected_after
    for (sharding, _), (kept, _), leaf in zip(before, after, arrays(result), strict=False):
        assert kept.is_equivalent_to(sharding, leaf.ndim)
    assert ours.traces == upstream.traces == 1
    for leaf, twin in zip(arrays(result), arrays(alone), strict=True):
        np.testing.assert_allclose(leaf, twin, rtol=1e-3, atol=1e-5)
    assert result[2][-1] < result[2][0]


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


def test_what_was_put_on_one_device_shares_a_buffer_there():
    one, two = jax.devices()[1:3]
    tree = [jax.device_put(array(size), device) for size in (2, 3) for device in (one, two)]
    packed = eqxjit.pack(tree, optimizer=None)
    assert [(a.shape, a.devices()) for a in packed.arrays] == [((5,), {one}), ((5,), {two})]
    assert_same(packed.unpack(), tree)
    assert placements(packed.unpack()) == placements(tree)


def test_a_packed_that_is_replicated():
    """Data-parallel training: the batch is split, the weights are on all devices."""
    model = eqx.nn.MLP(4, 2, 8, 2, key=jr.key(0))
    x = jax.device_put(array(8, 4), over("data"))

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    params = eqx.filter_shard(eqxjit.pack(model, optimizer=None), over())
    step = eqxjit.filter_jit(eqx.filter_grad(lambda p, x: loss(p.unpack(), x)))
    expected = eqx.filter_jit(eqx.filter_grad(loss))(model, array(8, 4))
    for _ in range(CALLS):
        gradient = step(params, x)
    assert all(a.sharding.is_fully_replicated for a in gradient.arrays)
    for one, other in zip(arrays(gradient.unpack()), arrays(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_packing_inside_a_shard():
    tree = [array(8, 2), array(8), array(8) + 1, array(3), array(4)]
    specs = [*[PartitionSpec("data")] * 3, PartitionSpec(), PartitionSpec()]

    def through(tree):
        packed = eqxjit.pack(tree, optimizer=None)
        # The first three differ from shard to shard.
        assert [a.shape for a in packed.arrays] == [(2, 2), (2,), (2,), (7,)]
        return packed.unpack()

    mapped = jax.shard_map(through, mesh=mesh(), in_specs=(specs,), out_specs=specs)
    for got, leaf in zip(jax.jit(mapped)(tree), tree, strict=True):
        np.testing.assert_array_equal(got, leaf)


def test_what_is_sharded_by_its_type_is_left_alone():
    with jax.set_mesh(mesh(AxisType.Explicit)):
        sharded = jax.device_put(array(8, 2), PartitionSpec("data"))

        @jax.jit
        def through(sharded, small):
            packed = eqxjit.pack([sharded, small, small + 1], optimizer=None)
            assert [a.shape for a in packed.arrays] == [(8, 2), (6,)]
            return packed.unpack()

        got = through(sharded, array(3))
    assert got[0].sharding.is_equivalent_to(sharded.sharding, 2)
    np.testing.assert_array_equal(got[1], array(3))
