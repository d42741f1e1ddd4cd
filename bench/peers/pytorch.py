"""The models of `bench latency` under PyTorch: eager, TorchScript, Inductor."""

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

# What PyTorch's own advice for latency is: calls are timed within.
surroundings = torch.inference_mode


def eager(fixed: FixedModel) -> Case:
    """As the model is written."""
    return _case(fixed, torch_model(fixed.model))


def jit_freeze(fixed: FixedModel) -> Case:
    """Traced to TorchScript, the weights made constants of it."""
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore", FutureWarning)  # It prefers torch.compile by now.
        traced = torch.jit.trace(torch_model(fixed.model), torch_input(fixed))
        return _case(fixed, torch.jit.freeze(traced))


def compiled(fixed: FixedModel) -> Case:
    """Compiled by Inductor, which needs a C++ compiler, for this shape alone."""
    model: Any = torch.compile(torch_model(fixed.model), dynamic=False)
    with torch.inference_mode():
        model(torch_input(fixed))
    return _case(fixed, model)


def torch_input(fixed: FixedModel) -> torch.Tensor:
    """The input of the model's next call."""
    return torch.tensor(np.asarray(fixed.x))


def _case(fixed: FixedModel, model: Any) -> Case:
    return fixed.case("f(x)", {"f": model}, torch_input(fixed))
