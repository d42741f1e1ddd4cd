"""Divides the main thread's time into spans, and compares what they take in different modes.

A *span* lasts from the beginning of one call to the beginning of the next: it is a call, and what
the program does after it. The *mode* tells who serves the call. Spans between the same two
functions are alike, so those of one mode tell how long those of another mode would have taken.

A *block* is a number of consecutive spans of one mode. It shows all that the mode causes: also the
time for which the program waits for results, and the time by which Equinox slows down the work
between calls, because it uses more of the CPU's caches.
"""

import dataclasses
import sys
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax

from .._text import comes_from_signal_handler
from .sampler import CALLS, WAITING, Place, Sampler

#: The modes of serving a call: by Equinox; by eqxjit, waiting for the results; and by eqxjit.
THEIRS, AWAITED, OURS = "theirs", "awaited", "ours"

# By eqxjit as well, but the span isn't compared with others. Each pause is one such span.
_PAUSE = "pause"

# The first calls of a block after one of the other mode aren't timed, because the caches of the CPU
# still hold other code and data: at most this many calls, in at most this many seconds.
_COLD = "cold"
_N_COLD, _SECONDS_COLD = 6, 0.005

# A block of Equinox's has at least this many calls, and takes at least this many seconds. If calls
# are slow, two are enough after this many seconds. The block of eqxjit's has at least as many, and
# takes at least half of the seconds.
_MIN_CALLS, _MIN_SECONDS, _MANY_SECONDS = 8, 0.02, 0.1

# A block of calls that are awaited has this many, or if they are slow, takes `_MIN_SECONDS`.
_N_AWAITED = 16

# A pause takes this many times as long as the blocks before it. After this many pauses, they become
# longer and longer, so that a long run isn't slowed down.
_PAUSE_FACTOR, _N_PAUSES = 1.5, 20


@dataclasses.dataclass
class _Sum:
    """The spans of one mode between two functions.

    - `n`: how many there were.
    - `total`: how many seconds they took together.
    - `waited`: the part of `total` in which the trial waited for results.
    - `blocks`: the seconds of the spans of each of the latest blocks, without that waiting, and
        their number.
    - `places`: the seconds that the samples found in each place.
    """

    n: int = 0
    total: float = 0.0
    waited: float = 0.0
    blocks: deque[tuple[float, int]] = dataclasses.field(
        default_factory=lambda: deque(maxlen=2_000)
    )
    places: defaultdict[Place, float] = dataclasses.field(
        default_factory=lambda: defaultdict(float)
    )
    _block: int = -1

    def add(self, seconds: float, waited: float, block: int) -> None:
        """Add a span, which belongs to the block of this number."""
        self.n += 1
        self.total += seconds + waited
        self.waited += waited
        if block != self._block:
            self._block = block
            self.blocks.append((0.0, 0))
        total, n = self.blocks[-1]
        self.blocks[-1] = total + seconds, n + 1

    @property
    def mean(self) -> float:
        """The mean seconds of a span."""
        # Leave out a quarter of the blocks at each end. The slow ones may have been interrupted by
        # something rare, such as garbage collection. The trial waits at the end of a block, as
        # part of one span, but for the results of all.
        ordered = sorted(self.blocks, key=lambda block: block[0] / block[1])
        n_outer = len(ordered) // 4
        kept = ordered[n_outer : len(ordered) - n_outer]
        seconds = sum(total for total, _ in kept) / sum(n for _, n in kept)
        return seconds + self.waited / self.n


# The spans between two functions, by mode.
_Alike = dict[str, _Sum]


