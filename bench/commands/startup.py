"""`bench startup`: importing, first calls, new shapes, nested calls in a trace: fresh processes.

Then the ways to get two functions of a model ready: cold, from JAX's persistent cache, side by
side in threads, loaded from files. At last the same work with and without diagnostics, in CPU time:
a first call and a new shape (at most 1.02 of the time without), and two first calls under
`compile_report()` (at most 1.05). Each figure is that of the best process.
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
EXPLANATIONS = "diagnostics"
# In these, `jax.jit` on flat arrays has no part.
WITHOUT_FLOOR = ("import", "nested")

# The name of each way, what runs it, and whether it finds the persistent cache filled.
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
    """Run every probe under each competitor, and every way, in turn; report and write."""
    args = options("startup", __doc__, argv, rounds=3)
    rounds = 1 if args.quick else args.rounds
    rows = chosen(dict.fromkeys([*PROBES, *MODELS, EXPLANATIONS], None), args)

    probes: dict[str, dict[str, dict[str, float]]] = {}
    names = [name for name in PROBES if name in rows]
    # In each round the other way round, so that nobody always follows the same neighbour.
    runs = [
        (probe, name)
        for n in range(rounds)
        for probe in names
        for name in COMPETITORS[:: -1 if n % 2 else 1]
        if name != "floor" or probe not in WITHOUT_FLOOR
    ]
    for probe, name in progress(runs, "probes"):
        for figure, seconds in _probe(probe, name).items():
            best = probes.setdefault(probe, {}).setdefault(figure, {})
            best[name] = min(seconds, best.get(name, seconds))
    if probes:
        lines = [
            (
                f"{probe}: {figure}",
                *(1e3 * best[name] if name in best else None for name in COMPETITORS),
                best["eqxjit"] / best["eqx"] if "eqx" in best else None,
            )
            for probe, figures in probes.items()
            for figure, best in figures.items()
        ]
        show("milliseconds", ("", *COMPETITORS, "eqxjit / eqx"), lines)

    ways: dict[str, dict[str, Figures]] = {}
    for model in (name for name in MODELS if name in rows):
        ways[model] = _ways(model, progress(range(rounds), model))
        lines = [(way, *figures.values()) for way, figures in ways[model].items()]
        columns = ("", *next(iter(ways[model].values())))
        show(f"{model}: seconds, phases of both added up", columns, lines)

    costs: dict[str, Figures] = {}
    for _ in progress(range(rounds if EXPLANATIONS in rows else 0), EXPLANATIONS):
        found: dict[str, Figures] = figures_of(
            "bench.probes.diagnostics", "5" if args.quick else "40"
        )
        for row, figures in found.items():
            best = costs.get(row, figures)
            costs[row] = {side: min(figures[side], best[side]) for side in figures}
    if costs:
        lines = [
            (row, *(1e3 * seconds for seconds in best.values()), best["on"] / best["off"])
            for row, best in costs.items()
        ]
        show("milliseconds of CPU time", ("", "on", "off", "on / off"), lines)
    report = {"rounds": rounds, "probes": probes, "ways": ways, "diagnostics": costs}
    record("startup", report, args)
    return 0


def _probe(probe: str, name: str) -> Figures:
    # An installed package comes with its bytecode: compiling it isn't part of importing.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return figures_of("bench.probes.startup", probe, name, environment=environment)


def _ways(model: str, rounds: Iterable[Any]) -> dict[str, Figures]:
    """The best process of each way to get a model ready, the ways in turn."""
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
