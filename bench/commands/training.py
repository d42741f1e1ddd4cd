"""`bench training`: a step of training, packed and not, against every way to write it.

* floor: `jax.jit` over flat lists of arrays, flattened by hand outside the timed loop.
* jit: `jax.jit` over the partitioned trees.
* ravel: `jax.jit` over one vector of weights, by `jax.flatten_util.ravel_pytree`.
* optax.flatten: as jit, with an optimiser that is handed one vector.
* scan: floor, with ten steps a call by `jax.lax.scan`; its time is that of one step.
* eqx, eqxjit: the two `filter_jit`; packed: eqxjit's with the model in a `Packed`.
* kept: eqxjit's and packed, without donation.

All others donate what they carry. The first call's seconds are those of tracing, lowering and
compiling, with JAX's caches emptied before.
"""

import gc
import json
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..harness.environment import results, write
from ..harness.measure import Case, Race, options
from ..harness.printing import met_or_missed, wide_console
from ..models.training_steps import KEPT, SCANNED, WAYS, carry_of
from ..models.training_tasks import TASKS, Task

# Packed over floor, over eqxjit, and the first call over eqxjit's: the most that they may be.
OVER_FLOOR = {"MLP + adam": 0.50, "deep MLP + adamw": 0.35, "several MB + adam": 1.02}
OVER_PLAIN = 1.02
FIRST_OVER_PLAIN = ((20, 1.0), (130, 1.5), (440, 2.5))  # by the number of arrays


def main(argv: list[str]) -> int:
    """Check that all ways agree, time them, report, write and draw."""
    parser = options("training", __doc__, rounds=15)
    parser.add_argument("--first-calls", type=int, default=3, help="of each, the fastest counts")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--resume", action="store_true", help="time those tasks that the written file lacks"
    )
    args = parser.parse_args(argv)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    console = wide_console(150)

    written = results("training", args.output)
    writes = bool(args.output) or len(args.only) == len(TASKS)
    rows: dict[str, dict[str, Any]] = {}
    if args.resume and written.exists():
        rows = json.loads(written.read_text())["tasks"]
    for name in [name for name in args.only if name not in rows]:
        rows[name] = row = _row(name, TASKS[name](), args.rounds, args.first_calls, console)
        console.print(_table(name, row))
        if writes:
            # Task by task: what is interrupted can be resumed.
            write("training", {"rounds": args.rounds, "tasks": rows}, args.output)
    for line in _verdicts(rows):
        console.print(line)
    if writes:
        # Needs matplotlib, which the tests of these tasks do without.
        from ..harness import pictures

        times = {name: rows[name]["us"] for name in TASKS if name in rows}
        pictures.ratios(times, written.with_suffix(".png"))
        console.print(f"written: {written} and a picture beside it")
    return 0


def _row(
    name: str, task: Task, rounds: int, n_first_calls: int, console: Console
) -> dict[str, Any]:
    """Time a task: microseconds of a step and seconds of the first call, by way."""
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(name, total=n_first_calls + 1 + rounds)
        first = _first_calls(task, n_first_calls, lambda: progress.advance(bar))
        cases = {way: build(task) for way, build in (WAYS | KEPT).items()}
        _check(name, cases)
        progress.advance(bar)
        race = Race(cases)
        for _ in range(rounds):
            race.round()
            progress.advance(bar)
    us = race.microseconds()
    us["scan"] /= SCANNED
    return {"arrays": _n_arrays(task), "us": us, "first_call_s": first}


def _first_calls(task: Task, times: int, advance: Callable[[], None]) -> dict[str, float]:
    """Each way's shortest first call, of several with all caches emptied."""
    seconds: dict[str, float] = dict.fromkeys(WAYS, float("inf"))
    for _ in range(times):
        for way, build in WAYS.items():
            case = build(task)
            names = dict(case.names())
            jax.block_until_ready([a for a in jax.tree.leaves(names) if eqx.is_array(a)])
            jax.clear_caches()
            eqx.clear_caches()
            gc.collect()
            code = compile(case.statement, "<case>", "exec")
            start = time.perf_counter()
            exec(code, names)
            jax.block_until_ready(names["loss"])
            seconds[way] = min(seconds[way], time.perf_counter() - start)
        advance()
    return seconds


def _check(name: str, cases: dict[str, Case]) -> None:
    """After ten steps, the loss is that of the floor."""
    _, expected = cases["floor"].run(SCANNED)
    for way, case in cases.items():
        _, loss = case.run(1 if way == "scan" else SCANNED)
        np.testing.assert_allclose(loss, expected, rtol=1e-3, err_msg=f"{name}: {way}")


def _n_arrays(task: Task) -> int:
    return len([a for a in jtu.tree_leaves(carry_of(task, task.model)) if eqx.is_array(a)])


def _table(name: str, row: dict[str, Any]) -> Table:
    us, first = row["us"], row["first_call_s"]
    table = Table(title=f"{name}: a step, {row['arrays']} arrays", row_styles=["", "dim"])
    table.add_column("", no_wrap=True)
    for heading in ("µs", "of floor", "of eqxjit", "first call, s", "of eqxjit"):
        table.add_column(heading, justify="right")
    for way in us:
        table.add_row(
            way,
            f"{us[way]:.1f}",
            f"{us[way] / us['floor']:.2f}",
            f"{us[way] / us['eqxjit']:.2f}",
            *(
                [f"{first[way]:.2f}", f"{first[way] / first['eqxjit']:.2f}"]
                if way in first
                else ["", ""]
            ),
        )
    return table


def _verdicts(rows: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each target: what it is, what came out."""
    lines = []
    for name, row in rows.items():
        us, first = row["us"], row["first_call_s"]
        limit = next(limit for arrays, limit in FIRST_OVER_PLAIN if row["arrays"] <= arrays)
        ratios = {
            "a step packed over eqxjit": (us["packed"] / us["eqxjit"], OVER_PLAIN),
            "first call packed over eqxjit": (first["packed"] / first["eqxjit"], limit),
        }
        if name in OVER_FLOOR:
            over_floor = us["packed"] / us["floor"]
            ratios["a step packed over floor"] = over_floor, OVER_FLOOR[name]
        for what, (ratio, limit) in ratios.items():
            verdict = met_or_missed(ratio <= limit)
            lines.append(f"{verdict}: {name}, {what} is {ratio:.3f}, at most {limit:.2f}")
    return lines
