"""`bench calls`: times warm calls of many workloads under each competitor.

A loop of calls is timed until its last result is ready, which on a GPU is after the last call has
returned. NumPy batches are timed with asynchronous dispatch. On a CPU, all other workloads are
timed with synchronous dispatch.

Each workload has a process of its own, in which the competitors take turns. Large trees have three
processes, because times depend more on where the arrays lie in memory than on the competitor.

With the native back end, generated Python (`python`) is timed beside the floor in further
processes. Its printed time is multiplied by the ratio of the floors in the two kinds of processes.
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
PROCESSES = 3  # for a large tree; the rounds are divided among them
COMPETITORS = ("floor", "jit", "eqx", "eqxjit", "asarray", "python")

Microseconds = dict[str, float]  # by competitor
Seconds = dict[str, list[float]]  # of each round, by competitor


def main(argv: list[str]) -> int:
    """Check that all competitors agree, time them, print the times and write the record."""
    args = options("calls", __doc__, argv, rounds=21)

    if not eqxjit.native_enabled():
        console.print("The native back end is missing, so column eqxjit is generated Python.")
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
    columns = ("workload", *COMPETITORS, "/ floor", "/ jit", "/ eqx")
    show("µs per call, best round", columns, rows)
    report = {
        name: {"group": workload.group, "best_us": times[name]}
        for name, workload in workloads.items()
    }
    record("calls", {"rounds": args.rounds, "workloads": report}, args)
    return 0


def _figures(name: str, workload: Workload, rounds: int, seconds: float) -> tuple[Seconds, Seconds]:
    """Return the seconds per statement, with the native back end and with generated Python.

    Without the native back end, the first part has the times of generated Python, and the second
    part is empty.
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
