"""Decides in which mode each call of the main thread is served, to compare the modes' times.

A *block* is a number of consecutive calls, of any functions, that are served in one mode. A
*series* has one block for each mode. As its blocks follow each other, they see the same load of the
machine.
After a series comes a pause in which calls are served by eqxjit as usual. The pauses become longer,
so that a short run has some series, and a long run isn't slowed down.
"""

import dataclasses
import random
from collections.abc import Sequence

# A block has at least this many calls, and takes at least this many seconds.
_N_CALLS, _SECONDS = 6, 0.01

# The first calls of a block aren't timed, because the caches of the CPU still hold the code and the
# data of the mode before.
_N_COLD = 3


@dataclasses.dataclass
class Block:
    """Consecutive calls that are served in one mode.

    - `mode`: the mode.
    - `begun`: when the block began, in seconds.
    - `n_calls`: how many calls it has had.
    """

    mode: str
    begun: float
    n_calls: int = 0

    @property
    def is_warm(self) -> bool:
        """True if the latest call may be timed."""
        return self.n_calls > _N_COLD


class Blocks:
    """The blocks of a trial. Only the main thread changes them.

    - `current`: the block under way; `None` between two blocks.
    - `paused_until`: the time before which calls skip the blocks; 0 during a series.
    """

    def __init__(self) -> None:
        self.current: Block | None = None
        self.paused_until = 0.0
        self._pending_modes: list[str] = []
        self._series_begun = 0.0
        self._n_series = 0
        self._n_abandoned = 0
        # Not the module's own functions, whose random numbers are the program's.
        self._random = random.Random()

    def is_due(self, now: float) -> bool:
        """Return whether a series may begin."""
        return self.current is None and not self._pending_modes and now >= self.paused_until

    def begin_call(self, now: float) -> Block | None:
        """Return the block to which a call belongs."""
        if self.current is None and self._pending_modes:
            self.current = Block(self._pending_modes.pop(), now)
        if self.current is not None:
            self.current.n_calls += 1
        return self.current

    def end_call(self, now: float) -> bool:
        """End the block if the call that ends now was its last one; return whether it was."""
        block = self.current
        if block is None or block.n_calls < _N_CALLS or now - block.begun < _SECONDS:
            return False
        self.current = None
        if not self._pending_modes:
            self._n_series += 1
            self.paused_until = now + self._n_series * (now - self._series_begun)
        return True

    def abandon(self, now: float) -> None:
        """Drop the series, if one is under way: a trace or a comparison has spoiled its times."""
        if self.current is not None or self._pending_modes:
            self.current = None
            self._pending_modes.clear()
            self._n_abandoned += 1
            self.paused_until = now + self._n_abandoned * _SECONDS

    def begin_series(self, modes: Sequence[str], now: float) -> None:
        """Schedule one block per mode, beginning with the next call."""
        # In random order, so that no mode is always the first.
        self._pending_modes = self._random.sample(modes, len(modes))
        self._series_begun = now
        self.paused_until = 0.0
