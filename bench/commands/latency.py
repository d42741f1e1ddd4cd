"""`bench latency`: p50, p99 and p99.9 of a call of a small fixed model, against every competitor.

All on one thread with synchronous dispatch, each call timed by itself; garbage is collected as in
a careful server, that is, without the objects that were there at the start (`gc.freeze`).
"""

import contextlib
import gc
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from typing import Any

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
)

import jax
import numpy as np
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from ..harness import pictures
from ..harness.environment import write
from ..harness.measure import options
from ..harness.printing import met_or_missed, wide_console
from ..models.inference import CLOSURE, FLATTENED, FROZEN, MODELS, Cases, FixedModel, jax_cases

ONNX_RUNTIME = "ONNX Runtime"
CALLS = 500  # of each competitor, each round
PERCENTILES = (50, 99, 99.9)
CLOSURE_TARGET = 1.10  # p50 of a frozen model, of a bare closure's

Percentiles = dict[str, list[float]]  # microseconds, by competitor


@dataclass(frozen=True)
class Peer:
    """Another package's way to call the model: where it is written, and what that needs."""

    module: str
    function: str
    packages: tuple[str, ...]


TORCH = ("torch",)
PEERS = {
    ONNX_RUNTIME: Peer("onnx", "onnx_runtime", ("onnxruntime", "onnx", "onnxscript", "torch")),
    "PyTorch": Peer("pytorch", "eager", TORCH),
    "torch.jit.freeze": Peer("pytorch", "jit_freeze", TORCH),
    "torch.compile": Peer("pytorch", "compiled", TORCH),
}


def main(argv: list[str]) -> int:
    """Check that all competitors agree, time them, report, write and draw."""
    parser = options("latency", f"{__doc__}\n{CALLS} calls a round.", rounds=100)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args(argv)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    console = wide_console(150)

    skipped: dict[str, str] = {}
    cases: dict[str, Cases] = {}
    with Progress(console=console) as progress:
        task = progress.add_task("", total=len(args.only) + args.rounds)
        for name in args.only:
            progress.update(task, description=f"{name}: compiling, checking")
            fixed = MODELS[name]()
            cases[name] = jax_cases(fixed) | _peers(fixed, skipped)
            _check(name, cases[name])
            progress.advance(task)
        times = _times(cases, args.rounds, progress, task)

    for name, rows in times.items():
        console.print(_table(name, rows))
    for peer, reason in skipped.items():
        console.print(f"[yellow]skipped[/]: {peer} ({escape(reason)})")
    for line in _verdicts(times):
        console.print(line)

    if args.output or len(args.only) == len(MODELS):
        report = {
            "calls": args.rounds * CALLS,
            "percentiles": PERCENTILES,
            "models": {name: {"us": rows} for name, rows in times.items()},
            "skipped": skipped,
        }
        written = write("latency", report, args.output)
        pictures.latencies(times, written.with_suffix(".png"))
        console.print(f"written: {written} and a picture beside it")
    return 0


def _peers(fixed: FixedModel, skipped: dict[str, str]) -> Cases:
    cases: Cases = {}
    for name, peer in PEERS.items():
        missing = [p for p in peer.packages if importlib.util.find_spec(p) is None]
        if missing:
            skipped[name] = f'no {", ".join(missing)}: pip install -e ".[bench,peers]"'
        if name in skipped:
            continue
        module = importlib.import_module(f"bench.peers.{peer.module}")
        try:
            cases[name] = getattr(module, peer.function)(fixed)
        except Exception as error:
            # It may lack a compiler, say: that is no reason to time nobody.
            skipped[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return cases


def _surroundings() -> contextlib.AbstractContextManager[Any]:
    """What PyTorch's calls want around them, where it is imported."""
    pytorch = sys.modules.get("bench.peers.pytorch")
    return pytorch.surroundings() if pytorch else contextlib.nullcontext()


def _check(model: str, cases: Cases) -> None:
    """Three calls of each competitor must give what the closure gives."""
    with _surroundings():
        [expected] = cases[CLOSURE].run(3)
        for name, case in cases.items():
            [got] = case.run(3)
            np.testing.assert_allclose(
                np.asarray(got),
                np.asarray(expected),
                rtol=1e-4,
                atol=1e-5,
                err_msg=f"{model}: {name}",
            )


def _times(
    cases: dict[str, Cases], rounds: int, progress: Progress, task: Any
) -> dict[str, Percentiles]:
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
        for _ in range(rounds):
            progress.update(task, description="calling")
            for key in order:
                samples[key] += samplers[key](CALLS)
            order.append(order.pop(0))
            progress.advance(task)
    return {
        model: {
            name: [float(us) for us in np.percentile(samples[model, name], PERCENTILES) * 1e6]
            for name in rows
        }
        for model, rows in cases.items()
    }


def _table(model: str, rows: Percentiles) -> Table:
    table = Table(title=f"{model}: µs per call", row_styles=["", "dim"])
    table.add_column("", no_wrap=True)
    for name in (*(f"p{p:g}" for p in PERCENTILES), "p50, of closure", "p50, of flattened"):
        table.add_column(name, justify="right")
    for name, figures in rows.items():
        table.add_row(
            name,
            *(f"{us:.2f}" for us in figures),
            f"{figures[0] / rows[CLOSURE][0]:.2f}",
            f"{figures[0] / rows[FLATTENED][0]:.2f}",
        )
    return table


def _verdicts(times: dict[str, Percentiles]) -> list[str]:
    """A line for each target: what it is, what came out."""
    lines = []
    for model, rows in times.items():
        limits = {CLOSURE: CLOSURE_TARGET, FLATTENED: 1.0}
        if model == "MLP" and ONNX_RUNTIME in rows:
            limits[ONNX_RUNTIME] = 1.0
        for other, limit in limits.items():
            ratio = rows[FROZEN][0] / rows[other][0]
            verdict = met_or_missed(ratio <= limit)
            lines.append(
                f"{verdict}: {model}, p50 of {FROZEN} over {other} is {ratio:.3f}, "
                f"at most {limit:.2f}"
            )
    return lines
