"""The state of a thread in a trial, and the log of its calls.

With the native back end, C makes and logs the calls that need nothing more. Otherwise they would
take several microseconds longer, which is a large part of a call of a small model.
"""

import math
import threading
import time
from collections import deque
from typing import Any

from .._compat import native
from .._diagnostics.trace import Trace

#: The modes of serving a call: by Equinox; by eqxjit, waiting for the results; and by eqxjit.
THEIRS, AWAITED, OURS = "theirs", "awaited", "ours"

_Base: type = object if native is None else native.Log


class Log(_Base):
    """The state of the thread that creates it and, if there is room, the log of its calls.

    The latest `max_rows` calls are kept. C keeps as many, and then leaves it to Python to make the
    next call and to read the log. Each call is logged as a list of four: the function's `Tried`,
    the mode in which it was served, and when it began and ended. All fields down to `times` are C
    fields with the native back end.

    - `clock`: a function that returns the time.
    - `offset`: by how much the logged times are behind those of `clock`. To leave out seconds that
        have passed, the trial adds them.
    - `mode`: who serves the calls of this thread now.
    - `logs_until`: the time until which calls are only logged, unless they need a closer look.
    - `latest`, `begun`: the `Tried` of the function that was called last, and when.
    - `is_inside`: whether the thread is inside an intercepted call.
    - `has_compiled`: whether JAX has compiled something since the latest call began.
    - `thread`: the thread's number.
    - `called`, `times`: the functions of the calls that C has logged since the last `read`, and a
        buffer for their times.
    - `trace`, `traced`: eqxjit's trace of the function that was called last, and when it ended;
        `None` and infinity if it wasn't traced.
    - `phases`: the ends of the latest phases of tracing, lowering and compiling, and the seconds of
        each.
    - `compiling`: the seconds of all tracing, lowering and compiling so far.
    """

    def __init__(self, max_rows: int) -> None:
        self.clock = time.perf_counter
        self.offset = 0.0
        self.mode = OURS
        self.logs_until = 0.0
        self.latest: Any = None
        self.begun = 0.0
        self.is_inside = self.has_compiled = False
        self.thread = threading.get_ident()
        self.called: list[Any] = []
        # Two floats of eight bytes for each call: when it began and ended.
        self.times = bytearray(16 * max_rows)
        self.forget_trace()
        self.phases: deque[tuple[float, float]] = deque(maxlen=1_000)
        self.compiling = 0.0
        self._rows: deque[list[Any]] = deque(maxlen=max_rows)

    def forget_trace(self) -> None:
        self.trace: Trace | None = None
        self.traced = math.inf

    def add(self, mode: str, ended: float) -> None:
        """Add the latest call, which was served in a mode and ended at a time."""
        self.read().append([self.latest, mode, self.begun, ended])

    def read(self) -> deque[list[Any]]:
        """Count the calls that C has logged since the last time, and return the latest calls."""
        if self.called:
            times = memoryview(self.times[: 16 * len(self.called)]).cast("d").tolist()
            called, self.called = self.called, []
            for function, begun, ended in zip(called, times[::2], times[1::2], strict=False):
                function.calls += 1
                function.n_ours += 1
                self._rows.append([function, OURS, begun, ended])
        return self._rows
