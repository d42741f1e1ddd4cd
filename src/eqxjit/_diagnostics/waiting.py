"""Says in the log which function is traced, lowered or compiled, where that takes long."""

import contextlib
import dataclasses
import sys
import threading
import time

from .._places import innermost_line
from .log import logger
from .record import TRACING, TraceRecord

#: After how many seconds of one phase a warning comes.
BOUNDS = [10.0, 60.0, 300.0, 900.0]


@dataclasses.dataclass(eq=False)
class Phase:
    """A phase of a trace that is under way."""

    name: str
    record: TraceRecord
    begun: float = dataclasses.field(default_factory=time.perf_counter)
    n_warnings: int = 0

    def warn_if_due(self, thread: int) -> None:
        record, seconds = self.record, time.perf_counter() - self.begun
        if seconds < [*BOUNDS, float("inf")][self.n_warnings]:
            return
        self.n_warnings += 1
        more, line = "", innermost_line(sys._current_frames().get(thread))
        if self.name == TRACING:
            more = f", and runs {line} now" if line else ""
        elif (program := record.program) is not None:
            # It was lowered before.
            lines = [f"\n  {line}" for line in program.lines]
            more = f"; it has {program.equations:,} equations{':' if lines else ''}{''.join(lines)}"
        logger.warning(
            "`%s`, called at %s, has been %s for %.3g s%s.",
            *(record.function, record.call_site, self.name, seconds, more),
        )


#: The outermost of each thread, by its number.
under_way: dict[int, Phase] = {}
watcher = threading.Thread()


def watch() -> None:
    """Warn of what takes long, until nothing is under way."""
    while under_way:
        # Not woken, which would take the interpreter from the thread that traces.
        time.sleep(min(1.0, BOUNDS[0] / 4))
        for thread, phase in [*under_way.items()]:
            # The thread goes on watching others if it can't read a program, as of another release
            # of JAX, or can't log. Signal handlers raise in the main thread only.
            with contextlib.suppress(Exception):
                phase.warn_if_due(thread)
