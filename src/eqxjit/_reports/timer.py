"""Interrupts the main thread now and then, and gives way to programs that use alarms."""

import functools
import math
import os
import random
import signal
import threading
import time
import types
from collections.abc import Callable
from typing import Any

# The least and the most seconds from one tick to the next. They are random, because regular ticks
# would find a loop at the same few lines if it took as long as they do. More frequent ticks would
# speed up what they measure: a thread that waits for a computation wakes up sooner if it doesn't
# sleep deeply.
_INTERVALS = 1e-3, 3e-3

# After one second, the intervals are twice as long as at first, after two seconds three times, and
# so on, but at most this many times. A long run has enough ticks, and on a virtual machine a tick
# costs up to 0.1 ms.
_LONGEST = 5.0

# The functions that show or set alarms, or wait for any signal, with the first argument for which
# they do (None for any argument). The timer stops before the program calls one of them.
_USES_OF_ALARMS: dict[str, int | None] = {}
if hasattr(signal, "setitimer"):
    _USES_OF_ALARMS = {
        **dict.fromkeys(("alarm", "pause", "sigwait", "sigwaitinfo", "sigtimedwait")),
        **dict.fromkeys(("setitimer", "getitimer"), int(signal.ITIMER_REAL)),
        **dict.fromkeys(("signal", "getsignal", "siginterrupt"), int(signal.SIGALRM)),
        # A program that replaces itself by another one leaves it the timer, but not the handler.
        **dict.fromkeys(("execv", "execve")),
    }
_functions: dict[str, tuple[Any, Any]] = {
    name: (module, getattr(module, name))
    for name in _USES_OF_ALARMS
    for module in (signal, os)
    if hasattr(module, name)
}
_original = {name: function for name, (_, function) in _functions.items()}


class Timer:
    """Calls `tick(frame, seconds)` every few milliseconds in the main thread.

    `frame` is the frame that was interrupted, and `seconds` the time for which the tick stands.
    Python interrupts only between two bytecodes, so a call into C is over when `tick` is called. If
    several ticks were due during the call, `tick` is called once, with the sum of their seconds.

    A sampling thread instead would run only when the main thread releases Python's lock, which
    favors some lines. In Python 3.11 it may also find a frame that is being freed.

    - `is_on`: whether the timer runs now.
    - `has_run`: whether it has run. It can't in a thread other than the main thread, and on systems
        without interval timers.
    - `has_yielded`: whether it was stopped because the program uses alarms itself.
    """

    def __init__(self, tick: Callable[[types.FrameType, float], None]) -> None:
        self._tick = tick
        # Not the functions of `random`, which would draw from the program's random numbers.
        self._random = random.Random()
        self.is_on = self.has_run = self.has_yielded = False
        # When the timer began, and when the next tick is due.
        self._begun = self._due = 0.0
        # The alarm that the program had set before the trial: its handler, when it is due, and
        # its interval.
        self._handler: Any = signal.SIG_DFL
        self._alarm = math.inf
        self._repeat = 0.0

    def start(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if not (is_main and _USES_OF_ALARMS):
            return
        handler = _original["getsignal"](signal.SIGALRM)
        if isinstance(getattr(handler, "__self__", None), Timer):
            # A trial within another trial.
            return
        self.is_on = self.has_run = True
        for name in _functions:
            self._yield_before(name)
        self._handler = _original["signal"](signal.SIGALRM, self._on_alarm)
        # Python retries its own system calls after an alarm. With this flag, the system retries
        # most of those that C libraries make, which would otherwise fail.
        _original["siginterrupt"](signal.SIGALRM, False)
        self._begun = self._due = time.perf_counter()
        left, self._repeat = self._set()
        if left:
            self._alarm = time.perf_counter() + left

    def stop(self) -> None:
        """Give the program back its alarms as they were before the trial.

        Only the main thread may set a handler. In any other thread, nothing but the ticks ends, and
        the main thread does the rest when the trial ends.
        """
        if self.is_on:
            self.is_on = False
            _original["setitimer"](signal.ITIMER_REAL, 0)
            for name, (module, function) in _functions.items():
                setattr(module, name, function)
        is_main = threading.current_thread() is threading.main_thread()
        # If the program has set a handler of its own meanwhile, keep that handler. The timer hasn't
        # noticed it if the program imported `signal.signal` by name before the trial.
        if is_main and self.has_run and _original["getsignal"](signal.SIGALRM) == self._on_alarm:
            # It is None if code in C had set it before Python began.
            _original["signal"](signal.SIGALRM, self._handler or signal.SIG_DFL)
            if self._alarm < math.inf:
                left = max(1e-6, self._alarm - time.perf_counter())
                _original["setitimer"](signal.ITIMER_REAL, left, self._repeat)

    def _yield_before(self, name: str) -> None:
        """Have a function stop the timer before it does something with alarms."""
        module, called = _functions[name]
        first = _USES_OF_ALARMS[name]

        @functools.wraps(called)
        def stopping(*args: Any, **kwargs: Any) -> Any:
            if first is None or first in (*args[:1], kwargs.get("signalnum")):
                self._yield()
            return called(*args, **kwargs)

        setattr(module, name, stopping)

    def _yield(self) -> None:
        self.has_yielded |= self.is_on
        self.stop()

    def _on_alarm(self, _: int, frame: Any) -> None:
        if not self.is_on:
            # This tick was already due when the timer was stopped. The program hasn't asked for it.
            return
        now = time.perf_counter()
        if now >= self._alarm:
            # The alarm that the program had set before the trial is due.
            self._yield()
            return
        seconds = 0.0
        while self._due <= now:
            longer = min(_LONGEST, 1.0 + now - self._begun)
            interval = longer * self._random.uniform(*_INTERVALS)
            self._due += interval
            seconds += interval
        try:
            self._tick(frame, seconds)
        finally:
            # Another thread may have stopped the timer meanwhile, to set an alarm of its own.
            if self.is_on:
                self._set()

    def _set(self) -> tuple[float, float]:
        """Have the system send the next tick, and return the seconds of the alarm set before."""
        left = max(1e-6, self._due - time.perf_counter())
        return _original["setitimer"](signal.ITIMER_REAL, left)
