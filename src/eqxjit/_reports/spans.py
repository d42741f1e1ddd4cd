"""Divides the main thread's time into spans, and compares what they take in different modes.

A *span* lasts from the beginning of one call to the beginning of the next call: it is a call, and
what the program does after it. The *mode* says who serves the call. Spans between the same two
functions are alike, so those in one mode tell how long those in the other mode would have taken.

A *block* is a number of consecutive spans in one mode. It shows all that the mode causes: also the
time for which the program waits for results, and the time that work between calls takes longer
because Equinox uses more of the CPU's caches.
"""

import dataclasses
import statistics
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax

from .._text import comes_from_signal_handler
from .sampler import CALLS, WAITING, Place, Sampler

#: The modes of serving a call: by Equinox; by eqxjit, waiting for the results; and by eqxjit.
THEIRS, AWAITED, OURS = "theirs", "awaited", "ours"

# By eqxjit as well, but spans aren't compared. Between two series of blocks, a pause is one span.
_PAUSE = "pause"

# A block has at least this many calls, and a block of Equinox's takes at least this many seconds.
_MIN_CALLS, _MIN_SECONDS = 6, 0.02

# A block in which calls are awaited has this many calls. It comes first among eqxjit's, while the
# caches of the CPU still hold the code and the data of Equinox's calls.
_N_AWAITED = 4

# Likewise, the first calls under Equinox aren't compared: so many, or those of so many seconds.
_N_COLD, _SECONDS_COLD = 3, 0.005

# A pause takes this many times as long as the blocks before it. After so many pauses, they become
# longer and longer, so that a long run isn't slowed down.
_PAUSE_FACTOR, _N_PAUSES = 1.5, 20


@dataclasses.dataclass
class _Alike:
    """What is known of the spans between two functions, by mode.

    - `n`: how many there were.
    - `total`: how many seconds they took together.
    - `seconds`: the seconds of each of the latest spans.
    - `places`: the seconds that the samples found in each place.
    - `waited`: the seconds of waiting at the end of blocks. They are part of `total`.
    """

    n: Counter[str] = dataclasses.field(default_factory=Counter)
    total: defaultdict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    seconds: defaultdict[str, deque[float]] = dataclasses.field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=5_000))
    )
    places: defaultdict[str, defaultdict[Place, float]] = dataclasses.field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    waited: float = 0.0

    @property
    def weights(self) -> dict[str, float]:
        """How much a span of each mode counts, for all of them to count as eqxjit's."""
        if self.n[OURS]:
            return {OURS: self.n.total() / self.n[OURS]}
        return dict.fromkeys(self.n, 1.0)

    @property
    def excess(self) -> float | None:
        """How many seconds longer a span takes under Equinox; `None` if that isn't known."""
        if not (self.n[OURS] and self.n[THEIRS]):
            return None
        ours = _trimmed_mean(self.seconds[OURS]) + self.waited / self.n[OURS]
        return _trimmed_mean(self.seconds[THEIRS]) - ours


