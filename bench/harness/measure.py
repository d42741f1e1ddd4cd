"""Interleaved timing of several ways to do the same work: the one clock of these benchmarks."""

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

# A loop ends with its last result, a sample with each, where calls return before they are done.
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
    """One way to do the work: a statement, and the names that it uses.

    The statement assigns to `outputs`; where those are also inputs, one call feeds the next.
    `names` makes new initial values, as a statement may consume (donate) what it is given.
    """

    statement: str
    names: Callable[[], Mapping[str, Any]]
    outputs: tuple[str, ...] = ("out",)

    def loop(self, clock: Clock = time.perf_counter) -> Callable[[int], float]:
        """Return a function that times so many executions together, to the last one's result."""
        return self._compiled(clock)["loop"]

    def sampler(self) -> Callable[[int], list[float]]:
        """Return a function that executes the statement so many times, and times each by itself.

        The clock adds about 0.05 microseconds to each.
        """
        return self._compiled(time.perf_counter)["sample"]

    def run(self, times: int) -> list[Any]:
        """Execute the statement so many times and return what `outputs` are then."""
        namespace = dict(self.names())
        code = compile(self.statement, "<case>", "exec")
        for _ in range(times):
            exec(code, namespace)
        return [namespace[name] for name in self.outputs]

    def __add__(self, other: "Case") -> "Case":
        """One statement after the other."""
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
    """Say whether calls return before the device is done."""
    on_cpu = jax.default_backend() == "cpu"
    return not on_cpu or jax.config.read("jax_cpu_enable_async_dispatch")


def agree(
    cases: Mapping[str, Case], expected: str, calls: int, rtol: float, atol: float = 0
) -> None:
    """Run each case so many times; its arrays must be those of the expected one."""
    arrays = _arrays(cases[expected].run(calls))
    for name, case in cases.items():
        for ours, theirs in zip(_arrays(case.run(calls)), arrays, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol, atol, err_msg=name)


def _arrays(outputs: Any) -> list[Any]:
    """Return the arrays in the outputs, of any package."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(outputs) if hasattr(leaf, "__array__")]


class Race:
    """Times every case in turn, round by round.

    A noisy neighbour then hits all cases alike, and the minimum over the rounds is the quiet
    machine.

    - `figures`: of each case, seconds per statement, one figure per round.
    """

    def __init__(
        self, cases: Mapping[str, Case], seconds: float = 0.03, clock: Clock = time.perf_counter
    ):
        """Each case runs for about `seconds` a round."""
        self._loops = {name: case.loop(clock) for name, case in cases.items()}
        self._numbers = {name: _calls_within(loop, seconds) for name, loop in self._loops.items()}
        self._order = list(cases)
        self.figures: dict[str, list[float]] = {name: [] for name in cases}

    def round(self) -> None:
        """Another figure for each, without collections of garbage, which fall where they fall."""
        gc.collect()
        gc.disable()
        for name in self._order:
            number = self._numbers[name]
            self.figures[name].append(self._loops[name](number) / number)
        gc.enable()
        # So that nobody always follows the same neighbour.
        self._order.append(self._order.pop(0))

    def microseconds(self) -> dict[str, float]:
        """The best round of each case."""
        return {name: min(figures) * 1e6 for name, figures in self.figures.items()}


def options(
    command: str,
    description: str | None,
    argv: list[str],
    rounds: int | None = None,
    seconds: float = 0.03,
) -> argparse.Namespace:
    """Parse the options that the commands have in common; those of timing, if there are rounds.

    `seconds` is how long a case runs in each. What is timed is dispatched synchronously, here and
    in its processes: the setting is recorded.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench {command}", description=description)
    parser.set_defaults(quick=False)
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"of timing ({rounds})")
        parser.add_argument("--quick", action="store_true", help="a short run: does it work?")
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows whose names have this")
    parser.add_argument(
        "--output", type=Path, help="folder for the record (bench/results, if all is measured)"
    )
    args = parser.parse_args(argv)
    args.seconds = seconds
    if args.quick:
        args.rounds, args.seconds = 2, seconds / 6
    return args


Named = TypeVar("Named")


def chosen(rows: Mapping[str, Named], args: argparse.Namespace) -> dict[str, Named]:
    """The rows that `--only` asks for; all without it."""
    parts = [part.lower() for part in args.only or [""]]
    found = {name: row for name, row in rows.items() if any(p in name.lower() for p in parts)}
    if not found:
        raise SystemExit(f"There is no such row. There are: {', '.join(rows)}")
    return found


def _calls_within(loop: Callable[[int], float], seconds: float) -> int:
    """How many executions take about `seconds`, once warm."""
    loop(5)  # traces, compiles, specialises
    number = 1
    while (elapsed := loop(number)) < seconds / 8:
        number *= 4
    return max(1, round(number * seconds / elapsed))
