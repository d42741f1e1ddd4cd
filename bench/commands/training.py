"""`bench training`: times a training step, written in several ways.

* floor: `jax.jit` over flat lists of arrays, flattened by hand outside the timed loop.
* jit: `jax.jit` over the partitioned trees.
* scan: the floor with ten steps a call, by `jax.lax.scan`; the time is that of one step.
* eqx: `equinox.filter_jit`.
* eqxjit: `eqxjit.filter_jit`.
* packed: `eqxjit.filter_jit` with the model in a `Packed`.
* "eqxjit, kept" and "packed, kept": the same two without donation.

All others donate model and state. A loop of steps is timed until its last result is ready, which on
a GPU is after the last call has returned. A first call is timed with JAX's caches cleared, so that
it traces, lowers and compiles.
"""

import gc
import time
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ..harness.environment import record
from ..harness.measure import Case, Race, chosen, options
from ..harness.printing import progress, show
from ..models.training_steps import SCANNED, carry_of, ways
from ..models.training_tasks import TASKS, Task


def main(argv: list[str]) -> int:
    """Check that all ways agree, time them, print the times and write the record."""
    args = options("training", __doc__, argv, rounds=15)

    first_calls = 1 if args.quick else 2  # how many of each way; the fastest counts
    rows: dict[str, dict[str, Any]] = {}
    for name, build in chosen(TASKS, args).items():
        task = build()
        first = _first_calls(task, first_calls)
        cases = ways(task)
        _check(name, cases)
        race = Race(cases, args.seconds)
        for _ in progress(range(args.rounds), name):
            race.round()
        us = race.microseconds()
        us["scan"] /= SCANNED
        arrays = eqx.filter(carry_of(task, task.model), eqx.is_array)
        n_arrays = len(jax.tree.leaves(arrays))
        rows[name] = {"arrays": n_arrays, "us": us, "first_call_s": first}
        _show(name, rows[name])
    record("training", {"rounds": args.rounds, "tasks": rows}, args)
    return 0


def _first_calls(task: Task, times: int) -> dict[str, float]:
    """Return the seconds of each way's fastest first call of several, with all caches cleared."""
    seconds: dict[str, float] = {}
    for _ in range(times):
        for way, case in ways(task).items():
            if way.endswith("kept"):
                continue
            names = dict(case.names())
            jax.block_until_ready([a for a in jax.tree.leaves(names) if eqx.is_array(a)])
            jax.clear_caches()
            eqx.clear_caches()
            gc.collect()
            code = compile(case.statement, "<case>", "exec")
            start = time.perf_counter()
            exec(code, names)
            jax.block_until_ready([names[name] for name in case.outputs])
            elapsed = time.perf_counter() - start
            seconds[way] = min(elapsed, seconds.get(way, elapsed))
    return seconds


def _check(name: str, cases: dict[str, Case]) -> None:
    """Raise an error if a way's loss after ten steps isn't that of the floor."""
    *_, expected = jax.tree.leaves(cases["floor"].run(SCANNED))
    for way, case in cases.items():
        *_, loss = jax.tree.leaves(case.run(1 if way == "scan" else SCANNED))
        np.testing.assert_allclose(loss, expected, rtol=1e-3, err_msg=f"{name}: {way}")


def _show(name: str, row: dict[str, Any]) -> None:
    us, first = row["us"], row["first_call_s"]
    lines = [
        (
            way,
            us[way],
            us[way] / us["floor"],
            us[way] / us["eqxjit"],
            first.get(way),
            first[way] / first["eqxjit"] if way in first else None,
        )
        for way in us
    ]
    columns = ("way", "µs", "/ floor", "/ eqxjit", "first call, s", "/ eqxjit")
    show(f"{name}: a step with {row['arrays']} arrays", columns, lines)
