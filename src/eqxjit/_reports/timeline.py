"""The timeline of a report: when each function was traced, lowered and compiled, and why."""

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

    - `function`: the function's name; for an operation outside of any jit, JAX's name for it.
    - `phase`: `"tracing"`, `"lowering"` or `"compiling"`.
    - `start`: when the phase began, in seconds since the beginning of the report.
    - `seconds`: how long the phase took, including the spans nested in it.
    - `thread`: the name of the thread.
    - `from_persistent_cache`: whether JAX's persistent cache had the compiled program.
    - `trace`: the `Trace` that the phase belongs to; `None` for a function that isn't under
        eqxjit's `filter_jit`.
    - `called_by`: the user's line that called a function without a `trace`.
    - `operation`: the function that this line called outside of any jit, such as
        `optax.global_norm`; empty for a jitted function.
    - `depth`: how many spans the phase is nested in.
    - `nested_seconds`: how many of `seconds` were spent in the spans nested in the phase.
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
    # The user's functions that were passed to the operation, as in `Caller.functions`.
    _functions: tuple[tuple[types.CodeType, int], ...] = ()

    @property
    def reason(self) -> str:
        """Why the function was traced; empty if it isn't under eqxjit's `filter_jit`."""
        return "" if self.trace is None else self.trace.reason


def spans_of(events: Sequence[tuple[int, ReportSpan]]) -> list[ReportSpan]:
    """Return spans in the order of their starts, with `depth` and `nested_seconds` filled in.

    `events` are pairs of a thread's number and a span, in the order in which the phases ended.
    """
    spans: list[ReportSpan] = []
    # For each thread, the spans around an event, outermost first. Inner phases end before outer
    # phases, so in reverse each event follows the events that it is nested in.
    around: dict[int, list[ReportSpan]] = collections.defaultdict(list)
    for thread, event in reversed(events):
        outer = around[thread]
        # Compare the event's middle, because JAX measures with another clock than we do, and so the
        # start may lie a little before the start of the outer span.
        while outer and event.start + event.seconds / 2 <= outer[-1].start:
            outer.pop()
        span = dataclasses.replace(event, depth=len(outer))
        if outer and span.trace is not None and span.trace.is_internal:
            # This is a library's private function within a program. Users don't know its name.
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
    names = dict.fromkeys([span.thread for span in spans])
    thread_numbers = {name: number for number, name in enumerate(names, 1)}
    pid = os.getpid()
    events: list[dict[str, Any]] = []
    for name, number in thread_numbers.items():
        # An event of type "M" holds metadata: here the name of a thread.
        events.append(
            {"name": "thread_name", "ph": "M", "pid": pid, "tid": number, "args": {"name": name}}
        )
    for span in spans:
        args: dict[str, Any] = {
            "phase": span.phase,
            "from_persistent_cache": span.from_persistent_cache,
        }
        if span.trace is not None:
            args["trace"] = span.trace.number
            args["reason"] = span.reason
            args["call_site"] = str(span.trace.call_site)
        # An event of type "X" is an interval, in microseconds.
        events.append(
            {
                "name": f"{span.function} ({span.phase})",
                "cat": span.phase,
                "ph": "X",
                "ts": span.start * 1e6,
                "dur": span.seconds * 1e6,
                "pid": pid,
                "tid": thread_numbers[span.thread],
                "args": args,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