class Spans:
    """The spans of the main thread, and the blocks to which they belong.

    - `mode`: the mode of the block under way.
    - `counts_as`: the mode as which the span under way counts.
    - `paused_until`: the time before which calls need not tell when they begin and end; 0 if there
        is no pause.
    - `n_calls`: how many calls there were since start-up.
    - `overhead`: the seconds by which the trial prolongs each call of a pause.
    """

    def __init__(self, sampler: Sampler, can_swap: Callable[[], bool]):
        """`can_swap` tells whether Equinox can serve any calls."""
        self.mode = self.counts_as = _PAUSE
        self.paused_until = 0.0
        self.n_calls = 0
        self.overhead = 0.0
        self._sampler, self._can_swap = sampler, can_swap
        # The spans between each two functions. Those that count as a pause are under `None`.
        self._alike: defaultdict[Hashable, _Alike] = defaultdict(lambda: defaultdict(_Sum))
        # The span under way: the function that it began with, and when, by the sampler's clock.
        self._function: Hashable = None
        self._begun = 0.0
        # How long the trial has waited for results in it, by the machine's clock.
        self._waited = 0.0
        # How many calls the spans before it have had.
        self._n_before = 0
        # The block under way: how many calls it has had, when it began, and whether it is over.
        self._n_in_block = 0
        self._block_begun = 0.0
        self._is_over = False
        self._n_blocks = 0
        # The arrays that its last call has returned.
        self._last = list[weakref.ref[jax.Array]]()
        # The series of blocks under way: when it began, and how many calls Equinox has served.
        self._series_begun = 0.0
        self._n_theirs = 0
        self._n_pauses = 0

    def is_pause_over(self, now: float) -> bool:
        """Return whether a call is the first one after a pause."""
        return self.mode is _PAUSE and not self._is_over and now >= self.paused_until

    def begin_call(self, function: Hashable) -> str:
        """Begin a span with a call of a function, and return the mode of the call."""
        if self._is_over:
            # Otherwise the next block would wait for what this block has left to compute.
            self.wait_for([array for ref in self._last if (array := ref()) is not None])
        self._end_span(function)
        now = time.perf_counter()
        if self._is_over:
            self._begin_block(now)
        self.n_calls += 1
        self._n_in_block += 1
        is_cold = self._n_in_block <= _N_COLD and now < self._block_begun + _SECONDS_COLD
        may_be_cold = self.mode in (THEIRS, AWAITED)
        self.counts_as = _COLD if may_be_cold and is_cold else self.mode
        return OURS if self.mode is _PAUSE else self.mode

    def end_call(self, result: Any) -> None:
        """Note what the call has returned."""
        self._is_over = self._is_block_over(time.perf_counter())
        if self._is_over:
            # By weak references, because the program may drop them before the next call.
            arrays = [x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)]
            self._last = [weakref.ref(array) for array in arrays]

    def wait_for(self, result: Any) -> None:
        """Wait for arrays as part of the span under way, because the program would have waited."""
        begun = time.perf_counter()
        wait_for(result)
        self._waited += time.perf_counter() - begun

    def abandon(self) -> None:
        """End the blocks for now, because a trace or a comparison has spoiled what follows."""
        self.counts_as = _PAUSE
        if self.mode is not _PAUSE:
            self._pause(time.perf_counter())

    def restart(self, begun: float) -> None:
        """Forget all spans, and count the span under way from a time of the sampler's clock."""
        self._alike.clear()
        self.n_calls, self._n_before = 1, 0
        self._begun = begun

    def end(self) -> None:
        """End the span under way, because the trial ends."""
        self._end_span(None)

    # --- Blocks -------------------------------------------------------------------------------

    def _is_block_over(self, now: float) -> bool:
        if self.mode is _PAUSE:
            return now >= self.paused_until
        n, seconds = self._n_in_block, now - self._block_begun
        if self.mode is OURS:
            return n >= (self._n_theirs or _MIN_CALLS) and seconds >= _MIN_SECONDS / 2
        if self.mode is AWAITED:
            return n >= _N_AWAITED or (seconds >= _MIN_SECONDS and n >= 2)
        is_long = seconds >= _MIN_SECONDS and n >= _MIN_CALLS
        return is_long or (seconds >= _MANY_SECONDS and n >= 2)

    def _begin_block(self, now: float) -> None:
        self._is_over = False
        self._n_blocks += 1
        if self.mode is _PAUSE:
            self.mode = THEIRS if self._can_swap() else AWAITED
            self.paused_until = 0.0
            self._series_begun = now
            self._n_theirs = 0
        elif self.mode is THEIRS:
            self.mode = AWAITED
            self._n_theirs = self._n_in_block
        elif self.mode is AWAITED:
            self.mode = OURS
        else:
            self._pause(now)
        self._n_in_block = 0
        self._block_begun = now

    def _pause(self, now: float) -> None:
        self._n_pauses += 1
        seconds = _PAUSE_FACTOR * (now - self._series_begun)
        self.mode = _PAUSE
        self.paused_until = now + seconds * max(1.0, self._n_pauses / _N_PAUSES)

    # --- Spans --------------------------------------------------------------------------------

    def _end_span(self, function: Hashable) -> None:
        """End the span under way, because a function is called."""
        sampler, waited = self._sampler, self._waited
        now = sampler.clock()
        overhead = self.overhead * (self.n_calls - self._n_before)
        seconds = now - self._begun - overhead
        pair = None if self.counts_as is _PAUSE else (self._function, function)
        found = self._alike[pair][self.counts_as]
        found.add(seconds, waited, self._n_blocks)
        places, sampler.places = sampler.places, defaultdict(float)
        calls = sum(spent for (kind, _), spent in places.items() if kind is CALLS)
        for place, spent in places.items():
            is_call = place[0] is CALLS and calls > overhead
            found.places[place] += spent * (1 - overhead / calls) if is_call else spent
        if waited and sampler.timer.is_on:
            _, line = sampler.place_of(sys._getframe())
            found.places[WAITING, line] += waited
        self._function, self._begun, self._n_before = function, now, self.n_calls
        self._waited = 0.0

    # --- Figures ------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """The seconds that all spans would take under eqxjit, as far as eqxjit served any alike."""
        return sum(found.total * weight for found, weight in self._weighted())

    @property
    def places(self) -> dict[Place, float]:
        """The seconds of each place, if eqxjit had served all calls as usual."""
        places = defaultdict[Place, float](float)
        for found, weight in self._weighted():
            for place, spent in found.places.items():
                places[place] += spent * weight
        return {place: max(0.0, spent) for place, spent in places.items()}

    @property
    def excess(self) -> float:
        """The seconds that all spans would take longer under Equinox; NaN if they aren't known."""
        n = seconds = 0.0
        for alike in self._alike.values():
            if OURS in alike and THEIRS in alike:
                n_alike = sum(found.n for found in alike.values())
                n += n_alike
                seconds += n_alike * (alike[THEIRS].mean - alike[OURS].mean)
        return self.n_calls * seconds / n if n else float("nan")

    def _weighted(self) -> Iterable[tuple[_Sum, float]]:
        """Yield spans with the number of times for which each of them counts.

        If some of the spans between two functions are eqxjit's, they stand for the others, too.
        """
        for alike in self._alike.values():
            if OURS in alike:
                yield alike[OURS], sum(found.n for found in alike.values()) / alike[OURS].n
            else:
                yield from ((found, 1.0) for found in alike.values())


def wait_for(result: Any) -> None:
    """Wait until the arrays of a result are ready."""
    try:
        jax.block_until_ready(result)
    except Exception as error:
        if comes_from_signal_handler(error):
            raise
        # If the computation has failed, the program finds out when it reads the result.
