"""Interleaved timing of several ways to do the same work: the one clock of these benchmarks."""

import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One way to do the work: a statement, and the names that it uses.

    The statement assigns to `outputs`; where those are also inputs, one call feeds the next.
    `names` makes the initial values anew, as a statement may consume (donate) what it is given.
    """

    statement: str
    names: Callable[[], Mapping[str, Any]]
    outputs: tuple[str, ...] = ("out",)

    def timer(self) -> timeit.Timer:
        """A timer of the statement, with its names as the local variables of a loop."""
        targets = ", ".join(self.names())
        return timeit.Timer(self.statement, f"{targets}, = fresh()", globals={"fresh": self._fresh})

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

    def _fresh(self) -> tuple[Any, ...]:
        return tuple(self.names().values())


def interleave(
    cases: Mapping[str, Case],
    rounds: int,
    seconds: float = 0.03,
    on_round: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Time every case in turn, round by round; seconds per statement, one figure per round.

    A noisy neighbour then hits all cases alike, and the minimum over the rounds is the quiet
    machine. Each case runs for about `seconds` a round; `on_round` hears of each finished round.
    """
    timers = {name: case.timer() for name, case in cases.items()}
    numbers = {name: _calls_within(timer, seconds) for name, timer in timers.items()}
    figures: dict[str, list[float]] = {name: [] for name in cases}
    order = list(cases)
    for _ in range(rounds):
        for name in order:
            figures[name].append(timers[name].timeit(numbers[name]) / numbers[name])
        order.append(order.pop(0))  # so that nobody always follows the same neighbour
        on_round()
    return figures


def _calls_within(timer: timeit.Timer, seconds: float) -> int:
    """How many executions take about `seconds`, once warm."""
    timer.timeit(5)  # traces, compiles, specialises
    number = 1
    while (elapsed := timer.timeit(number)) < seconds / 8:
        number *= 4
    return max(1, round(number * seconds / elapsed))
