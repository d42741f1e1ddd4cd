"""`bench latency`: p50, p99 and p99.9 of a call of a small fixed model, against every competitor.

All on one thread with synchronous dispatch, each call timed by itself, on a GPU until its result is
there. Garbage is collected as in a careful server, that is, without the objects that were there at
the start (`gc.freeze`). The peers run on a CPU alone, and need the extra `peers`.
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

CALLS = 500  # of each competitor, each round
PERCENTILES = (50, 99, 99.9)

Percentiles = dict[str, list[float]]  # microseconds, by competitor

# How other packages call the model: the module of `bench.peers`, and the function in it.
PEERS = {
    "ONNX Runtime": ("onnx", "onnx_runtime"),
    "PyTorch": ("pytorch", "eager"),
    "torch.jit.freeze": ("pytorch", "jit_freeze"),
    "torch.compile": ("pytorch", "compiled"),
}


def main(argv: list[str]) -> int:
    """Check that all competitors agree, time them, report and write."""
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

    columns = ("", *(f"p{p:g}" for p in PERCENTILES), "p50, of closure", "p50, of flattened")
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
    cases: Cases = {}
    for name, (module, function) in PEERS.items():
        if jax.default_backend() != "cpu":
            skipped[name] = "runs on a CPU here"
        if name in skipped:
            continue
        try:
            peer = importlib.import_module(f"bench.peers.{module}")
            cases[name] = getattr(peer, function)(fixed)
        except Exception as error:
            # It may not be installed, or lack a compiler: that is no reason to time nobody.
            skipped[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return cases


def _surroundings() -> contextlib.AbstractContextManager[Any]:
    """What PyTorch's calls want around them, where it is imported."""
    pytorch = sys.modules.get("bench.peers.pytorch")
    return pytorch.surroundings() if pytorch else contextlib.nullcontext()


def _times(cases: dict[str, Cases], rounds: Iterable[Any]) -> dict[str, Percentiles]:
    """Each competitor's percentiles, from calls of all models taken in turn."""
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
