"""Decides which calls of the main thread are served by whom, so that their times can be compared.

A *block* is a number of consecutive calls, of any functions, that are served in one way. A *series*
has one block for each way. As its blocks follow each other, they see the same load of the machine.
After a series comes a pause in which calls are served by eqxjit as usual. The pauses become longer,
so that a short run has some series, and a long run isn't slowed down.
"""

import dataclasses
import random
from collections.abc import Sequence

# A block has at least this many calls, and takes at least this many seconds.
_N_CALLS, _SECONDS = 6, 0.01

# The first calls of a block aren't timed: the caches of the CPU hold what served the calls before.
_N_COLD = 3


@dataclasses.dataclass
class Block:
    """Consecutive calls that are served in one way.

    - `mode`: who serves them.
    - `begun`: when the block began, in seconds.
    - `n_calls`: how many calls it has had.
    """

    mode: str
    begun: float
    n_calls: int = 0

    @property
    def is_warm(self) -> bool:
        """Whether the latest call may be timed."""
        return self.n_calls > _N_COLD


class Blocks:
    """The blocks of a trial, as its calls come.

    - `current`: the block now; `None` between two series.
    - `paused_until`: when the next series may begin.
    """

    def __init__(self) -> None:
        self.current: Block | None = None
        self.paused_until = 0.0
        self._coming: list[str] = []
        self._series_begun = 0.0
        self._n_series = 0

    def begin_call(self, now: float) -> Block | None:
        """Return the block to which a call belongs."""
        if self.current is None and self._coming:
            self.current = Block(self._coming.pop(), now)
        if self.current is not None:
            self.current.n_calls += 1
        return self.current

    def end_call(self, now: float) -> None:
        """End the block if the call that ends now was its last one."""
        block = self.current
        if block is None or block.n_calls < _N_CALLS or now - block.begun < _SECONDS:
            return
        self.current = None
        if not self._coming:
            self._n_series += 1
            self.paused_until = now + self._n_series * (now - self._series_begun)

    def abandon(self) -> None:
        """End the series, because something else took time in its block."""
        self.current = None
        self._coming.clear()

    def begin_series(self, modes: Sequence[str], now: float) -> None:
        """Have a block for each mode begin with the next call, unless a series is under way."""
        if self.current is None and not self._coming:
            # In random order, so that no mode is always the first.
            self._coming = random.sample(modes, len(modes))
            self._series_begun = now
            self.paused_until = 0.0
