"""`bench startup`: importing, first calls, new shapes, nested calls in a trace: fresh processes.

And the ways to get two functions of a model ready: cold, from JAX's persistent cache, side by
side in threads, loaded from files.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..harness.environment import facts
from ..harness.printing import met_or_missed, wide_console
from ..harness.processes import output_of
from ..probes.startup import PROBES, Figures
from ..probes.ways_to_start import MODELS

IMPORT_TARGET = 0.1  # of importing Equinox, once that is imported
FIRST_CALL_TARGET = 1.05  # of upstream: first calls and new shapes
NESTED_TARGET = 1.0  # of upstream
LATER_CALL_TARGET = 2  # of a warm call; or as many as the second call of `jax.jit` itself takes

Row = tuple[str, str]  # probe, figure

# What the other probes run is `jax.jit` on flat arrays, too.
COMPETITORS = {"import": ("eqx", "eqxjit"), "nested": ("eqx", "eqxjit")}

# What each way is called, what runs it, and whether it finds the persistent cache filled.
WAYS = (
    ("Equinox, cold", "equinox", False),
    ("cold", "eqxjit", False),
    ("persistent cache", "eqxjit", True),
    ("side by side", "side by side", False),
    ("side by side, persistent cache", "side by side", True),
    ("loaded", "loaded", False),
    ("loaded, persistent cache", "loaded", True),
)


def main(argv: list[str]) -> int:
    """Run every probe under both, in turn, several times; report the minima."""
    parser = argparse.ArgumentParser(prog="python -m bench startup", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    choices = [*PROBES, *MODELS]
    parser.add_argument("--only", nargs="+", choices=choices, default=choices)
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args(argv)
    console = wide_console(110)

    figures: dict[Row, dict[str, list[float]]] = {}
    runs = [
        (probe, name)
        for probe in args.only
        if probe in PROBES
        for name in COMPETITORS.get(probe, ("floor", "eqx", "eqxjit"))
    ]
    with Progress(console=console) as progress:
        task = progress.add_task("", total=args.repeats * len(runs))
        for _ in range(args.repeats):
            for probe, name in runs:
                progress.update(task, description=f"{probe}, {name}")
                for figure, value in _run(probe, name).items():
                    figures.setdefault((probe, figure), {}).setdefault(name, []).append(value)
                progress.advance(task)
            runs.reverse()

    best = {
        row: {name: min(values) for name, values in by_name.items()}
        for row, by_name in sorted(figures.items(), key=lambda item: args.only.index(item[0][0]))
    }
    if best:
        console.print(_table(best))
    ways = {model: _ways(model, args.repeats, console) for model in args.only if model in MODELS}
    for model, rows in ways.items():
        console.print(_ways_table(model, rows))
    if args.output:
        rows = [
            {"probe": probe, "figure": figure, "best_seconds": times}
            for (probe, figure), times in best.items()
        ]
        report = facts() | {"repeats": args.repeats, "figures": rows, "ways": ways}
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _run(probe: str, name: str) -> Figures:
    """One probe in a process of its own."""
    # An installed package comes with its bytecode: compiling it isn't part of importing.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    output = output_of("bench.probes.startup", probe, name, environment=environment)
    return json.loads(output.splitlines()[-1])


def _ways(model: str, repeats: int, console: Console) -> dict[str, Figures]:
    """The best process of each way to get a model ready, the ways in turn."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        cached = plain | {
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

        def run(way: str, is_cached: bool) -> Figures:
            environment = cached if is_cached else plain
            output = output_of(
                "bench.probes.ways_to_start", model, way, folder, environment=environment
            )
            return json.loads(output.splitlines()[-1])

        task = progress.add_task(f"{model}: filling caches", total=repeats * len(WAYS))
        for way in ("save", "eqxjit", "loaded"):
            run(way, True)
        found: dict[str, list[Figures]] = {}
        for _ in range(repeats):
            for name, way, is_cached in WAYS:
                progress.update(task, description=f"{model}, {name}")
                found.setdefault(name, []).append(run(way, is_cached))
                progress.advance(task)
    return {
        name: min(figures, key=lambda row: row["until both are called"])
        for name, figures in found.items()
    }


def _ways_table(model: str, rows: dict[str, Figures]) -> Table:
    table = Table(title=f"{model}: seconds, best process; the phases of both functions added up")
    table.add_column("")
    for column in next(iter(rows.values())):
        table.add_column(column, justify="right")
    for name, figures in rows.items():
        table.add_row(name, *(f"{value:.2f}" for value in figures.values()))
    return table


def _table(best: dict[Row, dict[str, float]]) -> Table:
    table = Table(title="milliseconds, best process")
    table.add_column("", no_wrap=True)
    for column in ("floor", "eqx", "eqxjit", "eqxjit / eqx", "target"):
        table.add_column(column, justify="right")
    for (probe, figure), times in best.items():
        table.add_row(
            f"{probe}: {figure}",
            *(
                f"{times[name] * 1e3:,.2f}" if name in times else "-"
                for name in ("floor", "eqx", "eqxjit")
            ),
            f"{times['eqxjit'] / times['eqx']:.3f}",
            _verdict(probe, figure, times, best.get((probe, "warm call"), {})),
        )
    return table


def _verdict(probe: str, figure: str, times: dict[str, float], warm: dict[str, float]) -> str:
    ours, theirs = times["eqxjit"], times["eqx"]
    if probe == "import":
        return _met(ours <= theirs * IMPORT_TARGET, str(IMPORT_TARGET))
    if figure in ("first call", "new shape"):
        return _met(ours <= theirs * FIRST_CALL_TARGET, str(FIRST_CALL_TARGET))
    if figure == "warm call":  # `bench calls` tells more
        return ""
    if figure == "slowest later call":
        warm_calls = {name: times[name] / warm[name] for name in ("floor", "eqxjit")}
        target = max(LATER_CALL_TARGET, warm_calls["floor"])
        return _met(
            warm_calls["eqxjit"] <= target, f"{target:.2f} warm calls, {warm_calls['eqxjit']:.2f}"
        )
    return _met(ours <= theirs * NESTED_TARGET, str(NESTED_TARGET))


def _met(holds: bool, target: str) -> str:
    return f"{target} {met_or_missed(holds)}"
