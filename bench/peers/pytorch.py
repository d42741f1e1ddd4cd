"""Runs the models of `bench latency` in PyTorch: eager, by TorchScript and by Inductor."""

import logging
import warnings
from typing import Any

import numpy as np
import torch

from ..harness.measure import Case
from ..models.inference import FixedModel
from .pytorch_models import torch_model

torch.set_num_threads(1)
logging.getLogger("torch").setLevel(logging.ERROR)

# Calls are timed in this context, as PyTorch recommends for inference.
surroundings = torch.inference_mode


def eager(fixed: FixedModel) -> Case:
    """Call the model without compiling it."""
    return _case(fixed, torch_model(fixed.model))


def jit_freeze(fixed: FixedModel) -> Case:
    """Call the model traced to TorchScript, with its weights as constants."""
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch now prefers torch.compile.
        traced = torch.jit.trace(torch_model(fixed.model), torch_input(fixed))
        return _case(fixed, torch.jit.freeze(traced))


def compiled(fixed: FixedModel) -> Case:
    """Call the model compiled for this shape by Inductor, which needs a C++ compiler."""
    model: Any = torch.compile(torch_model(fixed.model), dynamic=False)
    with torch.inference_mode():
        model(torch_input(fixed))
    return _case(fixed, model)


def torch_input(fixed: FixedModel) -> torch.Tensor:
    """Return the input of the model's next call."""
    return torch.tensor(np.asarray(fixed.x))


def _case(fixed: FixedModel, model: Any) -> Case:
    return fixed.case("f(x)", {"f": model}, torch_input(fixed))
