"""Runs the models of `bench latency` in ONNX Runtime, after an export by PyTorch."""

import io
import logging
import warnings

import numpy as np
import onnxruntime
import torch

from ..harness.measure import Case
from ..models.inference import FixedModel
from .pytorch import torch_input
from .pytorch_models import torch_model

for exporter in ("onnxscript", "onnx_ir"):
    logging.getLogger(exporter).setLevel(logging.ERROR)


def onnx_runtime(fixed: FixedModel) -> Case:
    """Call the model on one thread, with all graph optimisations and with NumPy arrays."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            torch_model(fixed.model), (torch_input(fixed),), dynamo=True, verbose=False
        )
    assert program is not None
    written = io.BytesIO()
    program.save(written)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = onnxruntime.InferenceSession(
        written.getvalue(), options, providers=["CPUExecutionProvider"]
    )
    names = {"run": session.run, "feed": session.get_inputs()[0].name}
    return fixed.case("run(None, {feed: x})[0]", names, np.asarray(fixed.x))
