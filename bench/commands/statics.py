"""`bench statics`: configurations, structures in turn, deep and large trees, against Equinox.

Measured is the CPU time of the calling thread: none of these calls computes anything to speak of.
"""

import time
import warnings
from collections.abc import Callable
from functools import partial

import jax

from ..harness.competitors import FILTER_JITS
from ..harness.environment import record
from ..harness.measure import Case, agree, chosen, effort, options, race_all
from ..harness.printing import table_of, wide_console
from ..models.static_rows import ROWS, SERIES, Row


def rows() -> dict[str, Callable[[], Row]]:
    """What makes each row, by name: those of the series, for each size, and the others."""
    sized = {
        f"{series}: {size:,}": partial(make, size)
        for series, (make, sizes) in SERIES.items()
        for size in sizes
    }
    return {**sized, **ROWS}


def main(argv: list[str]) -> int:
    """Check that both agree, time them in turn, report and write."""
    args = options("statics", __doc__, rounds=15).parse_args(argv)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    warnings.filterwarnings("ignore", message="A JAX array is being set as static")
    console = wide_console(120)

    rounds, seconds = effort(args, 0.02)
    builders = {name: partial(_cases, make) for name, make in chosen(rows(), args).items()}
    races = race_all(builders, rounds, console, seconds, time.thread_time)
    best = {name: race.microseconds() for name, race in races.items()}
    lines = [
        (name, row["eqx"], row["eqxjit"], row["eqxjit"] / row["eqx"]) for name, row in best.items()
    ]
    columns = ("row", "eqx", "eqxjit", "eqxjit / eqx")
    console.print(table_of("µs of CPU time, best round", columns, lines))
    record("statics", {"rounds": rounds, "best_us": best}, args)
    return 0


def _cases(make: Callable[[], Row]) -> dict[str, Case]:
    row = make()
    cases = {side: row(filter_jit) for side, filter_jit in FILTER_JITS.items()}
    agree(cases, "eqx", 3, rtol=0)
    return cases
