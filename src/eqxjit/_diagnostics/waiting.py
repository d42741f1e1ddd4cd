"""Warns in the log, from a thread of its own, of a function that takes long to trace or compile."""

import contextlib
import dataclasses
import sys
import threading
import time

from .._places import innermost_line
from .log import logger
from .record import TRACING, TraceRecord

#: If a phase is still running after each of these times, in seconds, a warning is logged.
BOUNDS = [10.0, 60.0, 300.0, 900.0]


@dataclasses.dataclass(eq=False)
class Phase:
    """Tracing, lowering or compiling of a function, under way right now.

    - `name`: `"tracing"`, `"lowering"` or `"compiling"`.
    - `record`: the record of the trace that the phase is for.
    - `begun`: the time when the phase began, by `time.perf_counter()`.
    - `n_warnings`: how many warnings about the phase were logged so far.
    """

    name: str
    record: TraceRecord
    begun: float = dataclasses.field(default_factory=time.perf_counter)
    n_warnings: int = 0

    def warn_if_due(self, thread: int) -> None:
        """Log a warning if the phase of this thread has passed the next bound."""
        record = self.record
        seconds = time.perf_counter() - self.begun
        if seconds < [*BOUNDS, float("inf")][self.n_warnings]:
            return
        self.n_warnings += 1
        details = ""
        if self.name == TRACING:
            line = innermost_line(sys._current_frames().get(thread))
            details = f", and runs {line} now" if line else ""
        else:
            # The program is known if JAX has lowered it before, in an earlier call.
            program = record.program
            if program is not None:
                details = f"; it has {program.equations:,} equations"
                if program.lines:
                    details += ":" + "".join([f"\n  {line}" for line in program.lines])
        logger.warning(
            "`%s`, called at %s, has been %s for %.3g s%s.",
            record.function,
            record.call_site,
            self.name,
            seconds,
            details,
        )


# The outermost phase of each thread, by the thread's number.
_under_way: dict[int, Phase] = {}
#: The thread that runs `_watch`. It ends when no phase is under way. A later phase starts a new
#: one.
watcher = threading.Thread()


def begin(phase: str, record: TraceRecord) -> None:
    """Have the watcher warn if a phase that begins now in this thread takes long."""
    global watcher
    thread = threading.get_ident()
    current = _under_way.get(thread)
    # A phase within a trace is a part of that trace.
    if current is None or current.name != TRACING:
        _under_way[thread] = Phase(phase, record)
    # The watcher ends when nothing is under way, and isn't there in a forked process.
    if not watcher.is_alive():
        watcher = threading.Thread(target=_watch, name="eqxjit", daemon=True)
        watcher.start()


def end(phase: str, record: TraceRecord | None = None) -> None:
    """Stop watching this thread's phase, if it is this phase (of this record, if one is given).

    If there was a warning that the phase takes long, log how long it took.
    """
    thread = threading.get_ident()
    current = _under_way.get(thread)
    if current is not None and current.name == phase and record in (None, current.record):
        del _under_way[thread]
        if current.n_warnings:
            seconds = time.perf_counter() - current.begun
            logger.warning("`%s`: %s took %.3g s.", current.record.function, phase, seconds)


def _watch() -> None:
    """Warn of phases that take long, until no phase is under way."""
    while _under_way:
        # Sleep rather than wait for an event: setting one would cost the tracing thread time.
        time.sleep(min(1.0, BOUNDS[0] / 4))
        for thread, phase in [*_under_way.items()]:
            # An error in one warning must not end the watch over the other threads. It may come
            # from a program of a release of JAX that we can't read, or from a log handler. It can't
            # come from a signal handler, because these run in the main thread only.
            with contextlib.suppress(Exception):
                phase.warn_if_due(thread)
