"""How long making a specialised call may take: a warm call that takes much longer is a stall."""

import functools
import math
import time
from collections.abc import Callable
from typing import TypeVar

from .._trees.garbage import without_collecting

_Result = TypeVar("_Result")

# In one go, however long the first call took.
_LONGEST_SECONDS = 0.18

# A first call takes about as long at least; shorter ones were traced into another function.
_SHORTEST_SECONDS = 0.01

# Below this size making one takes a few milliseconds, which a collection of garbage can double.
_MANY_NODES = 200

# Asking for the time takes longer than planning a node.
_TICKS = 16

_SAMPLE = "a = b if c is d and e[0].f == 1 else (g, h)\n" * 100


class TooLong(Exception):
    """An error: making a specialised call would take too long."""


def without_limit() -> None:
    """Take the place of `Budget.check` where there is no bound."""


class Budget:
    """A budget of this thread's time since it was made, without what others take of a CPU.

    - `seconds`: how many there are to spend, without those that are set aside.
    """

    __slots__ = ("_start", "_ticks", "seconds")

    def __init__(self, first_call: float, n_nodes: int):
        """
        **Arguments:**

        - `first_call`: how many seconds the first call took.
        - `n_nodes`: the nodes of its arguments and its output. For few there is no bound.
        """
        self.seconds = min(max(first_call, _SHORTEST_SECONDS), _LONGEST_SECONDS)
        if n_nodes < _MANY_NODES:
            self.seconds = math.inf
        self._ticks = 0
        self._start = time.thread_time()

    def spend(self, action: Callable[[], _Result]) -> _Result:
        """Return `action()`; if it may take long, no garbage is collected meanwhile.

        Half of its time would go to that: what it makes lives until it ends.
        """
        return action() if self.seconds == math.inf else without_collecting(action)

    def reserve_as_much(self) -> None:
        """Set aside as many seconds as are gone: what has been done will be done once more.

        **Raises:**

        - `TooLong`, if there are too few.
        """
        self.seconds -= self._spent
        self._require(0.0)

    def check(self) -> None:
        """Raise `TooLong` if planning, or writing, takes too long; called often."""
        self._ticks += 1
        if self._ticks % _TICKS == 0:
            self._require(0.0)

    def check_compiling(self, source: str) -> None:
        """Raise `TooLong` if compiling source would take too long."""
        if self.seconds == math.inf:
            return
        expected = len(source) * _seconds_per_character() if len(source) > len(_SAMPLE) else 0.0
        self._require(expected)

    def _require(self, seconds: float) -> None:
        """Raise `TooLong` if fewer are left than these."""
        if self._spent + seconds > self.seconds:
            raise TooLong

    @property
    def _spent(self) -> float:
        """The seconds that are gone."""
        return time.thread_time() - self._start


@functools.lru_cache(maxsize=1)
def _seconds_per_character() -> float:
    """Measure how long this machine takes to compile source."""
    start = time.thread_time()
    compile(_SAMPLE, "<sample>", "exec")
    # An upper bound: generated code has longer names.
    return (time.thread_time() - start) / len(_SAMPLE)
