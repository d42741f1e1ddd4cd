"""The models of `bench latency`, with JAX's, Equinox's and eqxjit's ways to call them.

* "jax.jit, closure": the function closes over the model, so the weights are constants of the
  program.
* "jax.jit, flattened": the function takes a flat list of the weights, flattened by hand outside the
  timed loop.
* "bound": the model is wrapped itself, as in `filter_jit(model)`.
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
    """A model with fixed weights.

    - `model`: the model.
    - `x`: the input of its next call.
    - `carried`: whether `x` is a hidden state, so that the output is the input of the next call.
    """

    model: Callable[[Any], Any]
    x: jax.Array
    carried: bool = False

    def case(self, statement: str, names: Mapping[str, Any], x: Any) -> Case:
        """Return the case of a call. `statement` is an expression that uses `names` and `x`."""
        target = "x" if self.carried else "out"
        return Case(f"{target} = {statement}", lambda: {**names, "x": x}, (target,))


class GRUStep(eqx.Module):
    """A step of a GRU whose input is fixed, from hidden state to hidden state."""

    cell: eqx.nn.GRUCell
    x: jax.Array

    def __call__(self, h: jax.Array) -> jax.Array:
        """Return the next hidden state."""
        return self.cell(self.x, h)


def mlp() -> FixedModel:
    """Return an MLP with layers of 4, 32, 32 and 4 features, called on one example."""
    return FixedModel(small_mlp(), jnp.linspace(-1.0, 1.0, 4))


def gru() -> FixedModel:
    """Return a step of a GRU of width 32."""
    cell = eqx.nn.GRUCell(4, 32, key=jr.key(0))
    return FixedModel(GRUStep(cell, jnp.linspace(-1.0, 1.0, 4)), jnp.zeros(32), carried=True)


def conv_net() -> FixedModel:
    """Return a CNN with two convolutions, called on one image of 8 by 8."""
    return FixedModel(small_conv_net(key=jr.key(0)), jr.normal(jr.key(1), (1, 8, 8)))


def transformer() -> FixedModel:
    """Return two transformer blocks of width 32, called on 8 tokens."""
    model = Transformer(width=32, heads=4, depth=2, key=jr.key(0))
    return FixedModel(model, jr.normal(jr.key(1), (8, 32)))


MODELS: dict[str, Callable[[], FixedModel]] = {
    "MLP": mlp,
    "GRU step": gru,
    "CNN": conv_net,
    "transformer": transformer,
}


def jax_cases(fixed: FixedModel) -> Cases:
    """Return the cases of a model under `jax.jit`, Equinox and eqxjit."""
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
