"""The timeline of a report: what was traced, lowered and compiled when, and why."""

import collections
import itertools
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._code.html import escape
from .._core.events import COMPILING, LOWERING, TRACING
from .._lock import Lock
from .trace import Trace

# How many spans are kept, the latest; and how many a page shows, the longest.
_MAX_KEPT = 100_000
_MAX_SHOWN = 3_000

# How much of a page an interval takes in which nothing is compiled, at most.
_WIDEST_GAP = 0.04

# Up to this share of a row, in percent, a bar has no text.
_NARROW = 1.5

_COLOURS = {TRACING: "#4c9be8", LOWERING: "#e8a33d", COMPILING: "#6cbf6c"}

_BAR = (
    "float:left;height:17px;overflow:hidden;white-space:nowrap;color:#111111;font-size:11px;"
    "line-height:17px;border-radius:2px"
)


class ReportSpan(NamedTuple):
    """One phase of one function: an interval of the timeline.

    - `function`: its name.
    - `phase`: `"tracing"`, `"lowering"` or `"compiling"`.
    - `start`, `seconds`: when it began, from the beginning of the report, and how long it took,
        with all that is nested in it.
    - `thread`: the name of the thread.
    - `depth`: how many spans it is nested in.
    - `from_persistent_cache`: whether JAX's persistent cache held the compiled program.
    - `trace`: the `Trace` that it was for, with the reason for it; `None` for a function that isn't
        under eqxjit's `filter_jit`.
    """

    function: str
    phase: str
    start: float
    seconds: float
    thread: str
    depth: int
    from_persistent_cache: bool
    trace: Trace | None

    @property
    def reason(self) -> str:
        """Why it was made; empty where that isn't known."""
        return "" if self.trace is None else self.trace.reason


class _Thread(threading.local):
    def __init__(self) -> None:
        #: Function, phase and start of the spans under way, outside in.
        self.begun: list[tuple[str, str, float]] = []
        #: The ended spans whose trace isn't complete yet: their places among all spans.
        self.waiting: dict[str, list[int]] = {}


