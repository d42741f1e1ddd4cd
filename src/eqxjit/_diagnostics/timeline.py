"""The timeline of a report: what was traced, lowered and compiled when, and why."""

import collections
import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .._code.html import escape
from .._core.events import COMPILING, LOWERING, TRACING
from .trace import Trace

# How many spans a page shows, the longest.
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


class Event(NamedTuple):
    """One event of a report: a phase begins or ends, or a trace is complete.

    - `time`, `thread`: when, from the beginning of the report, and in which thread, by its number
        and its name.
    - `function`, `phase`: of which function; the phase of a trace is empty.
    - `own_seconds`: how long a phase that ends took, without what was compiled within it; None
        where one begins.
    - `from_cache`: whether the program came from JAX's persistent cache.
    - `trace`: the trace that is complete.
    """

    time: float
    thread: tuple[int, str]
    function: str
    phase: str = ""
    own_seconds: float | None = None
    from_cache: bool = False
    trace: Trace | None = None

    @property
    def of(self) -> tuple[str, str]:
        """The function and the phase."""
        return self.function, self.phase


def spans_of(events: Iterable[Event]) -> list[ReportSpan]:
    """Return the spans between events, by their start."""
    spans: list[ReportSpan] = []
    # By thread: the phases under way, outside in; and the places of the ended ones, by function,
    # whose trace isn't complete yet.
    threads: Any = collections.defaultdict(lambda: ([], collections.defaultdict(list)))
    for event in events:
        under_way, waiting = threads[event.thread]
        if event.trace is not None:
            for place in waiting.pop(event.function, ()):
                spans[place] = spans[place]._replace(trace=event.trace)
        elif event.own_seconds is None:
            if event.phase == TRACING and all(e.function != event.function for e in under_way):
                # Those of a trace that failed.
                waiting.pop(event.function, None)
            under_way.append(event)
        else:
            # An interrupt may have kept those above it from their end.
            while under_way and under_way[-1].of != event.of:
                under_way.pop()
            if not under_way:
                continue
            start = under_way.pop().time
            around = [of for of, _ in itertools.groupby(under_way, key=lambda e: e.of)]
            if around[-1:] == [event.of]:
                # JAX and eqxjit both report a trace: one span.
                continue
            seconds, thread = event.time - start, event.thread[1]
            waiting[event.function].append(len(spans))
            spans.append(
                ReportSpan(*event.of, start, seconds, thread, len(around), event.from_cache, None)
            )
    return sorted(spans, key=lambda span: (span.start, span.depth))


def chrome_trace(spans: Sequence[ReportSpan]) -> dict[str, Any]:
    """Return spans in the Trace Event Format, which Perfetto and `chrome://tracing` open."""
    threads = {name: i for i, name in enumerate(dict.fromkeys(span.thread for span in spans), 1)}
    pid = os.getpid()
    names = [("process_name", 0, "eqxjit"), *[("thread_name", i, n) for n, i in threads.items()]]
    events: list[dict[str, Any]] = [
        {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        for what, tid, name in names
    ]
    for span in spans:
        args: dict[str, Any] = {"phase": span.phase}
        if span.phase == COMPILING:
            args["from_persistent_cache"] = span.from_persistent_cache
        if span.trace is not None:
            site = str(span.trace.call_site)
            args |= {"trace": span.trace.number, "reason": span.reason, "call_site": site}
        name = f"{span.function} ({span.phase})"
        times = {"ts": span.start * 1e6, "dur": span.seconds * 1e6}
        place = {"pid": pid, "tid": threads[span.thread]}
        events.append({"name": name, "cat": span.phase, "ph": "X", **times, **place, "args": args})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def timeline_html(spans: Sequence[ReportSpan]) -> str:
    """Return a flame chart of spans: a lane for each thread, a row for each level of nesting."""
    if not spans:
        return ""
    shown = sorted(spans, key=lambda span: span.seconds)[-_MAX_SHOWN:]
    scale = _Scale(spans)
    note = (
        f" The {len(shown):,} longest of {len(spans):,} spans." if len(shown) < len(spans) else ""
    )
    keys = [
        f' <span style="background-color:{colour};color:#111111;white-space:nowrap">'
        f"&ensp;{phase}&ensp;</span>"
        for phase, colour in _COLOURS.items()
    ]
    title = f"{scale.seconds:.3g} s from the first trace to the last program.{note}{''.join(keys)}"
    rows: dict[str, dict[int, list[_Bar]]] = {}
    for span in sorted(shown, key=lambda span: (span.start, span.depth)):
        rows.setdefault(span.thread, {}).setdefault(span.depth, []).append(_span_bar(span))
    parts = [f"<p>{title}</p>"]
    for thread, by_depth in rows.items():
        if len(rows) > 1:
            parts.append(f"<div>{escape(thread)}</div>")
        for depth in range(1 + max(by_depth)):
            gaps = [] if depth else [_gap_bar(gap) for gap in scale.gaps]
            parts.append(_row(scale, [*by_depth.get(depth, []), *gaps]))
        parts.append('<div style="clear:both;height:8px"></div>')
    return "".join(parts)


class _Scale:
    """A scale from seconds to percents, in which long intervals without a span are short.

    - `seconds`: from the first span's beginning to the last one's end.
    - `gaps`: the beginning and the end of each interval that is cut.
    """

    def __init__(self, spans: Sequence[ReportSpan]):
        self._start = end = min(span.start for span in spans)
        idle: list[tuple[float, float]] = []
        for span in sorted(spans, key=lambda span: span.start):
            if span.start > end:
                idle.append((end, span.start))
            end = max(end, span.start + span.seconds)
        self.seconds = end - self._start
        busy = self.seconds - sum([after - before for before, after in idle])
        self._widest = max(busy, 1e-9) * _WIDEST_GAP
        self.gaps = [gap for gap in idle if gap[1] - gap[0] > self._widest]
        self._width = max(self._shortened(end), 1e-9)

    def _shortened(self, at: float) -> float:
        cut = 0.0
        for before, after in self.gaps:
            share = min(max(at - before, 0.0) / (after - before), 1.0)
            cut += share * (after - before - self._widest)
        return at - self._start - cut

    def percent(self, at: float) -> float:
        """Return where a time is, from 0 to 100."""
        return 100 * self._shortened(at) / self._width


class _Bar(NamedTuple):
    """A bar of the chart: an interval in seconds, its colour, its text, and its tooltip."""

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
        details.append(f"trace {span.trace.number}: {span.reason}")
        details.append(f"called at {span.trace.call_site}")
    end = span.start + span.seconds
    return _Bar(span.start, end, _COLOURS[span.phase], span.function, "\n".join(details))
