"""The timeline of a report: what was traced, lowered and compiled when, and why."""

import collections
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._places import Caller
from .trace import Trace


class ReportSpan(NamedTuple):
    """One phase of one function: an interval of the timeline.

    - `function`: its name.
    - `phase`: `"tracing"`, `"lowering"` or `"compiling"`.
    - `start`, `seconds`: when it began, from the beginning of the report, and how long it took,
        with all that is nested in it.
    - `thread`: the name of the thread.
    - `depth`: how many spans it is nested in.
    - `from_persistent_cache`: whether JAX's persistent cache had the compiled program.
    - `trace`: the `Trace` that it was for, with the reason for it; `None` for a function that isn't
        under eqxjit's `filter_jit`.
    - `nested_seconds`: how much of `seconds` its nested spans took.
    - `called_by`: the user's function and line that called an operation outside of any jit.
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
    called_by: Caller | None = None

    @property
    def end(self) -> float:
        """When it ended, from the beginning of the report."""
        return self.start + self.seconds

    @property
    def reason(self) -> str:
        """Why it was made; empty for a function that isn't under `filter_jit`."""
        return "" if self.trace is None else self.trace.reason


def spans_of(events: Sequence[tuple[int, ReportSpan]]) -> list[ReportSpan]:
    """Return the spans of phases that ended, by their start, from their threads and times."""
    spans: list[ReportSpan] = []
    # By thread, the indices of the spans around an event, outside in. A thread's phases end inside
    # out: backwards, each comes right after those that it is nested in.
    around: dict[int, list[int]] = collections.defaultdict(list)
    for thread, span in reversed(events):
        outer, start = around[thread], span.start
        # Its middle, because JAX's clock isn't ours.
        while outer and start + span.seconds / 2 <= spans[outer[-1]].start:
            outer.pop()
        if outer:
            parent = spans[outer[-1]]
            start = max(start, parent.start)
            nested_seconds = parent.nested_seconds + span.end - start
            spans[outer[-1]] = parent._replace(nested_seconds=nested_seconds)
        spans.append(span._replace(start=start, seconds=span.end - start, depth=len(outer)))
        outer.append(len(spans) - 1)
    return sorted(spans, key=lambda span: (span.start, span.depth))


def chrome_trace(spans: Sequence[ReportSpan]) -> dict[str, Any]:
    """Return spans in the Trace Event Format, which Perfetto and `chrome://tracing` open."""
    threads = {name: i for i, name in enumerate(dict.fromkeys(span.thread for span in spans), 1)}
    pid = os.getpid()
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        for name, tid in threads.items()
    ]
    for span in spans:
        cached = span.from_persistent_cache
        args: dict[str, Any] = {"phase": span.phase, "from_persistent_cache": cached}
        if span.trace is not None:
            site = str(span.trace.call_site)
            args |= {"trace": span.trace.number, "reason": span.reason, "call_site": site}
        name = f"{span.function} ({span.phase})"
        times = {"ts": span.start * 1e6, "dur": span.seconds * 1e6}
        place = {"pid": pid, "tid": threads[span.thread]}
        events.append({"name": name, "cat": span.phase, "ph": "X", **times, **place, "args": args})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
