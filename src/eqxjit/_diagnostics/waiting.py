"""Says in the log which function is traced, lowered or compiled, where that takes long."""

import dataclasses
import sys
import threading
import time

from .._places import innermost_line
from .log import logger
from .trace import TRACING, Trace

#: After how many seconds of one phase a warning comes; the last ones come again and again.
BOUNDS = [10.0, 60.0, 300.0, 900.0]


@dataclasses.dataclass(eq=False)
class _Phase:
    trace: Trace
    name: str
    thread: int
    begun: float
    n_warnings: int = 0

    def warn_if_due(self) -> None:
        seconds = time.perf_counter() - self.begun
        last = len(BOUNDS) - 1
        due = BOUNDS[min(self.n_warnings, last)] + max(0, self.n_warnings - last) * BOUNDS[last]
        if seconds < due:
            return
        self.n_warnings += 1
        runs = innermost_line(sys._current_frames().get(self.thread))
        where = f", and runs {runs.site} now" if self.name == TRACING and runs else ""
        logger.warning(
            "`%s`, called at %s, has been %s for %.3g s%s.",
            *(self.trace.function, self.trace.call_site, self.name, seconds, where),
        )


# The outermost phase under way of each thread.
_phases: dict[int, _Phase] = {}
_watcher: threading.Thread | None = None
# After how many rounds without a phase the watcher ends.
_MAX_IDLE = 60


def begin(trace: Trace, phase: str) -> None:
    """Watch a phase of a trace in this thread, unless it is within another one."""
    thread = threading.get_ident()
    if thread in _phases:
        return
    _phases[thread] = _Phase(trace, phase, thread, time.perf_counter())
    # Not woken, which would take the interpreter from this thread. A fork leaves its child none.
    if _watcher is None or not _watcher.is_alive():
        _start()


def end(trace: Trace, phase: str) -> None:
    """Watch a phase no longer; say how long it took, if that was long."""
    watched = _phases.get(threading.get_ident())
    if watched is None or (watched.trace, watched.name) != (trace, phase):
        return
    del _phases[watched.thread]
    if watched.n_warnings:
        seconds = time.perf_counter() - watched.begun
        logger.warning("`%s`: %s took %.3g s.", trace.function, phase, seconds)


def forget(trace: Trace) -> None:
    """Watch no phase of a trace any longer: the call that needed it is over, or raised."""
    watched = _phases.get(threading.get_ident())
    if watched is not None and watched.trace is trace:
        del _phases[watched.thread]


def _start() -> None:
    global _watcher
    _watcher = threading.Thread(target=_watch, name="eqxjit", daemon=True)
    _watcher.start()


def _watch() -> None:
    global _watcher
    n_idle = 0
    while n_idle < _MAX_IDLE:
        time.sleep(min(1.0, BOUNDS[0] / 4))
        if _watcher is not threading.current_thread():
            # Two threads began at once, and each started one.
            return
        for phase in [*_phases.values()]:
            phase.warn_if_due()
        n_idle = 0 if _phases else n_idle + 1
    _watcher = None
    # One may have begun in between.
    if _phases:
        _start()
