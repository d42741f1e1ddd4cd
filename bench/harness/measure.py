"""Times several ways to do the same work, in turn. All benchmarks time by this file."""

import argparse
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

Clock = Callable[[], float]

# With asynchronous dispatch a loop waits for its last result, and a sample for each result.
_LOOPS = """
def loop(count):
    {targets}, = fresh()
    start = clock()
    for _ in range(count):
        {statement}
    {wait}
    return clock() - start

def sample(count):
    {targets}, = fresh()
    seconds = []
    for _ in range(count):
        start = clock()
        {statement}
        {wait}
        seconds.append(clock() - start)
    return seconds
"""


@dataclass(frozen=True)
class Case:
    """One way to do the work.

    - `statement`: the Python statement that is timed.
    - `names`: returns the initial value of each name that the statement uses. It returns new values
        each time, because a statement may donate them.
    - `outputs`: the names that the statement assigns to. If the statement also reads such a name,
        each execution gets the result of the one before.
    """

    statement: str
    names: Callable[[], Mapping[str, Any]]
    outputs: tuple[str, ...] = ("out",)

    def loop(self, clock: Clock = time.perf_counter) -> Callable[[int], float]:
        """Return a function that returns the seconds of `count` executions in all."""
        return self._compiled(clock)["loop"]

    def sampler(self) -> Callable[[int], list[float]]:
        """Return a function that returns the seconds of each of `count` executions.

        The clock adds about 0.05 microseconds to each execution.
        """
        return self._compiled(time.perf_counter)["sample"]

    def run(self, times: int) -> list[Any]:
        """Execute the statement this many times, and return the last value of each output."""
        namespace = dict(self.names())
        code = compile(self.statement, "<case>", "exec")
        for _ in range(times):
            exec(code, namespace)
        return [namespace[name] for name in self.outputs]

    def __add__(self, other: "Case") -> "Case":
        """Return a case that executes one statement after the other."""
        return Case(
            f"{self.statement}; {other.statement}",
            lambda: {**self.names(), **other.names()},
            self.outputs + other.outputs,
        )

    def _compiled(self, clock: Clock) -> dict[str, Any]:
        wait = f"wait({self.outputs[-1]})" if is_asynchronous() else "pass"
        targets = ", ".join(self.names())
        ready = jax.block_until_ready
        fresh = lambda: ready(tuple(self.names().values()))  # noqa: E731
        namespace = {"fresh": fresh, "clock": clock, "wait": ready}
        exec(_LOOPS.format(targets=targets, statement=self.statement, wait=wait), namespace)
        return namespace


def is_asynchronous() -> bool:
    """Return whether calls return before the device is done."""
    on_cpu = jax.default_backend() == "cpu"
    return not on_cpu or jax.config.read("jax_cpu_enable_async_dispatch")


def agree(
    cases: Mapping[str, Case], expected: str, calls: int, rtol: float, atol: float = 0
) -> None:
    """Raise an error if a case returns other arrays after `calls` calls than `cases[expected]`."""
    arrays = _arrays(cases[expected].run(calls))
    for name, case in cases.items():
        for ours, theirs in zip(_arrays(case.run(calls)), arrays, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol, atol, err_msg=name)


def _arrays(outputs: Any) -> list[Any]:
    """Return the arrays in the outputs as NumPy arrays, whichever package they are of."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(outputs) if hasattr(leaf, "__array__")]


class Race:
    """Times every case in turn, round by round.

    Other work on the machine then disturbs all cases alike, and each case's fastest round shows
    its time on a quiet machine.

    - `figures`: the seconds per execution, by case and round.
    """

    def __init__(
        self, cases: Mapping[str, Case], seconds: float = 0.03, clock: Clock = time.perf_counter
    ):
        """Compile all cases, and find out how many executions take about `seconds`."""
        self._loops = {name: case.loop(clock) for name, case in cases.items()}
        self._numbers = {name: _calls_within(loop, seconds) for name, loop in self._loops.items()}
        self._order = list(cases)
        self.figures: dict[str, list[float]] = {name: [] for name in cases}

    def round(self) -> None:
        """Time each case once more.

        Garbage collection is off meanwhile, because it would be in the time of one case by chance.
        """
        gc.collect()
        gc.disable()
        for name in self._order:
            number = self._numbers[name]
            self.figures[name].append(self._loops[name](number) / number)
        gc.enable()
        # Each case can slow down the next one, so begin each round with a different case.
        self._order.append(self._order.pop(0))

    def microseconds(self) -> dict[str, float]:
        """Return the time of each case in its best round."""
        return {name: min(figures) * 1e6 for name, figures in self.figures.items()}


def options(
    command: str,
    description: str | None,
    argv: list[str],
    rounds: int | None = None,
    seconds: float = 0.03,
) -> argparse.Namespace:
    """Parse the options that the commands have in common.

    If a command times something, `rounds` is its default number of rounds, and `seconds` is how
    long each case runs in a round. Dispatch is then switched to synchronous. The record says so.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench {command}", description=description)
    parser.set_defaults(quick=False)
    if rounds:
        parser.add_argument(
            "--rounds", type=int, default=rounds, help=f"rounds of timing ({rounds})"
        )
        parser.add_argument(
            "--quick", action="store_true", help="a short run, to see that it works"
        )
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="only rows whose names contain one of these"
    )
    parser.add_argument(
        "--output", type=Path, help="folder for the record (bench/results for a complete run)"
    )
    args = parser.parse_args(argv)
    args.seconds = seconds
    if args.quick:
        args.rounds, args.seconds = 2, seconds / 6
    return args


Named = TypeVar("Named")


def chosen(rows: Mapping[str, Named], args: argparse.Namespace) -> dict[str, Named]:
    """Return the rows that `--only` asks for, or all rows without it."""
    parts = [part.lower() for part in args.only or [""]]
    found = {name: row for name, row in rows.items() if any(p in name.lower() for p in parts)}
    if not found:
        raise SystemExit(f"There is no such row. There are: {', '.join(rows)}")
    return found


def _calls_within(loop: Callable[[int], float], seconds: float) -> int:
    """Return how many warm executions take about `seconds`."""
    loop(5)  # traces, compiles and creates the fast path
    number = 1
    while (elapsed := loop(number)) < seconds / 8:
        number *= 4
    return max(1, round(number * seconds / elapsed))
