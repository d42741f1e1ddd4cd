"""The timeline of a report: what was traced, lowered and compiled when, and why."""

import collections
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .._code.text import escape
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
    - `nested_seconds`: how much of `seconds` the spans took that are nested in it.
    """

    function: str
    phase: str
    start: float
    seconds: float
    thread: str
    depth: int
    from_persistent_cache: bool
    trace: Trace | None
    nested_seconds: float = 0.0

    @property
    def end(self) -> float:
        """When it ended, from the beginning of the report."""
        return self.start + self.seconds

    @property
    def reason(self) -> str:
        """Why it was made; empty for a function that isn't under `filter_jit`."""
        return "" if self.trace is None else self.trace.reason


class Event(NamedTuple):
    """One event of a report: a phase begins or ends, or a trace is complete.

    - `time`, `thread`: when, from the beginning of the report, and in which thread, by its number
        and its name.
    - `function`, `phase`: of which function; the phase of a trace is empty.
    - `is_end`: whether a phase ends rather than begins.
    - `from_cache`: whether the program came from JAX's persistent cache.
    - `trace`: the trace that is complete.
    """

    time: float
    thread: tuple[int, str]
    function: str
    phase: str = ""
    is_end: bool = False
    from_cache: bool = False
    trace: Trace | None = None

    @property
    def of(self) -> tuple[str, str]:
        """The function and the phase."""
        return self.function, self.phase


class _Thread:
    """One thread, while its events are gone through.

    - `begun`: the phases under way, outside in; `nested`: how many seconds of each were another's.
    - `untraced`: the indices of the spans that ended, by function, whose trace isn't complete.
    """

    def __init__(self) -> None:
        self.begun: list[Event] = []
        self.nested: list[float] = []
        self.untraced: dict[str, list[int]] = collections.defaultdict(list)

    def pop(self) -> tuple[Event, float]:
        """Drop the innermost phase; return it, and how many seconds of it were another's."""
        return self.begun.pop(), self.nested.pop()


def spans_of(events: Iterable[Event]) -> list[ReportSpan]:
    """Return the spans between events, by their start."""
    spans: list[ReportSpan] = []
    threads: dict[tuple[int, str], _Thread] = collections.defaultdict(_Thread)
    for event in events:
        thread = threads[event.thread]
        begun, nested = thread.begun, thread.nested
        if event.trace is not None:
            for index in thread.untraced.pop(event.function, ()):
                spans[index] = spans[index]._replace(trace=event.trace)
        elif not event.is_end:
            if event.phase == TRACING and all(e.function != event.function for e in begun):
                # Those of a trace that failed.
                thread.untraced.pop(event.function, None)
            begun.append(event)
            nested.append(0.0)
        else:
            # An interrupt may have ended those above it without an event.
            while begun and begun[-1].of != event.of:
                thread.pop()
            if not begun:
                continue
            start, seconds_nested = thread.pop()
            if begun and begun[-1].of == event.of:
                # JAX and eqxjit both report a trace: one span.
                nested[-1] += seconds_nested
                continue
            seconds = event.time - start.time
            if nested:
                nested[-1] += seconds
            depth = sum([i == 0 or begun[i - 1].of != e.of for i, e in enumerate(begun)])
            thread.untraced[event.function].append(len(spans))
            shown = start.time, seconds, event.thread[1], depth, event.from_cache
            spans.append(ReportSpan(*event.of, *shown, None, seconds_nested))
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
    title = f"{scale.seconds:.3g} s from the first trace to the last program."
    if len(shown) < len(spans):
        title += f" The {len(shown):,} longest of {len(spans):,} spans."
    for phase, colour in _COLOURS.items():
        style = f"background-color:{colour};color:#111111;white-space:nowrap"
        title += f' <span style="{style}">&ensp;{phase}&ensp;</span>'
    parts = [f"<p>{title}</p>"]
    lanes: dict[str, list[list[_Bar]]] = {}
    for span in sorted(shown, key=lambda span: span.start):
        rows = lanes.setdefault(span.thread, [[_gap_bar(gap) for gap in scale.gaps]])
        rows += [[] for _ in range(len(rows), span.depth + 1)]
        rows[span.depth].append(_span_bar(span))
    for thread, rows in lanes.items():
        if len(lanes) > 1:
            parts.append(f"<div>{escape(thread)}</div>")
        parts += [_row(scale, row) for row in rows]
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
            end = max(end, span.end)
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


# A bar of the chart: its beginning and end in seconds, its colour, its text, and its tooltip.
_Bar = tuple[float, float, str, str, str]


def _row(scale: _Scale, bars: list[_Bar]) -> str:
    """Return a row of bars, each placed from the end of the one before."""
    parts: list[str] = []
    cursor = 0.0
    for start, end, colour, text, title in sorted(bars):
        left, right = max(cursor, scale.percent(start)), scale.percent(end)
        # Rounded down: a row of more than 100 % would break.
        margin = int((left - cursor) * 1000) / 1000
        width = max(0, int((right - left) * 1000) / 1000)
        cursor += margin + width
        style = f"margin-left:{margin:.3f}%;width:{width:.3f}%;{_BAR};background-color:{colour}"
        label = escape(text) if width > _NARROW else ""
        parts.append(f'<div class="bar" style="{style}" title="{escape(title)}">{label}</div>')
    return f'<div style="clear:both;height:18px;overflow:hidden">{"".join(parts)}</div>'


def _gap_bar(gap: tuple[float, float]) -> _Bar:
    title = f"{gap[1] - gap[0]:.3g} s without tracing or compiling"
    return *gap, "rgba(128,128,128,0.2)", "", title


def _span_bar(span: ReportSpan) -> _Bar:
    lines = [f"{span.function}: {span.phase}, {span.seconds:.3g} s, begun at {span.start:.3g} s"]
    if span.from_persistent_cache:
        lines.append("from JAX's persistent cache")
    if span.trace is not None:
        lines.append(f"trace {span.trace.number}: {span.reason}")
        lines.append(f"called at {span.trace.call_site}")
    return span.start, span.end, _COLOURS[span.phase], span.function, "\n".join(lines)