class Spans:
    """The spans of the main thread, and the blocks to which they belong.

    - `mode`: the mode in which the current call is served.
    - `counts_as`: the mode as which the current span counts.
    - `paused_until`: the time before which calls need not tell when they begin and end. It is 0
        unless there is a pause.
    - `n_calls`: how many calls there were since the start.
    - `overhead`: the seconds by which the trial prolongs each call.
    """

    def __init__(self, sampler: Sampler, can_swap: Callable[[], bool]):
        """`can_swap` tells whether Equinox can serve any calls."""
        self.mode = self.counts_as = _PAUSE
        self.paused_until = 0.0
        self.n_calls = 0
        self.overhead = 0.0
        self._sampler, self._can_swap = sampler, can_swap
        # The spans between each two functions. All that count as a pause are under `None`.
        self._alike: defaultdict[Hashable, _Alike] = defaultdict(_Alike)
        # The span under way: its function, and when it began by the sampler's clock.
        self._function: Hashable = None
        self._begun = 0.0
        # The block under way.
        self._n_calls = self._n_theirs = 0
        self._block_begun = self._series_begun = 0.0
        self._n_pauses = 0
        # How many calls the spans have had that have ended.
        self._n_ended = 0
        # What the last call of a block has returned.
        self._last: Any = None
        self._is_over = False

    def is_pause_over(self, now: float) -> bool:
        """Return whether the next block begins after the call that begins now."""
        return self.mode is _PAUSE and not self._is_over and now >= self.paused_until

    def begin_call(self, function: Hashable) -> str:
        """Begin a span with a call of a function, and return the mode of the call."""
        now = time.perf_counter()
        waited = 0.0
        if self._is_over:
            # Otherwise the next block would wait for what this block has left to compute.
            wait_for(self._last)
            waited = time.perf_counter() - now
            now += waited
            self._begin_block(now)
        self._end_span(function, waited)
        self.n_calls += 1
        self._n_calls += 1
        is_cold = self._n_calls <= _N_COLD and now < self._block_begun + _SECONDS_COLD
        self.counts_as = AWAITED if self.mode is THEIRS and is_cold else self.mode
        return OURS if self.mode is _PAUSE else self.mode

    def end_call(self, result: Any) -> None:
        """Note that the call has returned."""
        now = time.perf_counter()
        self._is_over = self._is_block_over(now)
        if self._is_over:
            self._last = result

    def abandon(self) -> None:
        """End the series of blocks: a trace or a comparison has spoiled the times of what follows."""
        self.counts_as = _PAUSE
        if self.mode is not _PAUSE:
            self._pause(time.perf_counter())

    def restart(self, begun: float) -> None:
        """Forget all spans, and count the span under way from a time of the sampler's clock."""
        self._alike.clear()
        self._sampler.places.clear()
        self.n_calls, self._n_ended = 1, 0
        self._begun = begun

    def end(self) -> None:
        """End the span under way, because the trial ends."""
        self._end_span(None, 0.0)

    def _is_block_over(self, now: float) -> bool:
        if self.mode is _PAUSE:
            return now >= self.paused_until
        if self.mode is AWAITED:
            return self._n_calls >= _N_AWAITED
        is_long = self.mode is OURS or now >= self._block_begun + _MIN_SECONDS
        return is_long and self._n_calls >= max(_MIN_CALLS, self._n_theirs)

    def _begin_block(self, now: float) -> None:
        self._is_over = False
        self._last = None
        if self.mode is OURS:
            self._pause(now)
        else:
            if self.mode is _PAUSE:
                self.paused_until = 0.0
                self._series_begun = now
                self._n_theirs = 0
            elif self.mode is THEIRS:
                self._n_theirs = self._n_calls
            is_first = self.mode is _PAUSE and self._can_swap()
            self.mode = THEIRS if is_first else OURS if self.mode is AWAITED else AWAITED
        self._n_calls = 0
        self._block_begun = now

    def _pause(self, now: float) -> None:
        self._n_pauses += 1
        length = _PAUSE_FACTOR * (now - self._series_begun) * max(1.0, self._n_pauses / _N_PAUSES)
        self.mode = _PAUSE
        self.paused_until = now + length

    def _end_span(self, function: Hashable, waited: float) -> None:
        """End the span under way, because a function is called, after waiting some seconds."""
        counts_as, now = self.counts_as, self._sampler.clock()
        alike = self._alike[None if counts_as is _PAUSE else (self._function, function)]
        overhead = self.overhead * (self.n_calls - self._n_ended)
        self._n_ended = self.n_calls
        seconds = now - self._begun - overhead
        alike.n[counts_as] += 1
        alike.total[counts_as] += seconds + waited
        alike.seconds[counts_as].append(seconds)
        places, self._sampler.places = self._sampler.places, defaultdict(float)
        if counts_as is OURS:
            alike.waited += waited
        calls = sum(spent for (kind, _), spent in places.items() if kind is CALLS)
        for place in places:
            if place[0] is CALLS:
                places[place] *= max(0.0, 1 - overhead / calls)
        if waited and self._sampler.timer.is_on:
            _, line = self._sampler.place_of(sys._getframe())
            places[WAITING, line] += waited
        for place, spent in places.items():
            alike.places[counts_as][place] += spent
        self._function, self._begun = function, now

    # --- Figures ------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """How long all spans take under eqxjit, in seconds."""
        return sum(
            alike.total[mode] * weight
            for alike in self._alike.values()
            for mode, weight in alike.weights.items()
        )

    @property
    def places(self) -> dict[Place, float]:
        """The seconds that the samples found in each place, as if eqxjit had served all calls."""
        places = defaultdict[Place, float](float)
        for alike in self._alike.values():
            for mode, weight in alike.weights.items():
                for place, seconds in alike.places[mode].items():
                    places[place] += seconds * weight
        return {place: max(0.0, seconds) for place, seconds in places.items()}

    @property
    def excess(self) -> float:
        """How many seconds longer all spans take under Equinox; NaN if that isn't known."""
        known = [
            (alike.n.total(), excess)
            for alike in self._alike.values()
            if (excess := alike.excess) is not None
        ]
        n = sum(n for n, _ in known)
        mean = sum(n * excess for n, excess in known) / n if n else float("nan")
        return self.n_calls * mean


def _trimmed_mean(seconds: Iterable[float]) -> float:
    """Return the mean without the tenth at each end. At the upper end, others used the CPU."""
    ordered = sorted(seconds)
    n_outer = len(ordered) // 10
    return statistics.fmean(ordered[n_outer : len(ordered) - n_outer])


def wait_for(result: Any) -> None:
    """Wait until the arrays of a result are ready."""
    try:
        jax.block_until_ready(result)
    except Exception as error:
        if comes_from_signal_handler(error):
            raise
        # If the computation has failed, the program finds out when it reads the result.
