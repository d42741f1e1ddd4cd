"""Divides the main thread's time into spans, and compares what they take in different modes.

A *span* lasts from the beginning of one call to the beginning of the next: it is a call, and what
the program does after it. The *mode* tells who serves the call. Spans between the same two
functions are alike, so those of one mode tell how long those of another mode would have taken.

A *block* is a number of consecutive spans of one mode. It shows all that the mode causes: also the
time for which the program waits for results, and the time by which Equinox slows down the work
between calls, because it uses more of the CPU's caches.
"""

import dataclasses
import itertools
import sys
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax

from .._text import comes_from_signal_handler
from .sampler import CALLS, WAITING, Place, Sampler

#: The modes of serving a call: by Equinox; by eqxjit, waiting for the results; and by eqxjit. Short
#: blocks of the first two take turns with long blocks of the last.
THEIRS, AWAITED, OURS = "theirs", "awaited", "ours"

# The first calls of a short block aren't timed, because the caches of the CPU still hold the code
# and the data of the other mode: at most this many calls, in at most this many seconds.
_COLD = "cold"
_N_COLD, _SECONDS_COLD = 6, 0.005

# A block of Equinox's has at least this many calls, and takes at least this many seconds. If calls
# are slow, two are enough after this many seconds.
_MIN_CALLS, _MIN_SECONDS, _MANY_SECONDS = 8, 0.02, 0.1

# A block of calls that are awaited has this many, or if they are slow, takes `_MIN_SECONDS`.
_N_AWAITED = 16

# The first block of eqxjit's takes this many times as long as the short blocks before it, the
# second twice this many times, and so on. So there are enough blocks in a short run, and a long run
# isn't slowed down.
_FACTOR = 3.0

# At most this many calls of a block of eqxjit's are logged, the latest ones.
_MAX_LOGGED = 5_000


