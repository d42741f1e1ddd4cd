"""`bench advice`: what each advice of the latency guide is worth, measured.

Each advice is two ways to do one thing; both run in fresh processes, in turn.
"""

import argparse
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress
from rich.table import Table

from ..harness.environment import RESULTS, facts
from ..harness.printing import wide_console
from ..harness.processes import output_of

ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


@dataclass(frozen=True)
class Way:
    """One way to do the thing: the statement that is timed, and the settings of its process.

    - `statement`: of the names that `bench.probes.advice` lists.
    - `examples`: how many the statement computes.
    """

    label: str
    statement: str
    config: dict[str, Any] = field(default_factory=dict)
    xla_flags: str = ""
    examples: int = 1


@dataclass(frozen=True)
class Advice:
    """Do the second rather than the first, with this model."""

    model: str
    instead_of: Way
    do: Way


ASYNC = "jax_cpu_enable_async_dispatch"
CALL = "out = f(x)"
ADVICE = {
    "synchronous dispatch": Advice(
        "transformer",
        Way("asynchronous", "out = f(x).block_until_ready()", {ASYNC: True}),
        Way("synchronous", "out = f(x).block_until_ready()"),
    ),
    "x64 off": Advice(
        "transformer", Way("float64", CALL, {"jax_enable_x64": True}), Way("float32", CALL)
    ),
    "one thread": Advice(
        "transformer", Way("all cores", CALL), Way("one thread", CALL, xla_flags=ONE_THREAD)
    ),
    "NumPy in": Advice(
        "MLP",
        Way("jnp.asarray first", "out = f(asarray(given))"),
        Way("passed as it is", "out = f(given)"),
    ),
    "NumPy out": Advice(
        "MLP",
        Way("item by item", "out = [float(item) for item in f(x)]"),
        Way("np.asarray first", "out = to_numpy(f(x)).tolist()"),
    ),
    "pre-allocated inputs": Advice(
        "CNN",
        Way("a new array", "out = f(array(request, float32))"),
        Way("one buffer, filled", "buffer[...] = request; out = f(buffer)"),
    ),
    "batching": Advice(
        "MLP",
        Way("32 calls", "for row in rows: out = f(row)", examples=32),
        Way("one call of 32", "out = f_batch(batch)", examples=32),
    ),
}


def main(argv: list[str]) -> int:
    """Run every way of every advice, in turn, several times; report the best median."""
    parser = argparse.ArgumentParser(prog="python -m bench advice", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="processes for each way")
    parser.add_argument("--calls", type=int, default=5000, help="in each process")
    parser.add_argument("--only", nargs="+", choices=ADVICE, default=list(ADVICE))
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args(argv)
    console = wide_console(120)

    runs = [(name, way) for name in args.only for way in (ADVICE[name].instead_of, ADVICE[name].do)]
    medians: dict[tuple[str, str], list[float]] = {(name, way.label): [] for name, way in runs}
    with Progress(console=console) as progress:
        task = progress.add_task("", total=args.repeats * len(runs))
        for _ in range(args.repeats):
            for name, way in runs:
                progress.update(task, description=f"{name}: {way.label}")
                medians[name, way.label].append(_run(ADVICE[name].model, way, args.calls))
                progress.advance(task)
            runs.reverse()

    best = {
        name: {
            way.label: min(medians[name, way.label]) / way.examples
            for way in (ADVICE[name].instead_of, ADVICE[name].do)
        }
        for name in args.only
    }
    console.print(_table(best))
    if args.output or len(args.only) == len(ADVICE):
        written = args.output or RESULTS / "advice-cpu.json"
        report = facts() | {"repeats": args.repeats, "calls": args.calls, "us_per_example": best}
        written.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"written: {written}")
    return 0


def _run(model: str, way: Way, calls: int) -> float:
    """The median in microseconds, from a process of its own."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {way.xla_flags}".strip()
    settings = json.dumps(asdict(way))
    environment = os.environ | {"XLA_FLAGS": flags}
    return float(
        output_of("bench.probes.advice", model, str(calls), settings, environment=environment)
    )


def _table(best: dict[str, dict[str, float]]) -> Table:
    table = Table(title="µs per example, median")
    for column in ("advice", "model", "instead of", "", "do", "", "times faster"):
        table.add_column(column, justify="left" if column else "right")
    for name, figures in best.items():
        (worse, slow), (better, fast) = figures.items()
        table.add_row(
            name,
            ADVICE[name].model,
            worse,
            f"{slow:.2f}",
            better,
            f"{fast:.2f}",
            f"{slow / fast:.2f}",
        )
    return table
