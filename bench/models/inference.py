"""The models of `bench latency`, under each of JAX's ways to call a model whose weights stay.

* closure: `jax.jit` over a closure, so that the weights are constants of the program.
* flattened: `jax.jit` over a flat list of the weights, flattened by hand outside the timed loop.
* the others are Equinox's and eqxjit's, named as they are written.
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np

import eqxjit

from ..harness.measure import Case
from .networks import Transformer, call, small_conv_net, small_mlp

CLOSURE = "jax.jit, closure"
FLATTENED = "jax.jit, flattened"
FROZEN = "eqxjit.freeze"

Cases = dict[str, Case]


@dataclass(frozen=True)
class FixedModel:
    """A model whose weights stay, and the input of its next call.

    - `carried`: whether that input is a hidden state, for which the next call takes the output.
    """

    model: Callable[[Any], Any]
    x: jax.Array
    carried: bool = False

    def case(self, statement: str, names: Mapping[str, Any], x: Any) -> Case:
        """A call of `statement`, an expression of `names` and of `x`."""
        target = "x" if self.carried else "out"
        return Case(f"{target} = {statement}", lambda: {**names, "x": x}, (target,))


class GRUStep(eqx.Module):
    """A step of a GRU from hidden state to hidden state; its other input stays."""

    cell: eqx.nn.GRUCell
    x: jax.Array

    def __call__(self, h: jax.Array) -> jax.Array:
        """From and to the hidden state."""
        return self.cell(self.x, h)


def mlp() -> FixedModel:
    """The MLP 4-32-32-4, one example."""
    return FixedModel(small_mlp(), jnp.linspace(-1.0, 1.0, 4))


def gru() -> FixedModel:
    """A GRU of width 32."""
    cell = eqx.nn.GRUCell(4, 32, key=jr.key(0))
    return FixedModel(GRUStep(cell, jnp.linspace(-1.0, 1.0, 4)), jnp.zeros(32), carried=True)


def conv_net() -> FixedModel:
    """A CNN of two convolutions, one image of 8 by 8."""
    return FixedModel(small_conv_net(key=jr.key(0)), jr.normal(jr.key(1), (1, 8, 8)))


def transformer() -> FixedModel:
    """Two transformer blocks of width 32, 8 tokens."""
    model = Transformer(width=32, heads=4, depth=2, key=jr.key(0))
    return FixedModel(model, jr.normal(jr.key(1), (8, 32)))


MODELS: dict[str, Callable[[], FixedModel]] = {
    "MLP": mlp,
    "GRU step": gru,
    "CNN": conv_net,
    "transformer": transformer,
}


def jax_cases(fixed: FixedModel) -> Cases:
    """The model under `jax.jit`, Equinox and eqxjit."""
    model, x = fixed.model, fixed.x
    weights, treedef = jtu.tree_flatten(eqx.filter(model, eqx.is_array))
    static = eqx.filter(model, eqx.is_array, inverse=True)

    def on_list(weights: list[jax.Array], x: jax.Array) -> Any:
        return eqx.combine(jtu.tree_unflatten(treedef, weights), static)(x)

    flat = {"f": jax.jit(on_list), "weights": weights}
    on_packed = eqxjit.filter_jit(lambda p, x: p.unpack()(x))
    packed = {"f": on_packed, "p": eqxjit.pack(model, optimizer=None)}
    frozen = eqxjit.freeze(model)
    numpy = {"f": eqxjit.freeze(model), "asarray": np.asarray}
    ahead = eqxjit.freeze(model)
    ahead.compile(jax.ShapeDtypeStruct(x.shape, x.dtype), other_shapes="raise")
    return {
        CLOSURE: fixed.case("f(x)", {"f": jax.jit(lambda x: model(x))}, x),
        FLATTENED: fixed.case("f(weights, x)", flat, x),
        "equinox.filter_jit": fixed.case("f(m, x)", {"f": eqx.filter_jit(call), "m": model}, x),
        "equinox.filter_jit, bound": fixed.case("f(x)", {"f": eqx.filter_jit(model)}, x),
        "eqxjit.filter_jit": fixed.case("f(m, x)", {"f": eqxjit.filter_jit(call), "m": model}, x),
        "eqxjit.filter_jit, bound": fixed.case("f(x)", {"f": eqxjit.filter_jit(model)}, x),
        "eqxjit.filter_jit, packed": fixed.case("f(p, x)", packed, x),
        FROZEN: fixed.case("f(x)", {"f": frozen}, x),
        f"{FROZEN}, ahead of time": fixed.case("f(x)", {"f": ahead}, x),
        f"{FROZEN}, saved, loaded": fixed.case("f(x)", {"f": _saved_and_loaded(frozen, x)}, x),
        f"{FROZEN}, NumPy": fixed.case("asarray(f(x))", numpy, np.asarray(x)),
    }


def _saved_and_loaded(
    frozen: eqxjit.types.FrozenFunction[..., Any], x: jax.Array
) -> Callable[..., Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.eqxjit")
        frozen.save(path, x)
        return eqxjit.load(path)
