"""The workloads of `bench calls`. Each has a case for each competitor."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from ..harness.competitors import FILTER_JITS, Cases, FilterJit, jitted
from ..harness.measure import Case
from .networks import (
    ConvNet,
    DropoutNet,
    Transformer,
    batch_forward,
    batched,
    call,
    sample_of,
    small_mlp,
    training_step,
    tree_of,
)
from .solves import SOLVES, solve


@dataclasses.dataclass(frozen=True)
class Workload:
    """One workload.

    - `group`: the group of workloads over which means are taken.
    - `build`: returns the case of each competitor.
    - `calls`: how many calls one execution of the statement makes.
    - `leaves`: how many leaves the tree has, for a workload that passes a tree.
    - `devices`: how many virtual devices it needs. With several, the CPU time of the calling thread
        is measured.
    - `asynchronous`: whether it is dispatched asynchronously, as is JAX's default.
    """

    group: str
    build: Callable[[], Cases]
    calls: int = 1
    leaves: int | None = None
    devices: int = 1
    asynchronous: bool = False


def applied(model: Callable[[Any], Any], x: Array) -> Cases:
    """Call a model on one example."""
    return jitted(call, {"model": model, "x": x})


def mlp(width: int) -> Cases:
    """Call an MLP of three layers."""
    return applied(small_mlp(width), jnp.linspace(-1.0, 1.0, 4))


def recurrent(cell: Any, state: Any) -> Cases:
    """Take a step of a recurrent network. Each call gets the state of the call before."""
    step = lambda cell, x, state: cell(x, state)  # noqa: E731
    arguments = {"cell": cell, "x": jnp.linspace(-1.0, 1.0, 4), "state": state}
    return jitted(step, arguments, ("state",))


def _training(
    model: eqx.Module,
    optimizer: optax.GradientTransformation,
    x: Array,
    y: Array,
    donate: str = "none",
) -> Cases:
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    arguments = {"model": model, "opt_state": state, "x": x, "y": y}
    outputs = ("model", "opt_state", "loss")
    return jitted(training_step(optimizer), arguments, outputs, donate=donate)


def mlp_training(donate: str) -> Cases:
    """Take an adam step on a batch of 8. Each call gets the results of the call before."""
    model, optimizer = small_mlp(), optax.adam(1e-3)
    x = jr.normal(jr.key(1), (8, 4))
    return _training(model, optimizer, x, jnp.sin(x), donate)


def conv_net() -> Cases:
    """Call a CNN with BatchNorm in training mode on 4 images, with the state of the call before."""
    model, state = eqx.nn.make_with_state(ConvNet)(key=jr.key(0))
    images = jr.normal(jr.key(1), (4, 1, 8, 8))
    arguments = {"model": model, "state": state, "images": images}
    return jitted(batch_forward, arguments, ("state", "logits"))


def transformer_training() -> Cases:
    """Take an adamw step of a transformer of 12 small blocks on a batch of 2."""
    model, optimizer = Transformer(key=jr.key(0)), optax.adamw(1e-3)
    x = jr.normal(jr.key(1), (2, 8, 16))
    return _training(model, optimizer, x, jnp.sin(x))


def _styled(make: Callable[[FilterJit], Case], floors: Cases) -> Cases:
    """Replace the cases of both `filter_jit`s by calls in another style."""
    return floors | {name: make(filter_jit) for name, filter_jit in FILTER_JITS.items()}


def bound_model() -> Cases:
    """Call `filter_jit(model)(x)`. The floor and `jax.jit` get the model as an argument."""
    model, x = small_mlp(), jnp.linspace(-1.0, 1.0, 4)

    def bound(filter_jit: FilterJit) -> Case:
        f = filter_jit(model)
        return Case("out = f(x)", lambda: {"f": f, "x": x})

    return _styled(bound, applied(model, x))


def method() -> Cases:
    """Call a decorated method, `model.step(x)`."""
    mlp, x = small_mlp(), jnp.linspace(-1.0, 1.0, 4)

    def decorated(filter_jit: FilterJit) -> Case:
        class Model(eqx.Module):
            mlp: eqx.nn.MLP

            @filter_jit
            def step(self, x: Array) -> Array:
                return self.mlp(x)

        model = Model(mlp)
        return Case("out = model.step(x)", lambda: {"model": model, "x": x})

    return _styled(decorated, applied(mlp, x))


def keywords() -> Cases:
    """Call `f(model, x=x, shift=shift)`, and leave out a parameter with a default."""

    def shifted(model: eqx.nn.MLP, x: Array, shift: Array, scale: float = 2.0) -> Array:
        return scale * model(x) + shift

    arguments = {"model": small_mlp(), "x": jnp.linspace(-1.0, 1.0, 4), "shift": jnp.ones(4)}
    return jitted(shifted, arguments, call="f(model, x=x, shift=shift)")


def star_arguments() -> Cases:
    """Call `f(model, *xs)`. The floor and `jax.jit` get a tuple instead of `*xs`."""
    model, xs = small_mlp(), tuple(jnp.full(4, float(i)) for i in range(3))

    def summed(model: eqx.nn.MLP, *xs: Array) -> Array:
        return model(sum(xs, start=jnp.zeros(())))

    def starred(filter_jit: FilterJit) -> Case:
        f = filter_jit(summed)
        return Case("out = f(model, *xs)", lambda: {"f": f, "model": model, "xs": xs})

    on_tuple = lambda model, xs: summed(model, *xs)  # noqa: E731
    return _styled(starred, jitted(on_tuple, {"model": model, "xs": xs}))


def alternating() -> Cases:
    """Call one function with the training and the inference structure of a model in turn.

    The floor and `jax.jit` have a function for each structure.
    """
    train, key = DropoutNet(key=jr.key(0)), jr.key(1)
    test, x = eqx.nn.inference_mode(train), jnp.linspace(-1.0, 1.0, 4)
    on_train = lambda train, x, key: train(x, key)  # noqa: E731
    on_test = lambda test, x, key: test(x, key)  # noqa: E731
    first = jitted(on_train, {"train": train, "x": x, "key": key}, ("a",))
    second = jitted(on_test, {"test": test, "x": x, "key": key}, ("b",), function="g")

    def one_function(filter_jit: FilterJit) -> Case:
        f = filter_jit(on_train)
        names = {"f": f, "train": train, "test": test, "x": x, "key": key}
        return Case("a = f(train, x, key); b = f(test, x, key)", lambda: names, ("a", "b"))

    return _styled(one_function, {name: first[name] + second[name] for name in first})


def tree_in(leaves: int) -> Cases:
    """Pass a tree whose leaves all reach XLA. Only ten are added up, so computing costs little."""
    return jitted(sample_of, {"tree": tree_of(leaves)}, keep_unused=True)


def tree_in_and_out(leaves: int) -> Cases:
    """Pass a tree, and return a tree with the same number of leaves."""
    incremented = lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree)  # noqa: E731
    return jitted(incremented, {"tree": tree_of(leaves)})


def selu_million() -> Cases:
    """Apply `selu` to one million elements."""
    return jitted(jax.nn.selu, {"x": jr.normal(jr.key(0), (1_000_000,))})


def sharded(devices: int) -> Cases:
    """Call the MLP on a batch that is split over this many devices, with its weights on each.

    Each device computes one example, without communication. So only the cost of dispatch grows with
    the number of devices.
    """
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), "batch")
    everywhere, by_batch = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ([], ["batch"]))
    model = eqx.filter_shard(small_mlp(), everywhere)
    x = jax.device_put(jr.normal(jr.key(1), (devices, 4)), by_batch)
    return jitted(batched, {"model": model, "x": x})


def numpy_batches(examples: int, host_work: float) -> Cases:
    """Take a training step on a NumPy batch, after `host_work` seconds of work on the host.

    The competitor `asarray` is eqxjit with a batch that `jnp.asarray` converts first.
    """
    model = eqx.nn.MLP(784, 10, 64, depth=1, key=jr.key(0))
    x = np.random.default_rng(0).standard_normal((examples, 784), np.float32)
    y = np.sin(x[:, :10])
    cases = _training(model, optax.adam(1e-3), jnp.asarray(x), jnp.asarray(y))
    first = cases["eqxjit"].statement.replace("x, y", "asarray(x), asarray(y)")
    cases["asarray"] = dataclasses.replace(cases["eqxjit"], statement=first)
    names = {"x": x, "y": y, "f_inputs": [x, y], "asarray": jnp.asarray}
    names |= {"work": partial(time.sleep, host_work)}

    def fed(case: Case) -> Case:
        statement = f"work(); {case.statement}" if host_work else case.statement
        return Case(statement, lambda: {**case.names(), **names}, case.outputs)

    return {name: fed(case) for name, case in cases.items()}


def _in_memory(shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
    """Return an array of ones whose memory begins `offset` bytes after a multiple of 64."""
    n_bytes = 4 * math.prod(shape)
    memory = np.empty(n_bytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    array = memory[start : start + n_bytes].view(np.float32).reshape(shape)
    array[...] = 1
    return array


def _first(arrays: list[Array]) -> Array:
    return arrays[0].ravel()[0] + 1


def _mean(arrays: list[Array]) -> Array:
    return sum(map(jnp.mean, arrays), jnp.zeros(()))


def numpy_inputs(fun: Callable[[list[Array]], Array], arrays: Callable[[], Sequence[Any]]) -> Cases:
    """Call a function on NumPy arrays."""
    return jitted(fun, {"arrays": arrays()})


def eager(transformation: Callable[..., Any], statement: str) -> Cases:
    """Transform a jitted function outside of any jit, so that JAX transforms it in each call."""
    model, x = small_mlp(), jr.normal(jr.key(1), (8, 4))
    total = lambda model, x: jnp.sum(model(x))  # noqa: E731
    names = {way: case.names() for way, case in jitted(total, {"model": model, "x": x[0]}).items()}

    def case(call: Callable[..., Any], first: Any) -> Case:
        on_x = lambda x: call(first, x)  # noqa: E731
        return Case(statement, lambda: {"f": on_x, "transform": transformation, "x": x, "v": x[0]})

    weights = names["floor"]["f_inputs"][:-1]
    flat = lambda weights, x: names["floor"]["f"]([*weights, x])[0]  # noqa: E731
    on_trees = {way: case(names[way]["f"], names[way]["model"]) for way in ("jit", *FILTER_JITS)}
    return {"floor": case(flat, weights)} | on_trees


SIZES = (10, 100, 1_000, 10_000)
BATCHES = {"16 KB": (5, 0.0005), "400 KB": (128, 0.002), "10 MB": (3_200, 0.02)}

# XLA reads an array in place if its memory is aligned by 64 bytes. NumPy aligns by 16.
NUMPY_INPUTS: dict[str, tuple[Callable[[list[Array]], Array], Callable[[], Sequence[Any]]]] = {
    "1,000 arrays of 3 numbers": (_first, lambda: [np.ones(3, np.float32) for _ in range(1_000)]),
    "100 scalars": (_mean, lambda: [np.float32(i) for i in range(100)]),
    "16 KB, aligned": (_mean, lambda: [_in_memory((4_000,))]),
    "16 KB, not aligned": (_mean, lambda: [_in_memory((4_000,), 16)]),
    "400 KB, aligned": (_mean, lambda: [_in_memory((100_000,))]),
    "400 KB, not aligned": (_mean, lambda: [_in_memory((100_000,), 16)]),
    "4 MB, aligned": (_mean, lambda: [_in_memory((1_000_000,))]),
    "4 MB, not aligned": (_mean, lambda: [_in_memory((1_000_000,), 16)]),
    "4 MB, Fortran's order": (_mean, lambda: [np.ones((1_000, 1_000), np.float32, "F")]),
    "4 MB, every other column": (_mean, lambda: [np.ones((1_000, 2_000), np.float32)[:, ::2]]),
    "8 MB of float64": (_mean, lambda: [np.ones(1_000_000)]),
    "64 MB, aligned, one number read": (_first, lambda: [_in_memory((16_000_000,))]),
}

WORKLOADS: dict[str, Workload] = {
    # The benchmark of equinox#973.
    "Identity": Workload("small", lambda: applied(eqx.nn.Identity(), jnp.ones((1, 1)))),
    "MLP 32": Workload("small", partial(mlp, 32)),
    "MLP 256": Workload("small", partial(mlp, 256)),
    "GRUCell": Workload(
        "small", lambda: recurrent(eqx.nn.GRUCell(4, 32, key=jr.key(0)), jnp.zeros(32))
    ),
    "LSTMCell": Workload(
        "small", lambda: recurrent(eqx.nn.LSTMCell(4, 32, key=jr.key(0)), (jnp.zeros(32),) * 2)
    ),
    "MLP + adam": Workload("small", partial(mlp_training, "none")),
    "MLP + adam, donated": Workload("small", partial(mlp_training, "all")),
    "CNN, BatchNorm, State": Workload("large", conv_net),
    "transformer": Workload(
        "large", lambda: applied(Transformer(key=jr.key(0)), jr.normal(jr.key(1), (8, 16)))
    ),
    "transformer + adamw": Workload("large", transformer_training),
    "bound model": Workload("style", bound_model),
    "method": Workload("style", method),
    "keywords": Workload("style", keywords),
    "*args": Workload("style", star_arguments),
    "train/eval in turn": Workload("style", alternating, calls=2),
    **{f"{n:,} leaves in": Workload("tree in", partial(tree_in, n), leaves=n) for n in SIZES},
    **{
        f"{n:,} leaves in and out": Workload(
            "tree in and out", partial(tree_in_and_out, n), leaves=n
        )
        for n in SIZES[:-1]  # 10,000 take minutes to compile
    },
    "SELU": Workload("compute", selu_million),
    **{f"MLP on {n} devices": Workload("devices", partial(sharded, n), devices=n) for n in (2, 8)},
    **{name: Workload("library", partial(solve, name)) for name in SOLVES},
    **{
        f"NumPy, {size}{suffix}": Workload(
            "numpy", partial(numpy_batches, examples, work * seconds), asynchronous=True
        )
        for size, (examples, seconds) in BATCHES.items()
        for suffix, work in (("", 0), (", work between", 1))
    },
    **{
        f"NumPy, {name}": Workload("numpy inputs", partial(numpy_inputs, *row))
        for name, row in NUMPY_INPUTS.items()
    },
    "eager vmap": Workload("eager", partial(eager, jax.vmap, "out = transform(f)(x)")),
    "eager grad": Workload("eager", partial(eager, jax.grad, "out = transform(f)(v)")),
    "eager jvp": Workload("eager", partial(eager, jax.jvp, "out = transform(f, (v,), (v,))")),
}
