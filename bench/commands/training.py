"""`bench training`: a step of training, packed and not, against every way to write it.

* floor: `jax.jit` over flat lists of arrays, flattened by hand outside the timed loop.
* jit: `jax.jit` over the partitioned trees.
* scan: floor, with ten steps a call by `jax.lax.scan`; its time is that of one step.
* eqx, eqxjit: the two `filter_jit`; packed: eqxjit's with the model in a `Packed`.
* kept: eqxjit's and packed, without donation.

All others donate what they carry. A loop of steps is timed to its last result, which on a GPU comes
after the last call returned. The first call's seconds are those of tracing, lowering and compiling,
with JAX's caches emptied before.
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
    """Check that all ways agree, time them, report and write."""
    args = options("training", __doc__, argv, rounds=15)

    first_calls = 1 if args.quick else 2  # of each, the fastest counts
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
    """Each way's shortest first call, of several with all caches emptied."""
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
    """After ten steps, the loss is that of the floor."""
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
    columns = ("way", "µs", "of floor", "of eqxjit", "first call, s", "of eqxjit")
    show(f"{name}: a step, {row['arrays']} arrays", columns, lines)
