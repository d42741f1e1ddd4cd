"""One row of `bench shapes` in a process of its own: prints figures, in seconds a call.

What carries out eqxjit's calls, native code or generated Python, is the environment's choice.
"""

import argparse
import gc
import json
import warnings
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ..harness.competitors import Cases
from ..harness.measure import Case, Race, in_turn
from ..models.shape_rows import ROWS, Row

WARMING = 12  # calls: enough for a specialised call of any row
FIRST_CALLS = 3  # of each older shape, once another was traced

#: By column and competitor, for each shape the seconds of each round.
Figures = dict[str, dict[str, list[list[float]]]]


def main() -> None:
    """Check that all competitors agree, and time them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("rounds", type=int)
    parser.add_argument("seconds", type=float)
    args = parser.parse_args()
    # Otherwise a blocked call of a tiny model is dominated by a thread switch.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
    print(json.dumps(_figures(ROWS[args.row], args.rounds, args.seconds)))


def _figures(row: Row, rounds: int, seconds: float) -> Figures:
    every = row.build(row.known + rounds)
    known, others = every[: row.known], every[row.known :]
    for cases in known:
        _check(cases)

    first, *later = known
    older = known
    if row.in_turn:
        later, older = [_in_turn(later)], [_in_turn(known)]
    warm = {"first": [Race(first, seconds)], "later": [Race(cases, seconds) for cases in later]}
    for _ in range(rounds):
        for races in warm.values():
            for race in races:
                race.round()
    figures = {
        column: {name: [race.figures[name] for race in races] for name in first}
        for column, races in warm.items()
    }
    figures["older"] = _after_traces(older, others)
    # A statement of shapes in turn has a call for each.
    calls = {"first": 1, "later": (row.known - 1) // len(later), "older": row.known // len(older)}
    return {
        column: {
            name: [[seconds / calls[column] for seconds in rounds] for rounds in shapes]
            for name, shapes in by_name.items()
        }
        for column, by_name in figures.items()
    }


def _in_turn(shapes: list[Cases]) -> Cases:
    return {name: in_turn([cases[name] for cases in shapes]) for name in shapes[0]}


def _after_traces(older: list[Cases], others: list[Cases]) -> dict[str, list[list[float]]]:
    """In each round another shape is traced, and the first calls of each older one are timed."""
    samplers = {name: [cases[name].sampler() for cases in older] for name in others[0]}
    figures: dict[str, list[list[float]]] = {name: [[] for _ in older] for name in samplers}
    order = list(samplers)
    for newcomer in others:
        for name in order:
            # A collection takes longer than a call, and chance would decide whose it falls into.
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


def _check(cases: Mapping[str, Case]) -> None:
    """Some calls of each competitor must give what the floor gives."""
    expected = _arrays(cases["floor"].run(WARMING))
    for name, case in cases.items():
        for ours, theirs in zip(_arrays(case.run(WARMING)), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=name)


def _arrays(outputs: Any) -> list[Any]:
    return jax.tree.leaves(eqx.filter(outputs, eqx.is_array))


if __name__ == "__main__":
    main()
