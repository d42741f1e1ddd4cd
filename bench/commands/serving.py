"""`bench serving`: times warm calls while another thread traces and compiles new shapes.

One or four threads call a small transformer, always with the same shape. They do so alone, and then
while another thread calls the same jitted function with one new shape after the other, so that it
traces and compiles all the time. Each call is timed by itself, on a GPU until its result is ready.
The competitors take turns.
"""

import gc
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.random as jr
import numpy as np

from ..harness.competitors import jitted_over
from ..harness.environment import record
from ..harness.measure import Case, agree, chosen, options
from ..harness.printing import progress, show
from ..models.networks import Transformer, call

COMPETITORS = ("floor", "eqx", "eqxjit")
THREADS = {"1 thread": 1, "4 threads": 4}
PHASES = ("alone", "beside traces")  # without and with the thread that passes new shapes
PERCENTILES = (50, 99, 99.9)
SECONDS = 2.0  # of each phase, in each round
LENGTH, WIDTH = 8, 32  # the shape of the warm calls' input
# More than can be traced and compiled in a second. Each shape is used only once.
MOST_SHAPES_A_SECOND = 30
CALLS = 20  # between two checks whether the phase is over


def main(argv: list[str]) -> int:
    """Check that all competitors agree, time them, print the times and write the record."""
    args = options("serving", __doc__, argv, rounds=10, seconds=SECONDS)
    rows = chosen(THREADS, args)
    # eqxjit would warn that a function is traced again and again.
    logging.getLogger("eqxjit").setLevel(logging.ERROR)

    n_shapes = 1 + round(len(rows) * args.rounds * (1 + args.seconds * MOST_SHAPES_A_SECOND))
    known, newcomers = _cases(n_shapes)
    agree(known, "floor", 12, rtol=1e-4, atol=1e-5)
    gc.collect()
    gc.freeze()
    keys = [(row, phase, way) for row in rows for phase in PHASES for way in COMPETITORS]
    samples: dict[tuple[str, str, str], list[float]] = {key: [] for key in keys}
    for turn in progress(range(args.rounds), "rounds"):
        # Each load can slow down the next one, so begin each round with a different load.
        for row, phase, way in keys[turn % len(keys) :] + keys[: turn % len(keys)]:
            shapes = newcomers[way] if phase == PHASES[1] else None
            samples[row, phase, way] += _served(known[way], rows[row], args.seconds, shapes)

    loads = {
        f"{row}, {phase}": {
            "us": {way: _percentiles(samples[row, phase, way]) for way in COMPETITORS},
            "calls_a_second": {
                way: round(len(samples[row, phase, way]) / args.seconds / args.rounds)
                for way in COMPETITORS
            },
        }
        for row in rows
        for phase in PHASES
    }
    _show(loads)
    report = {"rounds": args.rounds, "percentiles": PERCENTILES, "loads": loads}
    record("serving", report, args)
    return 0


def _show(loads: dict[str, dict[str, Any]]) -> None:
    """Print a line for each load and competitor."""
    lines = [
        (load, way, found["calls_a_second"][way], *us, us[0] / of_alone[way][0], us[1] / of_eqx[1])
        for load, found in loads.items()
        for of_alone in [loads[f"{load.partition(', ')[0]}, {PHASES[0]}"]["us"]]
        for of_eqx in [found["us"]["eqx"]]
        for way, us in found["us"].items()
    ]
    percentiles = (f"p{p:g}" for p in PERCENTILES)
    columns = ("load", "", "calls/s", *percentiles, "p50 / alone", "p99 / eqx")
    show("µs per call", columns, lines)


def _cases(n_shapes: int) -> tuple[dict[str, Case], dict[str, Iterator[Case]]]:
    """Return the case of the warm calls and the cases with new shapes, by competitor."""
    model = Transformer(width=WIDTH, heads=4, depth=2, key=jr.key(0))
    rng = np.random.default_rng(0)
    examples = [
        {"model": model, "x": jax.device_put(rng.normal(size=(n, WIDTH)).astype(np.float32))}
        for n in range(LENGTH, LENGTH + n_shapes)
    ]
    known, *others = jitted_over(call, examples)
    return known, {way: iter([cases[way] for cases in others]) for way in COMPETITORS}


def _served(case: Case, threads: int, seconds: float, shapes: Iterator[Case] | None) -> list[float]:
    """Return the seconds of each call of some threads, while another runs the cases in `shapes`."""
    is_over, is_tracing = threading.Event(), threading.Event()

    def meet_new_shapes() -> None:
        is_tracing.set()
        for newcomer in shapes or ():
            if is_over.is_set():
                return
            newcomer.run(1)

    def serve(until: float) -> list[float]:
        sample, found = case.sampler(), []
        while time.perf_counter() < until:
            found += sample(CALLS)
        return found

    with ThreadPoolExecutor(threads + 1) as pool:
        other = pool.submit(meet_new_shapes)
        is_tracing.wait()
        until = time.perf_counter() + seconds
        servers = [pool.submit(serve, until) for _ in range(threads)]
        found = [second for server in servers for second in server.result()]
        if shapes is not None and other.done():
            raise SystemExit("There were too few new shapes: raise `MOST_SHAPES_A_SECOND`.")
        is_over.set()
    other.result()
    return found


def _percentiles(seconds: list[float]) -> list[float]:
    return [float(us) for us in np.percentile(seconds, PERCENTILES) * 1e6]
