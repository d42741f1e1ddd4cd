"""Divides the main thread's time into spans, and compares what they take in different modes.

A *span* lasts from the beginning of one call to the beginning of the next: it is a call, and what
the program does after it. Spans between the same two functions are alike, so those of one mode
tell how long those of another mode would have taken.

The *mode* tells who serves a call. A *block* is a number of consecutive calls of one mode. It shows
all that the mode causes: also the time for which the program waits for results, and the time by
which Equinox slows down the work between calls, because it uses more of the CPU's caches.
"""

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from .log import AWAITED, OURS, THEIRS
from .sampler import WAITING, Place, Sampler

# The first calls of a short block aren't timed, because the caches of the CPU still hold the code
# and the data of the other mode: at most this many calls, in at most this many seconds.
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

# A time between two calls is long if it takes more than this many seconds. Long times are rare if
# fewer than this part of the spans have them, such as a checkpoint that is written every 100 calls.
# Rare long times aren't compared: most short blocks don't meet them, and the others meet too many.
_LONG, _RARE = 0.005, 0.25

# This part of the groups is left out at each end. What is too rare to be met by most short blocks,
# such as an evaluation every 100 calls, makes some groups long in any mode.
_OUTER = 0.25


class _Group(NamedTuple):
    """Some consecutive spans between two functions.

    - `seconds`: their seconds, without long times between calls.
    - `long`: the seconds of long times between calls.
    - `n`: the number of spans.
    - `n_long`: how many of them have a long time between calls.
    """

    seconds: float
    long: float
    n: int
    n_long: int


class _Part(NamedTuple):
    """The spans of one block between two functions.

    - `all`: all of them.
    - `groups`: the same in groups that are as large as such a part of a short block. The rest is
        left out.
    """

    all: _Group
    groups: list[_Group]


_Alike = dict[str, list[_Part]]


