"""`bench startup`: times imports, first calls and new shapes, each in a fresh process.

It then compares ways to get two functions of a model ready: cold, from JAX's persistent cache,
concurrently in threads ("side by side"), and loaded from files. At the end it measures the CPU time
of the same work with and without diagnostics. A first call and a new shape should take at most 1.02
times as long, and two first calls under `compile_report()` at most 1.05 times. Each figure is that
of the best process.
"""

import os
import tempfile
from collections.abc import Iterable
from typing import Any

from ..harness.environment import record
from ..harness.measure import chosen, options
from ..harness.printing import progress, show
from ..harness.processes import figures_of
from ..probes.startup import PROBES, Figures
from ..probes.ways_to_start import MODELS

COMPETITORS = ("floor", "eqx", "eqxjit")
DIAGNOSTICS = "diagnostics"
# Probes that the floor, which is `jax.jit` on flat arrays, has no part in.
WITHOUT_FLOOR = ("import", "nested")

# The name of each way, the argument of its probe, and whether it finds a filled persistent cache.
WAYS = (
    ("Equinox, cold", "equinox", False),
    ("eqxjit, cold", "eqxjit", False),
    ("persistent cache", "eqxjit", True),
    ("side by side", "side by side", False),
    ("side by side, persistent cache", "side by side", True),
    ("loaded", "loaded", False),
    ("loaded, persistent cache", "loaded", True),
)


def main(argv: list[str]) -> int:
    """Measure all rows, print the times and write the record."""
    args = options("startup", __doc__, argv, rounds=3)
    rounds = 1 if args.quick else args.rounds
    rows = chosen(dict.fromkeys([*PROBES, *MODELS, DIAGNOSTICS], None), args)
    models = [name for name in MODELS if name in rows]

    report = {
        "rounds": rounds,
        "probes": _probes([name for name in PROBES if name in rows], rounds),
        "ways": {name: _ways(name, progress(range(rounds), name)) for name in models},
        "diagnostics": _diagnostics(rounds, args.quick) if DIAGNOSTICS in rows else {},
    }
    _show(report)
    record("startup", report, args)
    return 0


def _probes(names: list[str], rounds: int) -> dict[str, dict[str, Figures]]:
    """Return the best times of each probe, by figure and competitor."""
    # Every other round is in reverse order, so that no competitor always follows the same one.
    runs = [
        (probe, name)
        for n in range(rounds)
        for probe in names
        for name in COMPETITORS[:: -1 if n % 2 else 1]
        if name != "floor" or probe not in WITHOUT_FLOOR
    ]
    probes: dict[str, dict[str, Figures]] = {}
    for probe, name in progress(runs, "probes"):
        for figure, seconds in _probe(probe, name).items():
            best = probes.setdefault(probe, {}).setdefault(figure, {})
            best[name] = min(seconds, best.get(name, seconds))
    return probes


def _probe(probe: str, name: str) -> Figures:
    """Run a probe under a competitor in a fresh process."""
    # An installed package has its bytecode, so compiling to bytecode isn't part of an import.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return figures_of("bench.probes.startup", probe, name, environment=environment)


def _ways(model: str, rounds: Iterable[Any]) -> dict[str, Figures]:
    """Return the figures of the best process of each way to get a model ready."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")}
    with tempfile.TemporaryDirectory() as folder:
        cached = plain | {
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

        def run(way: str, is_cached: bool) -> Figures:
            environment = cached if is_cached else plain
            return figures_of(
                "bench.probes.ways_to_start", model, way, folder, environment=environment
            )

        for way in ("save", "eqxjit", "loaded"):
            run(way, True)
        found = [{name: run(way, warm) for name, way, warm in WAYS} for _ in rounds]
    return {
        name: min((ways[name] for ways in found), key=lambda row: row["until both are called"])
        for name, _, _ in WAYS
    }


def _diagnostics(rounds: int, quick: bool) -> dict[str, Figures]:
    """Return the best CPU seconds of each row with diagnostics ("on") and without ("off")."""
    costs: dict[str, Figures] = {}
    for _ in progress(range(rounds), DIAGNOSTICS):
        found: dict[str, Figures] = figures_of("bench.probes.diagnostics", "5" if quick else "40")
        for row, figures in found.items():
            best = costs.get(row, figures)
            costs[row] = {side: min(figures[side], best[side]) for side in figures}
    return costs


def _show(report: dict[str, Any]) -> None:
    """Print a table of each part that was measured."""
    if report["probes"]:
        lines = [
            (
                f"{probe}: {figure}",
                *(1e3 * best[name] if name in best else None for name in COMPETITORS),
                best["eqxjit"] / best["eqx"] if "eqx" in best else None,
            )
            for probe, figures in report["probes"].items()
            for figure, best in figures.items()
        ]
        show("milliseconds", ("", *COMPETITORS, "eqxjit / eqx"), lines)
    for model, ways in report["ways"].items():
        columns = ("", *next(iter(ways.values())))
        lines = [(way, *figures.values()) for way, figures in ways.items()]
        show(f"{model}: seconds; each phase is the sum of both functions", columns, lines)
    if report["diagnostics"]:
        lines = [
            (row, 1e3 * best["on"], 1e3 * best["off"], best["on"] / best["off"])
            for row, best in report["diagnostics"].items()
        ]
        show("milliseconds of CPU time", ("", "on", "off", "on / off"), lines)
