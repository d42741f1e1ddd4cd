"""Interrupts the main thread each millisecond, and leaves alone programs that use alarms."""

import contextlib
import functools
import math
import signal
import threading
import time
import types
from collections.abc import Callable
from typing import Any

#: The seconds from one tick to the next.
INTERVAL = 1e-3

# What shows or changes alarms, or waits for any signal, with the first argument that makes it so
# (None for any). A program that uses these gets them as they are without a trial.
_USES_OF_ALARMS: dict[str, int | None] = {}
if hasattr(signal, "setitimer"):
    _USES_OF_ALARMS = {
        **dict.fromkeys(("alarm", "pause")),
        **dict.fromkeys(("setitimer", "getitimer"), int(signal.ITIMER_REAL)),
        **dict.fromkeys(("signal", "getsignal", "siginterrupt"), int(signal.SIGALRM)),
    }
_signal: dict[str, Any] = {name: getattr(signal, name) for name in _USES_OF_ALARMS}


class Timer:
    """Calls `tick(frame)` each millisecond from `start` to `stop`, in the main thread.

    `frame` is the frame that was interrupted. Python interrupts only between two bytecodes, so a
    call into C is over when `tick` is called. A thread that looks at the main thread's stack
    instead would come when the main thread lets other threads run, which favors some lines, and in
    Python 3.11 it may find a frame that is being freed.

    - `is_on`: whether the timer runs now.
    - `has_run`: whether it has run. It can't in a thread other than the main thread, and on systems
        without interval timers.
    - `has_yielded`: whether it was stopped because the program uses alarms itself.
    """

    def __init__(self, tick: Callable[[types.FrameType | None], None]) -> None:
        self._tick = tick
        self.is_on = self.has_run = self.has_yielded = False
        # The alarm that the program has set before: its handler, when it comes, and how often.
        self._handler: Any = signal.SIG_DFL
        self._alarm = math.inf
        self._repeat = 0.0

    def start(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if not (is_main and _USES_OF_ALARMS):
            return
        self.is_on = self.has_run = True
        for name, first in _USES_OF_ALARMS.items():
            self._hide_in(name, first)
        self._handler = _signal["signal"](signal.SIGALRM, self._on_alarm)
        # A system call that is waiting when the alarm comes goes on waiting.
        _signal["siginterrupt"](signal.SIGALRM, False)
        left, self._repeat = _signal["setitimer"](signal.ITIMER_REAL, INTERVAL, INTERVAL)
        if left:
            self._alarm = time.perf_counter() + left

    def stop(self) -> None:
        """Give the program back its alarms as they were; nothing if the timer isn't on."""
        if not self.is_on:
            return
        self.is_on = False
        # The program may have set its own handler by a name that it imported before the trial.
        if _signal["getsignal"](signal.SIGALRM) == self._on_alarm:
            _signal["setitimer"](signal.ITIMER_REAL, 0)
            # Only the main thread may set a handler, so another thread's call fails here and in
            # the program.
            with contextlib.suppress(ValueError):
                _signal["signal"](signal.SIGALRM, self._handler)
            if self._alarm < math.inf:
                left = max(1e-6, self._alarm - time.perf_counter())
                _signal["setitimer"](signal.ITIMER_REAL, left, self._repeat)
        for name, function in _signal.items():
            setattr(signal, name, function)

    def _hide_in(self, name: str, first: int | None) -> None:
        """Have a function of `signal` stop the timer before it does something with alarms."""
        called = _signal[name]

        @functools.wraps(called)
        def stopping(*args: Any, **kwargs: Any) -> Any:
            if first is None or first in (*args[:1], kwargs.get("signalnum")):
                self._yield()
            return called(*args, **kwargs)

        setattr(signal, name, stopping)

    def _yield(self) -> None:
        self.has_yielded |= self.is_on
        self.stop()

    def _on_alarm(self, _: int, frame: types.FrameType | None) -> None:
        if time.perf_counter() >= self._alarm:
            # The alarm that the program has set before the trial is due.
            self._yield()
        else:
            self._tick(frame)