class Timeline:
    """A recorder of spans: it is told of the beginning and the end of each phase."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._lock = Lock()
        self._spans: collections.OrderedDict[int, ReportSpan] = collections.OrderedDict()
        self._n_ended = 0
        self._thread = _Thread()

    def begun(self, function: str, phase: str) -> None:
        """Note that a phase begins in this thread."""
        under_way = self._thread.begun
        if phase == TRACING and not any(other == function for other, _, _ in under_way):
            # Those of a trace that failed.
            self._thread.waiting.pop(function, None)
        under_way.append((function, phase, time.perf_counter()))

    def ended(self, function: str, phase: str, from_cache: bool) -> None:
        """Add the span of a phase that ends in this thread."""
        now, begun = time.perf_counter(), self._thread.begun
        # An interrupt may have kept those above it from their end.
        while begun and begun[-1][:2] != (function, phase):
            begun.pop()
        if not begun:
            return
        _, _, start = begun.pop()
        around = [phase for phase, _ in itertools.groupby(begun, key=lambda span: span[:2])]
        if around and around[-1] == (function, phase):
            # JAX and eqxjit both report a trace: one span.
            return
        span = ReportSpan(
            function,
            phase,
            start - self._start,
            now - start,
            threading.current_thread().name,
            len(around),
            from_cache,
            None,
        )
        with self._lock:
            self._n_ended += 1
            self._spans[self._n_ended] = span
            if len(self._spans) > _MAX_KEPT:
                self._spans.popitem(last=False)
            self._thread.waiting.setdefault(function, []).append(self._n_ended)

    def traced(self, trace: Trace) -> None:
        """Add a trace to the spans that it is made of."""
        with self._lock:
            for place in self._thread.waiting.pop(trace.function, ()):
                if place in self._spans:
                    self._spans[place] = self._spans[place]._replace(trace=trace)

    @property
    def spans(self) -> list[ReportSpan]:
        """All spans, by their start."""
        with self._lock:
            return sorted(self._spans.values(), key=lambda span: (span.start, span.depth))


def chrome_trace(spans: Sequence[ReportSpan]) -> dict[str, Any]:
    """Return spans in the Trace Event Format, which Perfetto and `chrome://tracing` open."""
    threads = {name: i for i, name in enumerate(dict.fromkeys(span.thread for span in spans), 1)}
    pid = os.getpid()
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": "eqxjit"}}
    ]
    events += [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        for name, tid in threads.items()
    ]
    for span in spans:
        args: dict[str, Any] = {"phase": span.phase}
        if span.phase == COMPILING:
            args["from_persistent_cache"] = span.from_persistent_cache
        if span.trace is not None:
            args |= {
                "trace": span.trace.number,
                "reason": span.reason,
                "call_site": str(span.trace.call_site),
            }
        events.append(
            {
                "name": f"{span.function} ({span.phase})",
                "cat": span.phase,
                "ph": "X",
                "ts": span.start * 1e6,
                "dur": span.seconds * 1e6,
                "pid": pid,
                "tid": threads[span.thread],
                "args": args,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def timeline_html(spans: Sequence[ReportSpan]) -> str:
    """Return a flame chart of spans: a lane for each thread, a row for each level of nesting."""
    if not spans:
        return ""
    shown = sorted(spans, key=lambda span: span.seconds)[-_MAX_SHOWN:]
    shown.sort(key=lambda span: (span.start, span.depth))
    scale = _Scale(spans)
    note = (
        f" The {len(shown):,} longest of {len(spans):,} spans." if len(shown) < len(spans) else ""
    )
    keys = "".join(
        [
            f' <span style="background-color:{colour};color:#111111;white-space:nowrap">'
            f"&ensp;{phase}&ensp;</span>"
            for phase, colour in _COLOURS.items()
        ]
    )
    parts = [f"<p>{scale.seconds:.3g} s from the first trace to the last program.{note}{keys}</p>"]
    lanes = dict.fromkeys(span.thread for span in shown)
    for lane in lanes:
        own = [span for span in shown if span.thread == lane]
        if len(lanes) > 1:
            parts.append(f"<div>{escape(lane)}</div>")
        for depth in range(1 + max([span.depth for span in own])):
            bars = [_span_bar(span) for span in own if span.depth == depth]
            parts.append(_row(scale, bars if depth else [*bars, *map(_gap_bar, scale.gaps)]))
        parts.append('<div style="clear:both;height:8px"></div>')
    return "".join(parts)


class _Scale:
    """A scale from seconds to percents, in which long intervals without a span are short.

    - `seconds`: from the first span's beginning to the last one's end.
    - `gaps`: the beginning and the end of each interval that is cut.
    """

    def __init__(self, spans: Sequence[ReportSpan]):
        start = end = min(span.start for span in spans)
        idle: list[tuple[float, float]] = []
        for span in sorted(spans, key=lambda span: span.start):
            if span.start > end:
                idle.append((end, span.start))
            end = max(end, span.start + span.seconds)
        self.seconds = end - start
        busy = self.seconds - sum([after - before for before, after in idle])
        self._widest = max(busy, 1e-9) * _WIDEST_GAP
        self.gaps = [gap for gap in idle if gap[1] - gap[0] > self._widest]
        self._start = start
        self._width = max(self._shortened(end), 1e-9)

    def _shortened(self, at: float) -> float:
        cut = 0.0
        for before, after in self.gaps:
            if at >= after:
                cut += after - before - self._widest
            elif at > before:
                cut += (at - before) * (1 - self._widest / (after - before))
        return at - self._start - cut

    def percent(self, at: float) -> float:
        """Return where a time is, from 0 to 100."""
        return 100 * self._shortened(at) / self._width


class _Bar(NamedTuple):
    """A bar of the chart.

    - `start`, `end`: in seconds.
    - `colour`, `text`: of the bar.
    - `title`: what is shown where the pointer is on it.
    """

    start: float
    end: float
    colour: str
    text: str
    title: str


def _row(scale: _Scale, bars: list[_Bar]) -> str:
    """Return a row of bars, each placed from the end of the one before."""
    parts: list[str] = []
    cursor = 0.0
    for bar in sorted(bars):
        left, right = max(cursor, scale.percent(bar.start)), scale.percent(bar.end)
        # Rounded down: a row of more than 100 % would break.
        margin = int((left - cursor) * 1000) / 1000
        width = max(0, int((right - left) * 1000) / 1000)
        cursor += margin + width
        place = f"margin-left:{margin:.3f}%;width:{width:.3f}%"
        parts.append(
            f'<div class="bar" style="{place};{_BAR};background-color:{bar.colour}" '
            f'title="{escape(bar.title)}">{escape(bar.text) if width > _NARROW else ""}</div>'
        )
    return f'<div style="clear:both;height:18px;overflow:hidden">{"".join(parts)}</div>'


def _gap_bar(gap: tuple[float, float]) -> _Bar:
    title = f"{gap[1] - gap[0]:.3g} s without tracing or compiling"
    return _Bar(*gap, "rgba(128,128,128,0.2)", "", title)


def _span_bar(span: ReportSpan) -> _Bar:
    details = [f"{span.function}: {span.phase}, {span.seconds:.3g} s, begun at {span.start:.3g} s"]
    if span.from_persistent_cache:
        details.append("from JAX's persistent cache")
    if span.trace is not None:
        details += [
            f"trace {span.trace.number}: {span.reason}",
            f"called at {span.trace.call_site}",
        ]
    end = span.start + span.seconds
    return _Bar(span.start, end, _COLOURS[span.phase], span.function, "\n".join(details))
