"""Times one row of `bench shapes`, and prints seconds per call as JSON.

Each column ("first", "later", "older") has, by competitor, a list for each shape, with the time of
each round.
"""

import gc
import json
import sys
import warnings

import jax

from ..harness.competitors import Cases
from ..harness.measure import Race, agree
from ..models.shape_rows import ROWS

WARMING = 12  # calls; enough for any row to take its fast path
FIRST_CALLS = 3  # with each older shape after a new shape was traced


def main(name: str, rounds: str, seconds: str) -> None:
    """Check that all competitors agree, and time them."""
    # With asynchronous dispatch, most of the time of a call of a tiny model is a thread switch.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
    row = ROWS[name]
    every = row.build(row.known + int(rounds))
    known, others = every[: row.known], every[row.known :]
    for cases in known:
        agree(cases, "floor", WARMING, rtol=1e-4, atol=1e-5)
    races = [Race(cases, float(seconds)) for cases in known]
    for _ in others:
        for race in races:
            race.round()
    figures = {
        column: {name: [race.figures[name] for race in of] for name in known[0]}
        for column, of in (("first", races[:1]), ("later", races[1:]))
    }
    print(json.dumps({**figures, "older": _after_traces(known, others)}))


def _after_traces(older: list[Cases], others: list[Cases]) -> dict[str, list[list[float]]]:
    """In each round trace a new shape, then time the first calls with each older shape."""
    samplers = {name: [cases[name].sampler() for cases in older] for name in others[0]}
    figures: dict[str, list[list[float]]] = {name: [[] for _ in older] for name in samplers}
    order = list(samplers)
    for newcomer in others:
        for name in order:
            # Garbage collection takes longer than a call, and would be in one time by chance.
            gc.disable()
            newcomer[name].run(1)
            samples = [sample(FIRST_CALLS) for sample in samplers[name]]
            gc.enable()
            for sample in samplers[name]:
                sample(WARMING)
            for rounds, seconds in zip(figures[name], samples, strict=True):
                rounds.append(sum(seconds) / FIRST_CALLS)
        order.append(order.pop(0))
    return figures


if __name__ == "__main__":
    main(*sys.argv[1:])
