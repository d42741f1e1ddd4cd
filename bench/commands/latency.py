"""`bench latency`: measures p50, p99 and p99.9 of calls of small models with fixed weights.

All calls are on one thread with synchronous dispatch, and each is timed by itself, on a GPU until
its result is ready. The garbage collector skips objects that exist at the start (`gc.freeze`), as
in a careful server. ONNX Runtime and PyTorch run only on a CPU, and need `pip install -e
".[peers]"`.
"""

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterable
from typing import Any

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
)

import jax
import numpy as np
from rich.markup import escape

from ..harness.environment import record
from ..harness.measure import agree, chosen, options
from ..harness.printing import console, progress, show
from ..models.inference import CLOSURE, FLATTENED, MODELS, Cases, FixedModel, jax_cases

CALLS = 500  # of each competitor in each round
PERCENTILES = (50, 99, 99.9)

Percentiles = dict[str, list[float]]  # microseconds, by competitor

# Other packages that call the model: a module of `bench.peers`, and a function in it.
PEERS = {
    "ONNX Runtime": ("onnx", "onnx_runtime"),
    "PyTorch": ("pytorch", "eager"),
    "torch.jit.freeze": ("pytorch", "jit_freeze"),
    "torch.compile": ("pytorch", "compiled"),
}


def main(argv: list[str]) -> int:
    """Check that all competitors agree, time them, print the times and write the record."""
    args = options("latency", f"{__doc__}\n{CALLS} calls a round.", argv, rounds=100)
    models = chosen(MODELS, args)

    skipped: dict[str, str] = {}
    cases: dict[str, Cases] = {}
    for name, build in models.items():
        fixed = build()
        cases[name] = jax_cases(fixed) | _peers(fixed, skipped)
        with _surroundings():
            agree(cases[name], CLOSURE, 3, rtol=1e-4, atol=1e-5)
    times = _times(cases, progress(range(args.rounds), "rounds"))

    columns = ("", *(f"p{p:g}" for p in PERCENTILES), "p50 / closure", "p50 / flattened")
    for name, rows in times.items():
        lines = [
            (way, *us, us[0] / rows[CLOSURE][0], us[0] / rows[FLATTENED][0])
            for way, us in rows.items()
        ]
        show(f"{name}: µs per call", columns, lines)
    for peer, reason in skipped.items():
        console.print(f"[yellow]skipped[/]: {peer} ({escape(reason)})")
    report = {
        "calls": args.rounds * CALLS,
        "percentiles": PERCENTILES,
        "models": {name: {"us": rows} for name, rows in times.items()},
        "skipped": skipped,
    }
    record("latency", report, args)
    return 0


def _peers(fixed: FixedModel, skipped: dict[str, str]) -> Cases:
    """Return the cases of other packages. Note in `skipped` why a package can't run."""
    cases: Cases = {}
    for name, (module, function) in PEERS.items():
        if jax.default_backend() != "cpu":
            skipped[name] = "this benchmark runs it only on a CPU"
        if name in skipped:
            continue
        try:
            peer = importlib.import_module(f"bench.peers.{module}")
            cases[name] = getattr(peer, function)(fixed)
        except Exception as error:
            # The package may not be installed, or may lack a compiler. Time the others anyway.
            skipped[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return cases


def _surroundings() -> contextlib.AbstractContextManager[Any]:
    """Return the context that PyTorch's calls need; an empty context if it isn't imported."""
    pytorch = sys.modules.get("bench.peers.pytorch")
    return pytorch.surroundings() if pytorch else contextlib.nullcontext()


def _times(cases: dict[str, Cases], rounds: Iterable[Any]) -> dict[str, Percentiles]:
    """Return the percentiles of each competitor, by model. All take turns in each round."""
    samplers = {
        (model, name): case.sampler()
        for model, rows in cases.items()
        for name, case in rows.items()
    }
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in samplers}
    order = list(samplers)
    with _surroundings():
        for key in order:
            samplers[key](CALLS)
        gc.collect()
        gc.freeze()
        for _ in rounds:
            for key in order:
                samples[key] += samplers[key](CALLS)
            order.append(order.pop(0))
    return {
        model: {
            name: [float(us) for us in np.percentile(samples[model, name], PERCENTILES) * 1e6]
            for name in rows
        }
        for model, rows in cases.items()
    }
