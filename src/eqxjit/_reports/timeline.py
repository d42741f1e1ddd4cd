"""The timeline of a report: what was traced, lowered and compiled when, and why."""

import collections
import dataclasses
import os
import types
from collections.abc import Sequence
from typing import Any

from .._diagnostics.trace import Trace
from .._places import CallSite


@dataclasses.dataclass
class ReportSpan:
    """One phase of one function: an interval of the timeline.

    - `function`: its name; for an operation outside of any jit, JAX's name.
    - `phase`: `"tracing"`, `"lowering"` or `"compiling"`.
    - `start`, `seconds`: when it began, from the beginning of the report, and how long it took,
        with all that is nested in it.
    - `thread`: the name of the thread.
    - `from_persistent_cache`: whether JAX's persistent cache had the compiled program.
    - `trace`: the `Trace` that it was for, with the reason for it; `None` for a function that isn't
        under eqxjit's `filter_jit`.
    - `called_by`: the user's line that called a function without a `trace`.
    - `operation`: the function that this line called outside of any jit, such as
        `optax.global_norm`; empty for a jitted function.
    - `depth`: how many spans it is nested in.
    - `nested_seconds`: how much of `seconds` its nested spans took.
    """

    function: str
    phase: str
    start: float
    seconds: float
    thread: str
    from_persistent_cache: bool
    trace: Trace | None
    called_by: CallSite | None
    operation: str = ""
    depth: int = 0
    nested_seconds: float = 0.0
    # The user's functions that the operation was passed, as of `Caller`.
    _functions: tuple[tuple[types.CodeType, int], ...] = ()

    @property
    def reason(self) -> str:
        """Why the function was traced; empty if it isn't under eqxjit's `filter_jit`."""
        return "" if self.trace is None else self.trace.reason


def spans_of(events: Sequence[tuple[int, ReportSpan]]) -> list[ReportSpan]:
    """Return the spans of phases that ended, by their start, from their threads and times."""
    spans: list[ReportSpan] = []
    # For each thread, the spans around an event, outermost first. Inner phases end before outer
    # ones, so in reverse each event follows those that it is nested in.
    around: dict[int, list[ReportSpan]] = collections.defaultdict(list)
    for thread, event in reversed(events):
        outer = around[thread]
        # Its middle, because JAX's clock isn't ours.
        while outer and event.start + event.seconds / 2 <= outer[-1].start:
            outer.pop()
        span = dataclasses.replace(event, depth=len(outer))
        if outer and span.trace is not None and span.trace.is_internal:
            # A library's own function, as a part of a program: nobody knows its name.
            continue
        if outer:
            span.start = max(event.start, outer[-1].start)
            span.seconds -= span.start - event.start
            outer[-1].nested_seconds += span.seconds
        spans.append(span)
        outer.append(span)
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