@dataclasses.dataclass
class _Sum:
    """The spans of one mode between two functions.

    - `n`: how many there were.
    - `total`: how many seconds they took together.
    - `waited`: the part of `total` in which the trial waited for results.
    - `blocks`: the seconds of the spans of each of the latest blocks, without that waiting, and
        their number.
    - `places`: the seconds that the samples found in each place, unless the mode is `OURS`.
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

    def add(self, seconds: float, block: int) -> None:
        """Add a span, which belongs to the block of this number."""
        self.n += 1
        self.total += seconds
        if block != self._block:
            self._block = block
            self.blocks.append((0.0, 0))
        total, n = self.blocks[-1]
        self.blocks[-1] = total + seconds, n + 1

    def add_waiting(self, seconds: float) -> None:
        """Add time for which the trial waited at the end of a span."""
        self.total += seconds
        self.waited += seconds

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
    - `log`: in a block of eqxjit's, for each call the function's `Tried`, and when the call began
        and ended, by the sampler's clock. All in one row, because garbage collection would have to
        visit tuples.
    - `logs_until`: the time until which calls need only be counted and logged. All calls after it
        begin and end spans by `begin_call` and `end_call`.
    - `n_calls`: how many calls there were since start-up.
    - `overhead`: the seconds by which the trial prolongs each call that is only logged.
    """

    def __init__(self, sampler: Sampler, can_swap: Callable[[], bool]):
        """`can_swap` tells whether Equinox can serve any calls."""
        self.mode = self.counts_as = OURS
        self.log: deque[Any] = deque(maxlen=3 * _MAX_LOGGED)
        self.logs_until = 0.0
        self.n_calls = 0
        self.overhead = 0.0
        self._sampler, self._can_swap = sampler, can_swap
        # The spans between each two functions.
        self._alike: defaultdict[Hashable, _Alike] = defaultdict(lambda: defaultdict(_Sum))
        # The seconds of eqxjit's blocks, and what the samples found in them.
        self._seconds = 0.0
        self._places: defaultdict[Place, float] = defaultdict(float)
        # The span under way, or all those under way that are only logged: the function that they
        # began with, when, by the sampler's clock, and how many calls there were before.
        self._function: Any = None
        self._begun = 0.0
        self._n_before = 0
        # The function that is called, and when the call began, if the call is to be logged.
        self._to_log: tuple[Any, float] | None = None
        # How long the trial has waited for results in it, by the machine's clock.
        self._waited = 0.0
        # The block under way: how many calls it has had, when it began, and whether it is over.
        self._n_in_block = 0
        self._block_begun = 0.0
        self._is_over = False
        self._n_blocks = 0
        # The arrays that its last call has returned.
        self._last = list[weakref.ref[jax.Array]]()
        # When the latest short blocks began, and how many long blocks there were.
        self._short_begun = 0.0
        self._n_long = 0

    def is_last_of_long(self, now: float) -> bool:
        """Return whether a call is the last one of a long block of eqxjit's."""
        is_due = self.mode is OURS and now >= self.logs_until
        return is_due and self._n_blocks > 0 and not self._is_over

    def begin_call(self, function: Any, is_last_of_long: bool) -> str:
        """Begin a span with a call of a function, and return the mode of the call.

        `function` is the function's `Tried`. The last call of a long block is logged as those
        before it.
        """
        if is_last_of_long:
            self.n_calls += 1
            self._to_log = function, self._sampler.clock()
            return OURS
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
        self.counts_as = _COLD if is_cold and self.mode is not OURS else self.mode
        if self.mode is OURS and self._n_blocks:
            # The calls before the first block are compared.
            self._to_log = function, self._begun
        return self.mode

    def end_call(self, result: Any) -> None:
        """Note that the call has ended, and what it has returned."""
        if self._to_log is not None:
            self.log.extend((*self._to_log, self._sampler.clock()))
            self._to_log = None
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

    def abandon(self, has_compiled: bool) -> None:
        """Compare the span under way with no others, because a trace or a comparison spoiled it.

        `has_compiled` tells whether it was a trace.
        """
        self.counts_as = OURS
        self._to_log = None
        self.log.clear()
        if self.mode is not OURS:
            # The short blocks begin again at once after a comparison, since there are only a few.
            # A program may trace for ever, and a call would be compared each time.
            self._begin_ours(time.perf_counter(), _MIN_SECONDS if has_compiled else 0.0)

    def restart(self, begun: float) -> None:
        """Forget all spans, and count the span under way from a time of the sampler's clock."""
        self._alike.clear()
        self._places.clear()
        self._seconds = 0.0
        self.n_calls, self._n_before = 1, 0
        self._begun = begun

    def end(self) -> None:
        """End the span under way, because the trial ends."""
        self._end_span(None)

    # --- Blocks -------------------------------------------------------------------------------

    def _is_block_over(self, now: float) -> bool:
        if self.mode is OURS:
            return now >= self.logs_until
        n, seconds = self._n_in_block, now - self._block_begun
        if self.mode is AWAITED:
            return n >= _N_AWAITED or (seconds >= _MIN_SECONDS and n >= 2)
        is_long = seconds >= _MIN_SECONDS and n >= _MIN_CALLS
        return is_long or (seconds >= _MANY_SECONDS and n >= 2)

    def _begin_block(self, now: float) -> None:
        self._is_over = False
        self._n_blocks += 1
        self._n_in_block = 0
        self._block_begun = now
        if self.mode is AWAITED:
            self._begin_ours(now, now - self._short_begun)
            return
        if self.mode is OURS:
            self.logs_until = 0.0
            self._short_begun = now
        can_swap = self.mode is OURS and self._can_swap()
        self.mode = THEIRS if can_swap else AWAITED

    def _begin_ours(self, now: float, seconds: float) -> None:
        """Begin a block of eqxjit's after short blocks that have taken some seconds."""
        self.mode = OURS
        self._n_long += seconds > 0
        self.logs_until = now + _FACTOR * self._n_long * seconds

    # --- Spans --------------------------------------------------------------------------------

    def _end_span(self, function: Any) -> None:
        """End the span under way, and the logged ones, because a function is called."""
        sampler, waited = self._sampler, self._waited
        now = sampler.clock()
        overhead = self.overhead * (self.n_calls - self._n_before)
        seconds = now - self._begun - overhead
        if self.counts_as is OURS:
            self._seconds += seconds + waited
            places = self._places
            found = self._end_log(function, now)
        else:
            found = self._alike_of(self._function, function)[self.counts_as]
            found.add(seconds, self._n_blocks)
            places = found.places
        if found is not None:
            found.add_waiting(waited)
        taken, sampler.places = sampler.places, defaultdict(float)
        of_calls = sum(spent for (kind, _), spent in taken.items() if kind is CALLS)
        for place, spent in taken.items():
            is_call = place[0] is CALLS and of_calls > overhead
            places[place] += spent * (1 - overhead / of_calls) if is_call else spent
        if waited and sampler.timer.is_on:
            _, line = sampler.place_of(sys._getframe())
            places[WAITING, line] += waited
        self._function, self._begun, self._n_before = function, now, self.n_calls
        self._waited = 0.0

    def _end_log(self, function: Any, now: float) -> _Sum | None:
        """Add the logged spans to those that they are compared with, and return the last's sum."""
        found = None
        # What an unfinished block has left to compute isn't known, so nothing is compared with it.
        if self._is_over:
            values: Iterator[Any] = iter([*self.log, function, now, now])
            calls = zip(values, values, values, strict=True)
            for (before, begun, ended), (after, next_begun, _) in itertools.pairwise(calls):
                before.times[OURS].append(ended - begun)
                found = self._alike_of(before, after)[OURS]
                found.add(next_begun - begun - self.overhead, self._n_blocks)
        self.log.clear()
        return found

    def _alike_of(self, before: Any, after: Any) -> _Alike:
        """Return the spans between two functions, of which either may be `None`."""
        return self._alike[before and before.row, after and after.row]

    # --- Figures ------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """The seconds that all spans would take under eqxjit, as far as eqxjit served any alike."""
        alike, others = self._other_modes()
        return self._seconds + alike + sum(found.total for found in others)

    @property
    def places(self) -> dict[Place, float]:
        """The seconds of each place, if eqxjit had served all calls as usual."""
        alike, others = self._other_modes()
        factor = 1 + alike / self._seconds if self._seconds else 0.0
        places = defaultdict[Place, float](float)
        for place, spent in self._places.items():
            places[place] += spent * factor
        for found in others:
            for place, spent in found.places.items():
                places[place] += spent
        return {place: max(0.0, spent) for place, spent in places.items()}

    @property
    def excess(self) -> float:
        """The seconds that all spans would take longer under Equinox; NaN if they aren't known."""
        n = seconds = 0.0
        for alike in self._alike.values():
            # A short run may have no block of eqxjit's to compare with.
            ours = alike.get(OURS) or alike.get(AWAITED)
            if ours is not None and THEIRS in alike:
                n_alike = sum(found.n for found in alike.values())
                n += n_alike
                seconds += n_alike * (alike[THEIRS].mean - ours.mean)
        return self.n_calls * seconds / n if n else float("nan")

    def _other_modes(self) -> tuple[float, list[_Sum]]:
        """Return what the spans of the other modes would have taken under eqxjit.

        That is their seconds, as far as eqxjit served any alike, and all others.
        """
        seconds = 0.0
        others = list[_Sum]()
        for alike in self._alike.values():
            for mode, found in alike.items():
                if mode is not OURS and OURS in alike:
                    seconds += found.n * alike[OURS].mean
                elif mode is not OURS:
                    others.append(found)
        return seconds, others


def wait_for(result: Any) -> None:
    """Wait until the arrays of a result are ready."""
    try:
        jax.block_until_ready(result)
    except Exception as error:
        if comes_from_signal_handler(error):
            raise
        # If the computation has failed, the program finds out when it reads the result.
