"""Says in the log which function is traced, lowered or compiled, where that takes long."""

import dataclasses
import sys
import threading
import time
from collections.abc import Callable

from .._places import innermost_line
from .log import logger
from .trace import TRACING, Trace

#: After how many seconds of one phase a warning comes.
BOUNDS = [10.0, 60.0, 300.0, 900.0]
# After how many rounds without a phase the watcher ends.
_MAX_IDLE = 60


@dataclasses.dataclass(eq=False)
class Phase:
    """A phase under way in a thread: of a trace of ours, or of a function of others."""

    name: str
    trace: Trace | None
    #: What to do at its end, if anything.
    at_end: Callable[[], None] | None = None
    begun: float = dataclasses.field(default_factory=time.perf_counter)
    n_warnings: int = 0

    def warn_if_due(self, thread: int) -> None:
        trace, seconds = self.trace, time.perf_counter() - self.begun
        if trace is None or seconds < [*BOUNDS, float("inf")][self.n_warnings]:
            return
        self.n_warnings += 1
        more, runs = "", innermost_line(sys._current_frames().get(thread))
        if self.name == TRACING:
            more = f", and runs {runs.site} now" if runs else ""
        elif trace.program is not None:
            # It was lowered before.
            lines = [f"\n  {line}" for line in trace.program.lines]
            more = f"; it has {trace.equations:,} equations{':' if lines else ''}{''.join(lines)}"
        logger.warning(
            "`%s`, called at %s, has been %s for %.3g s%s.",
            *(trace.function, trace.call_site, self.name, seconds, more),
        )

    def log_end(self) -> None:
        """Say how long it took, if that was long."""
        if self.trace is not None and self.n_warnings:
            seconds = time.perf_counter() - self.begun
            logger.warning("`%s`: %s took %.3g s.", self.trace.function, self.name, seconds)


#: By its number, the phases under way of each thread, outside in.
under_way: dict[int, list[Phase]] = {}
watcher = threading.Thread()


def start() -> None:
    """Watch the phases under way, in a thread that ends when there have been none for a while."""
    global watcher
    watcher = threading.Thread(target=_watch, name="eqxjit", daemon=True)
    watcher.start()


def _watch() -> None:
    n_idle = 0
    while n_idle < _MAX_IDLE:
        # Not woken, which would take the interpreter from the thread that traces.
        time.sleep(min(1.0, BOUNDS[0] / 4))
        if watcher is not threading.current_thread():
            # Two threads began at once, and each started one.
            return
        n_idle = 0 if under_way else n_idle + 1
        for thread, phases in [*under_way.items()]:
            # The others are parts of the outermost one.
            for phase in [phase for phase in phases if phase.trace is not None][:1]:
                phase.warn_if_due(thread)
