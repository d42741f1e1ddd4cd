"""Translates the models of `bench latency` to PyTorch, with the same weights."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ..models.inference import GRUStep
from ..models.networks import Block, Transformer


@functools.singledispatch
def torch_model(model: Any) -> nn.Module:
    """Return the same model in PyTorch, with the same weights, for inference."""
    raise TypeError(f"no PyTorch model is known for {type(model).__name__}")


def _filled(module: nn.Module, **arrays: Any) -> Any:
    """Set these parameters of a module, and return it for inference."""
    with torch.no_grad():
        for name, array in arrays.items():
            parameter = getattr(module, name)
            parameter.copy_(torch.tensor(np.asarray(array)).reshape(parameter.shape))
    return module.requires_grad_(False).eval()


@torch_model.register
def _(model: eqx.nn.Linear) -> nn.Module:
    linear = nn.Linear(int(model.in_features), int(model.out_features))
    return _filled(linear, weight=model.weight, bias=model.bias)


@torch_model.register
def _(model: eqx.nn.LayerNorm) -> nn.Module:
    norm = nn.LayerNorm(model.shape, eps=model.eps)
    return _filled(norm, weight=model.weight, bias=model.bias)


@torch_model.register
def _(model: eqx.nn.Conv) -> nn.Module:
    conv = nn.Conv2d(
        model.in_channels, model.out_channels, model.kernel_size, model.stride, model.padding[0][0]
    )
    return _filled(conv, weight=model.weight, bias=model.bias)


@torch_model.register
def _(model: eqx.nn.Lambda) -> nn.Module:
    return {jax.nn.relu: nn.ReLU(), jnp.ravel: nn.Flatten(0)}[model.fn]


@torch_model.register
def _(model: eqx.nn.Sequential) -> nn.Module:
    return nn.Sequential(*map(torch_model, model.layers)).eval()


@torch_model.register
def _(model: eqx.nn.MLP) -> nn.Module:
    first, *rest = map(torch_model, model.layers)
    return nn.Sequential(first, *(part for layer in rest for part in (nn.ReLU(), layer))).eval()


class _TorchGRUStep(nn.Module):
    """A GRU step with a fixed input, from hidden state to hidden state."""

    def __init__(self, step: GRUStep) -> None:
        super().__init__()
        cell = step.cell
        # PyTorch has a hidden bias for each gate, and Equinox only for the candidate state.
        hidden_bias = np.zeros(3 * cell.hidden_size, np.float32)
        hidden_bias[2 * cell.hidden_size :] = cell.bias_n
        self.cell = _filled(
            nn.GRUCell(cell.input_size, cell.hidden_size),
            weight_ih=cell.weight_ih,
            weight_hh=cell.weight_hh,
            bias_ih=cell.bias,
            bias_hh=hidden_bias,
        )
        self.register_buffer("x", torch.tensor(np.asarray(step.x)))
        self.eval()

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.cell(self.x, h)


class _TorchBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        for name in ("norm1", "norm2", "qkv", "project", "up", "down"):
            setattr(self, name, torch_model(getattr(block, name)))
        self.heads = block.heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, width = x.shape
        parts = self.qkv(self.norm1(x)).reshape(length, 3, self.heads, -1)
        q, k, v = parts.permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        x = x + self.project(attended.transpose(0, 1).reshape(length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


torch_model.register(Block, _TorchBlock)
torch_model.register(GRUStep, _TorchGRUStep)


@torch_model.register
def _(model: Transformer) -> nn.Module:
    return nn.Sequential(*map(torch_model, model.blocks)).eval()
