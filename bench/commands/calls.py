"""`bench calls`: the cost of a warm call, against every competitor, over many workloads.

A loop of calls is timed to its last result, which on a GPU comes after the last call returned.
Batches of NumPy are timed with asynchronous dispatch, all else on a CPU without.

Each workload has a process of its own, in which the competitors take turns; large trees have three,
because where their arrays lie in memory makes more than what is measured.

Where there is a native back end, generated Python (`python`) is timed beside the floor in further
processes. Its figure is given as on the floor of the first ones: times one floor over the other.
"""

import math
import os

import jax

import eqxjit

from ..harness.environment import record
from ..harness.measure import chosen, options
from ..harness.printing import console, progress, show
from ..harness.processes import figures_of
from ..models.workloads import WORKLOADS, Workload

LARGE_TREE = 1_000  # leaves
PROCESSES = 3  # of a large tree: they share the rounds
COMPETITORS = ("floor", "jit", "eqx", "eqxjit", "asarray", "python")

Microseconds = dict[str, float]  # by competitor
Seconds = dict[str, list[float]]  # by competitor and round


def main(argv: list[str]) -> int:
    """Check that all competitors agree, time them, report and write."""
    args = options("calls", __doc__, argv, rounds=21)

    if not eqxjit.native_enabled():
        console.print("No native back end here: eqxjit's column is generated Python's.")
    on_cpu = jax.default_backend() == "cpu"
    rows_here = {n: w for n, w in WORKLOADS.items() if on_cpu or w.devices == 1}
    workloads = chosen(rows_here, args)
    figures = {
        name: _figures(name, workload, args.rounds, args.seconds)
        for name, workload in progress(workloads.items(), "workloads")
    }

    times: dict[str, Microseconds] = {}
    for name, (here, python) in figures.items():
        scale = 1e6 / workloads[name].calls
        times[name] = {each: min(rounds) * scale for each, rounds in here.items()}
        if python:
            of_floor = min(python["eqxjit"]) / min(python["floor"])
            times[name]["python"] = times[name]["floor"] * of_floor
    rows = [
        (
            name,
            *(row.get(each) for each in COMPETITORS),
            *(row["eqxjit"] / row[to] for to in ("floor", "jit", "eqx")),
        )
        for name, row in times.items()
    ]
    columns = ("workload", *COMPETITORS, "of floor", "of jit", "of eqx")
    show("µs per call, best round", columns, rows)
    report = {
        name: {"group": workload.group, "best_us": times[name]}
        for name, workload in workloads.items()
    }
    record("calls", {"rounds": args.rounds, "workloads": report}, args)
    return 0


def _figures(name: str, workload: Workload, rounds: int, seconds: float) -> tuple[Seconds, Seconds]:
    """Seconds per statement, by competitor and round: as eqxjit is here, and in generated Python.

    The latter are empty where the former are of generated Python, too.
    """
    processes = min(PROCESSES, rounds) if (workload.leaves or 0) >= LARGE_TREE else 1
    environment = {**os.environ}
    if workload.devices > 1:
        count = f"--xla_force_host_platform_device_count={workload.devices}"
        flags = f"{environment.get('XLA_FLAGS', '')} {count}".strip()
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    here: Seconds = {}
    python: Seconds = {}

    def run(figures: Seconds, *options: str, **settings: str) -> None:
        arguments = (name, str(math.ceil(rounds / processes)), str(seconds), *options)
        found = figures_of("bench.probes.call", *arguments, environment=environment | settings)
        for competitor, times in found.items():
            figures.setdefault(competitor, []).extend(times)

    for _ in range(processes):
        run(here)
        if eqxjit.native_enabled():
            run(python, "floor", "eqxjit", EQXJIT_NATIVE="0")
    return here, python
