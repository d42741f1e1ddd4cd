"""The same models in Flax's nnx, with the same weights, under its three ways of jitting."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array

from ..harness.competitors import Cases
from ..harness.measure import Case
from .networks import Block, ConvNet, Transformer, attention, call, mean_squared_error

Outputs = tuple[str, ...]


def _jitted(
    fun: Callable[..., Any],
    bound: Callable[[], dict[str, Any]],
    free: dict[str, Any],
    outputs: Outputs = ("out",),
    donate: bool = False,
) -> Cases:
    """`fun(*bound, *free)`; nnx objects are bound, and mutated where others return new ones."""
    target = ", ".join(outputs)
    arguments = ", ".join(free)
    donated: dict[str, Any] = {"donate_argnums": tuple(range(len(bound())))} if donate else {}
    jit = nnx.jit(fun, **donated)
    objects = bound()
    cached = nnx.cached_partial(jit, *bound().values())
    partial = nnx.jit_partial(fun, *bound().values(), graph=False, **donated)
    return {
        "nnx.jit": Case(
            f"{target} = f({', '.join(objects)}, {arguments})",
            lambda: {"f": jit, **objects, **free},
            outputs,
        ),
        "nnx.cached_partial": Case(
            f"{target} = f({arguments})", lambda: {"f": cached, **free}, outputs
        ),
        "nnx.jit_partial": Case(
            f"{target} = f({arguments})", lambda: {"f": partial, **free}, outputs
        ),
    }


class _Identity(nnx.Module):
    def __call__(self, x: Array) -> Array:
        return x


def identity(x: Array) -> Cases:
    """A Module without parameters."""
    return _jitted(call, lambda: {"model": _Identity()}, {"x": x})


def _assign(variable: Any, value: Any) -> None:
    # A copy, as a step may donate it; in nnx's shape, which differs for a convolution's bias.
    variable.value = jnp.copy(value).reshape(variable.value.shape)


def _linear(layer: eqx.nn.Linear) -> nnx.Linear:
    outputs, inputs = layer.weight.shape
    linear = nnx.Linear(inputs, outputs, rngs=nnx.Rngs(0))
    _assign(linear.kernel, layer.weight.T)
    _assign(linear.bias, layer.bias)
    return linear


class _MLP(nnx.Module):
    def __init__(self, model: eqx.nn.MLP) -> None:
        self.layers = nnx.List([_linear(layer) for layer in model.layers])

    def __call__(self, x: Array) -> Array:
        *hidden, last = self.layers
        for layer in hidden:
            x = jax.nn.relu(layer(x))
        return last(x)


def mlp(model: eqx.nn.MLP, x: Array) -> Cases:
    """The same MLP."""
    return _jitted(call, lambda: {"model": _MLP(model)}, {"x": x})


def gru(cell: eqx.nn.GRUCell, x: Array, h: Array) -> Cases:
    """The same GRU cell."""

    def copied() -> nnx.GRUCell:
        copy = nnx.GRUCell(cell.input_size, cell.hidden_size, rngs=nnx.Rngs(0))
        _assign(copy.dense_i.kernel, cell.weight_ih.T)
        _assign(copy.dense_i.bias, cell.bias)
        _assign(copy.dense_h.kernel, cell.weight_hh.T)
        return copy

    def step(cell: nnx.GRUCell, x: Array, h: Array) -> Array:
        return cell(h, x)[0]

    return _jitted(step, lambda: {"cell": copied()}, {"x": x, "h": h}, ("h",))


def lstm(cell: eqx.nn.LSTMCell, x: Array, hc: tuple[Array, Array]) -> Cases:
    """The same LSTM cell, in the variant that nnx calls optimised."""

    def copied() -> nnx.OptimizedLSTMCell:
        copy = nnx.OptimizedLSTMCell(cell.input_size, cell.hidden_size, rngs=nnx.Rngs(0))
        _assign(copy.dense_i.kernel, cell.weight_ih.T)
        _assign(copy.dense_h.kernel, cell.weight_hh.T)
        _assign(copy.dense_h.bias, cell.bias)
        return copy

    def step(cell: nnx.OptimizedLSTMCell, x: Array, hc: tuple[Array, Array]) -> Any:
        (c, h), _ = cell((hc[1], hc[0]), x)
        return h, c

    return _jitted(step, lambda: {"cell": copied()}, {"x": x, "hc": hc}, ("hc",))


def _training(
    make: Callable[[], nnx.Module],
    optimiser: optax.GradientTransformation,
    x: Array,
    y: Array,
    donate: bool = False,
) -> Cases:
    def bound() -> dict[str, Any]:
        model = make()
        return {"model": model, "optimiser": nnx.Optimizer(model, optimiser, wrt=nnx.Param)}

    def step(model: Any, optimiser: nnx.Optimizer, x: Array, y: Array) -> Array:
        loss, gradients = nnx.value_and_grad(mean_squared_error)(model, x, y)
        optimiser.update(model, gradients)
        return loss

    return _jitted(step, bound, {"x": x, "y": y}, ("loss",), donate)


def mlp_training(
    model: eqx.nn.MLP, optimiser: optax.GradientTransformation, x: Array, y: Array, donate: bool
) -> Cases:
    """The same MLP, trained."""
    return _training(lambda: _MLP(model), optimiser, x, y, donate)


class _Block(nnx.Module):
    def __init__(self, block: Block) -> None:
        width = block.qkv.weight.shape[1]
        self.norm1 = nnx.LayerNorm(width, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.norm2 = nnx.LayerNorm(width, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.qkv = _linear(block.qkv)
        self.project = _linear(block.project)
        self.up = _linear(block.up)
        self.down = _linear(block.down)
        self.heads = block.heads

    def __call__(self, x: Array) -> Array:
        q, k, v = jnp.split(self.qkv(self.norm1(x)), 3, axis=-1)
        x = x + self.project(attention(q, k, v, self.heads))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class _Transformer(nnx.Module):
    def __init__(self, model: Transformer) -> None:
        self.blocks = nnx.List([_Block(block) for block in model.blocks])

    def __call__(self, x: Array) -> Array:
        for block in self.blocks:
            x = block(x)
        return x


def transformer(model: Transformer, x: Array) -> Cases:
    """The same transformer."""
    return _jitted(call, lambda: {"model": _Transformer(model)}, {"x": x})


def transformer_training(
    model: Transformer, optimiser: optax.GradientTransformation, x: Array, y: Array
) -> Cases:
    """The same transformer, trained."""
    return _training(lambda: _Transformer(model), optimiser, x, y)


def _conv(layer: eqx.nn.Conv2d) -> nnx.Conv:
    conv = nnx.Conv(layer.in_channels, layer.out_channels, (3, 3), padding=1, rngs=nnx.Rngs(0))
    _assign(conv.kernel, layer.weight.transpose(2, 3, 1, 0))
    _assign(conv.bias, layer.bias)
    return conv


class _ConvNet(nnx.Module):
    def __init__(self, model: ConvNet) -> None:
        self.conv1, self.conv2 = _conv(model.conv1), _conv(model.conv2)
        self.norm1 = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
        self.norm2 = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
        self.head = _linear(model.head)

    def __call__(self, x: Array) -> Array:
        x = jax.nn.relu(self.norm1(self.conv1(x)))
        x = jax.nn.relu(self.norm2(self.conv2(x)))
        return self.head(jnp.mean(x, axis=(1, 2)))


def conv_net(model: ConvNet, images: Array) -> Cases:
    """The same CNN, which mutates its statistics; images have their channels last here."""
    images = images.transpose(0, 2, 3, 1)
    return _jitted(call, lambda: {"model": _ConvNet(model)}, {"images": images}, ("logits",))