class Spans:
    """The spans of the main thread, and the blocks to which they belong.

    While a block is under way, `log.mode` is its mode. `begin_call` decides about the calls after
    `log.logs_until`.
    """

    def __init__(self, sampler: Sampler, functions: Sequence[Any]):
        """`functions` are the `Tried` of all functions, of which there may be more and more."""
        self._sampler, self._log, self._functions = sampler, sampler.log, functions
        # A span lies between the calls of two functions. For each such pair of functions and each
        # mode, the parts of the blocks.
        self._alike: defaultdict[tuple[Any, Any], _Alike] = defaultdict(dict)
        # The seconds that the samples found, by place, and by the function that they belong to or
        # None. Calls and waiting belong to a function. They are counted only in blocks of eqxjit's,
        # because they take a different time under Equinox.
        self._places: defaultdict[tuple[Place, Any], float] = defaultdict(float)
        # When the steady state began, by the sampler's clock.
        self._steady = 0.0
        # When the block under way began.
        self._begun = 0.0
        # Whether the latest call was the last one of a block of eqxjit's.
        self._is_last = False
        # When the latest short blocks began, and how many long blocks there were.
        self._short_begun = 0.0
        self._n_long = 0

    def begin_call(self, function: Any, now: float) -> bool:
        """Begin a call, with a new block if need be; return whether it ends a block of eqxjit's.

        `function` is the function's `Tried`. The last call of a block of eqxjit's must be awaited.
        Otherwise the next block would wait for what this block has left to compute.
        """
        if self._is_over(now):
            self.end_block(function)
            self._begin_block(now)
        if self._log.mode is OURS:
            function.n_ours += 1
        else:
            function.n_short += 1
        self._is_last = self._log.mode is OURS and now >= self._log.logs_until
        return self._is_last

    def abandon(self, has_compiled: bool) -> None:
        """Leave out the span under way, because a trace or a comparison has spoiled it.

        A short block ends with it. `has_compiled` tells whether it was a trace.
        """
        if self._log.mode is OURS:
            # Comparing the last call of a block doesn't spoil the block.
            if has_compiled or not self._is_last:
                self._log.read().clear()
            return
        # The call itself or, if it has raised an error and isn't logged, the call before it.
        calls = self._log.read()
        if calls:
            calls.pop()
        self.end_block()
        # The short blocks begin again after the next call if it was a comparison, since there are
        # only a few. A program may trace for ever, and a call would be compared each time.
        self._begin_long(time.perf_counter(), _MIN_SECONDS if has_compiled else 0.0)

    def begin(self, function: Any, begun: float) -> None:
        """Begin with a call of a function that began at a time of the clock."""
        self._sampler.places.clear()
        self._log.read().clear()
        self._begin(OURS, time.perf_counter())
        function.n_ours = 1
        self._steady = begun

    # --- Blocks -------------------------------------------------------------------------------

    def _is_over(self, now: float) -> bool:
        if self._log.mode is OURS:
            return self._is_last
        n, seconds = len(self._log.read()), now - self._begun
        if self._log.mode is AWAITED:
            return n >= _N_AWAITED or (seconds >= _MIN_SECONDS and n >= 2)
        is_long = seconds >= _MIN_SECONDS and n >= _MIN_CALLS
        return is_long or (seconds >= _MANY_SECONDS and n >= 2)

    def _begin_block(self, now: float) -> None:
        if self._log.mode is AWAITED:
            self._begin_long(now, now - self._short_begun)
            return
        mode = AWAITED
        if self._log.mode is OURS:
            self._short_begun = now
            # Equinox can serve calls only of functions whose results are the same.
            mode = THEIRS if any(each.is_right for each in self._functions) else AWAITED
        self._log.logs_until = now + _MIN_SECONDS if mode is THEIRS else 0.0
        self._begin(mode, now)

    def _begin(self, mode: str, now: float) -> None:
        self._log.mode, self._begun, self._is_last = mode, now, False

    def _begin_long(self, now: float, seconds: float) -> None:
        """Begin a block of eqxjit's after short blocks that have taken some seconds."""
        self._begin(OURS, now)
        self._n_long += seconds > 0
        self._log.logs_until = now + _FACTOR * self._n_long * seconds

    def end_block(self, next_function: Any = None) -> None:
        """End the block under way.

        `next_function` is the `Tried` of the function that is called now. If it is `None`, the
        block is unfinished. What it has left to compute isn't known, so it isn't compared.
        """
        sampler, mode = self._sampler, self._log.mode
        taken, sampler.places = sampler.places, defaultdict(float)
        for (place, function), spent in taken.items():
            if mode is OURS or function is None:
                self._places[place, function] += spent
        warm = self._warm_calls()
        for called, served_by, begun, ended in warm:
            if served_by is mode:
                called.times[mode].append(ended - begun)
        for called in {each for each, *_ in warm}:
            times = sorted(called.times[OURS]) or [0.0]
            called.least = times[len(times) // 10]
        # A block of eqxjit's that has just one call shows only a call that is awaited.
        if next_function is not None and len(warm) > (mode is OURS):
            self._compare([*warm, [next_function, mode, sampler.clock(), 0.0]])
        self._log.read().clear()

    def _warm_calls(self) -> list[list[Any]]:
        """Return the logged calls without the first ones of a short block."""
        calls = [*self._log.read()]
        if self._log.mode is OURS:
            return calls
        n_cold = sum(begun < calls[0][2] + _SECONDS_COLD for _, _, begun, _ in calls[:_N_COLD])
        return calls[n_cold:]

    def _compare(self, calls: list[list[Any]]) -> None:
        """Add the spans between these logged calls to the groups of the same pairs of functions."""
        # For each span, its seconds without a long time between calls, and that time.
        found: defaultdict[tuple[Any, Any], list[tuple[float, float]]] = defaultdict(list)
        timer = self._sampler.timer
        # Without samples, how long the program waits isn't known.
        is_sampled = timer.has_run and not timer.has_yielded
        pairs = itertools.pairwise(calls)
        for (function, served_by, begun, ended), (after, _, end, _) in pairs:
            if self._log.mode is THEIRS and served_by is not THEIRS:
                # Equinox can't serve the call.
                continue
            between = end - ended
            long = between if between > _LONG and is_sampled else 0.0
            found[function.row, after.row].append((end - begun - long, long))
        for pair, spans in found.items():
            alike = self._alike[pair]
            short = [parts[-1] for mode, parts in alike.items() if mode is not OURS]
            n = len(spans)
            if self._log.mode is OURS and short:
                # As many as in a short block, so that a group meets rare work as often.
                n = min(n, short[0].all.n)
            groups = [_group(spans[i : i + n]) for i in range(0, len(spans) - n + 1, n)]
            part = _Part(_group(spans), groups)
            # Not `append`, because an interrupt must not leave a mode without parts.
            alike[self._log.mode] = [*alike.get(self._log.mode, ()), part]

    # --- Figures ------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """The seconds that all spans would take under eqxjit."""
        seconds = self._sampler.clock() - self._steady
        waited = self._waited()
        for (row, _), alike in self._alike.items():
            for mode in alike:
                if mode is not OURS and OURS in alike:
                    longer = _mean(alike, mode) - _mean_of_ours(alike, waited[row])
                    seconds -= _count(alike[mode]) * longer
        return seconds

    @property
    def places(self) -> dict[Place, float]:
        """The seconds of each place, if eqxjit had served all calls as usual."""
        found: defaultdict[Place, float] = defaultdict(float)
        for (place, function), spent in self._places.items():
            factor = 1.0
            if function is not None:
                factor += function.n_short / max(1, function.n_ours)
            found[place] += max(0.0, spent) * factor
        return found

    @property
    def excess(self) -> float:
        """The seconds that all spans would take longer under Equinox; NaN if they aren't known.

        They are known if most of the time of the spans is that of functions that Equinox served.
        All other spans are taken to last as long under both.
        """
        excess = known = unknown = 0.0
        n_calls = Counter[Any]()
        for function in self._functions:
            n_calls[function.row] += function.n_ours + function.n_short
        n_alike = {pair: sum(map(_count, alike.values())) for pair, alike in self._alike.items()}
        n_spans = Counter[Any]()
        for (row, _), n in n_alike.items():
            n_spans[row] += n
        waited = self._waited()
        for (row, after), alike in self._alike.items():
            n = n_calls[row] * n_alike[row, after] / n_spans[row]
            ours = _mean_of_ours(alike, waited[row])
            if THEIRS in alike and len(alike) > 1:
                excess += n * (_mean(alike, THEIRS) - ours)
                known += n * ours
            elif OURS in alike:
                unknown += n * ours
        return excess if known > unknown else float("nan")

    def _waited(self) -> dict[Any, float]:
        """Return for how many seconds a span waits under eqxjit on average, by function's row."""
        waited, n_calls = defaultdict[Any, float](float), Counter[Any]()
        for function in self._functions:
            n_calls[function.row] += function.n_ours
        for ((kind, _), function), spent in self._places.items():
            if kind is WAITING:
                # If the program waits long, the function is unknown.
                waited[function and function.row] += spent
        rest = waited[None] / max(1, n_calls.total())
        return {row: waited[row] / max(1, n) + rest for row, n in n_calls.items()}


def _mean_of_ours(alike: _Alike, waited: float) -> float:
    """Return the mean seconds of a span under eqxjit; NaN without any.

    `waited` is for how many seconds such a span waits, on average.
    """
    if OURS not in alike:
        # A short run may have no block of calls that aren't awaited.
        return _mean(alike, AWAITED) if AWAITED in alike else float("nan")
    # If the program rarely reads a result, its calls run ahead of their computations. It waits for
    # many of them in a few groups, which `_mean` leaves out. Other rare work isn't waiting, or
    # makes spans longer than awaited calls do.
    mean = _mean(alike, OURS)
    longest = _mean_of([part.all for part in alike[OURS]], True)
    if AWAITED in alike:
        longest = min(longest, _mean(alike, AWAITED))
    return max(mean, min(mean + waited, longest))


def _mean(alike: _Alike, mode: str) -> float:
    """Return the mean seconds of a span of one mode, without the shortest and the longest groups.

    Long times between calls are left out if they are rare.
    """
    every = [part.all for parts in alike.values() for part in parts]
    is_often_long = sum(each.n_long for each in every) >= _RARE * sum(each.n for each in every)
    groups = [group for part in alike[mode] for group in part.groups]
    groups.sort(key=lambda group: _mean_of([group], is_often_long))
    n_outer = int(len(groups) * _OUTER)
    return _mean_of(groups[n_outer : len(groups) - n_outer], is_often_long)


def _mean_of(groups: Sequence[_Group], with_long: bool) -> float:
    seconds = sum(each.seconds + (each.long if with_long else 0.0) for each in groups)
    return seconds / sum(each.n for each in groups)


def _group(spans: Sequence[tuple[float, float]]) -> _Group:
    seconds, long = map(sum, zip(*spans, strict=True))
    return _Group(seconds, long, len(spans), sum(each > 0 for _, each in spans))


def _count(parts: Sequence[_Part]) -> int:
    """Return the number of spans."""
    return sum(part.all.n for part in parts)
