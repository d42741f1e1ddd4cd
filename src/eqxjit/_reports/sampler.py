"""Where a thread's time goes, by the user's line: samples of all stacks, one each millisecond."""

import ast
import builtins
import contextlib
import functools
import inspect
import itertools
import linecache
import math
import signal
import sys
import threading
import time
import types
from collections import Counter, defaultdict, deque
from typing import Any

import jax

from .._places import OUR_FILES, CallSite, is_jaxs, is_users

KINDS = CALLS, COMPILING, OPERATIONS, WAITING, MOVING, PYTHON = (
    *("jitted calls", "tracing and compiling", "operations outside jit", "waiting"),
    *("moving data", "Python"),
)

# What a user calls of JAX, by its name on the stack; everything else there is an operation.
_NAMES = {
    **dict.fromkeys(("asarray", "array", "device_put", "from_dlpack"), MOVING),
    **dict.fromkeys(
        ("block_until_ready", "device_get", "effects_barrier", "item", "_item"), WAITING
    ),
    **dict.fromkeys(("tolist", "_value", "__array__", "__bool__", "__complex__"), WAITING),
    **dict.fromkeys(("__float__", "__format__", "__index__", "__int__", "__repr__"), WAITING),
    "__str__": WAITING,
}
_PjitFunction = type(jax.jit(abs))
_INTERVAL = 1e-3

# A timer interrupts the main thread, which then samples itself: after what it runs in C, and where
# looking at frames is safe. (In Python 3.11 another thread may find a frame that is being freed.)
# Other threads are looked at in one of so many samples.
_ONE_IN = 50

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

#: A kind of work, and the user's line that does it.
Place = tuple[str, CallSite]


class Clock:
    """Splits the time of the main thread: what the trial measures or causes, and the rest.

    The time between `hold` and `release` is held: samples don't count for it.

    - `is_calling`: whether it is held for a jitted call that eqxjit serves.
    """

    def __init__(self) -> None:
        self.is_calling = False
        self._held = 0.0
        self._since: float | None = None
        self._resting: float | None = None

    # No lock, which would take as long as these do: where two threads meet, one sample is off.

    @property
    def is_held(self) -> bool:
        return self._since is not None

    def hold(self, now: float) -> None:
        if self._since is not None:
            self._held += now - self._since
            self._resting = None
        self._since = now

    def rest(self, until: float) -> None:
        """Hold on until the next call, or until then."""
        self._resting = until

    def release(self, now: float) -> None:
        since, self._since = self._since, None
        if since is not None:
            self._held += max(0.0, now - since)

    def free(self, now: float) -> float:
        """Return a time that stands still while the clock is held."""
        resting = self._resting
        if resting is not None and now > resting:
            self._resting = None
            self.release(resting)
        since = self._since
        return now - self._held - (0.0 if since is None else now - since)


class Sampler(threading.Thread):
    """Samples all threads from `start` to `stop`, the main one by its clock.

    It is a thread only where the main thread can't be interrupted by a timer.

    - `is_ended`: whether the program uses alarms itself, so that lines aren't sampled from then on.
    - `seconds`: of each place of the main thread.
    - `calls`: the samples of each line of the main thread that was in a jitted call.
    - `others`: the samples of each other thread, by its name and by place.
    """

    def __init__(self, ident: int, clock: Clock, entrance: types.CodeType):
        super().__init__(name="eqxjit trial", daemon=True)
        self.seconds: defaultdict[Place, float] = defaultdict(float)
        self.calls: Counter[CallSite] = Counter()
        self.others: defaultdict[str, Counter[Place]] = defaultdict(Counter)
        self._main, self._clock, self._entrance = ident, clock, entrance
        self._stopped = threading.Event()
        self._last = 0.0
        self._has_timer = self.is_ended = False
        # An alarm that was set before the trial: who handles it, when it comes, and how often.
        self._handler: Any = signal.SIG_DFL
        self._alarm, self._repeat = math.inf, 0.0
        self._n = 0
        # The latest samples: when, which place, and its seconds.
        self._recent: deque[tuple[float, Place, float]] = deque(maxlen=10_000)

    def restart(self) -> None:
        """Forget all samples of the main thread."""
        self._recent.clear()
        self.seconds.clear()
        self.calls.clear()

    def drop(self, line: CallSite, seconds: float) -> None:
        """Forget seconds of compiling for a line."""
        self.seconds[COMPILING, line] -= seconds

    def compiled(self, since: float, line: CallSite | None) -> float:
        """Note that the main thread has compiled since then; return the seconds that moves."""
        moved = 0.0
        for i in range(len(self._recent) - 1, -1, -1):
            when, place, seconds = self._recent[i]
            if when < since:
                break
            if place[0] != COMPILING:
                new = COMPILING, line or place[1]
                self.seconds[place] -= seconds
                self.seconds[new] += seconds
                self._recent[i] = when, new, seconds
                moved += seconds
        return moved

    def run(self) -> None:
        while not self._stopped.wait(_INTERVAL):
            frame = sys._current_frames().get(self._main)
            if frame is not None:
                self._sample(0, frame)
            del frame

    def _sample_others(self) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident not in (self._main, self.ident):
                self.others[names.get(ident, str(ident))][place_of(frame)] += 1
            del frame

    def start(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        can_interrupt = is_main and hasattr(signal, "setitimer")
        self._last = self._clock.free(time.perf_counter())
        if not can_interrupt:
            super().start()
        else:
            self._has_timer = True
            for name, first in _USES_OF_ALARMS.items():
                self._hide_in(name, first)
            self._handler = _signal["signal"](signal.SIGALRM, self._sample)
            # What waits in the operating system goes on waiting.
            _signal["siginterrupt"](signal.SIGALRM, False)
            left, self._repeat = _signal["setitimer"](signal.ITIMER_REAL, _INTERVAL, _INTERVAL)
            self._alarm = time.perf_counter() + left if left else math.inf

    def stop(self) -> None:
        self._stopped.set()
        if self._has_timer:
            self._give_alarm_back()
        elif self.is_alive():
            self.join()

    def _hide_in(self, name: str, first: int | None) -> None:
        """Have a function of `signal` end the sampling before it does what concerns alarms."""
        called = _signal[name]

        @functools.wraps(called)
        def ending(*args: Any, **kwargs: Any) -> Any:
            if first is None or first in (*args[:1], kwargs.get("signalnum")):
                self.is_ended = True
                self._give_alarm_back()
            return called(*args, **kwargs)

        setattr(signal, name, ending)

    def _give_alarm_back(self) -> None:
        if self._has_timer:
            self._has_timer = False
            # Not if the program has set its own by a name that it imported before the trial.
            if _signal["getsignal"](signal.SIGALRM) == self._sample:
                _signal["setitimer"](signal.ITIMER_REAL, 0)
                # Another thread may not, and needs not, because it can't set a handler either.
                with contextlib.suppress(ValueError):
                    _signal["signal"](signal.SIGALRM, self._handler)
                if self._alarm < math.inf:
                    left = max(1e-6, self._alarm - time.perf_counter())
                    _signal["setitimer"](signal.ITIMER_REAL, left, self._repeat)
            for name in _USES_OF_ALARMS:
                setattr(signal, name, _signal[name])

    def _sample(self, _: int, frame: types.FrameType | None) -> None:
        """Add the time since the last sample to what the main thread is doing."""
        clock, now = self._clock, time.perf_counter()
        if now >= self._alarm:
            self.is_ended = True
            self._give_alarm_back()
        free = clock.free(now)
        self._n += 1
        if self._n % _ONE_IN == 0:
            self._sample_others()
        if clock.is_held:
            if clock.is_calling and (line := self._calling(frame)) is not None:
                self.calls[line] += 1
            return
        clock.hold(now)
        if frame is not None:
            place = place_of(frame)
            seconds = free - self._last
            if seconds > 1.5 * _INTERVAL:
                # What runs in C has delayed it. What follows the last tick belongs to the next one,
                # as what precedes the first belongs to this one.
                seconds -= seconds % _INTERVAL
            self.seconds[place] += seconds
            self._recent.append((now, place, seconds))
            self._last += seconds
        clock.release(time.perf_counter())

    def _calling(self, frame: types.FrameType | None) -> CallSite | None:
        """Return the line that called a jitted function; None outside of such a call."""
        while frame is not None and frame.f_code is not self._entrance:
            frame = frame.f_back
        return frame and _user_frame(frame)[0]


def _user_frame(frame: types.FrameType | None) -> tuple[CallSite, types.CodeType | None]:
    """Return the innermost line of the user's, and JAX's function that it called, if any."""
    of_jax = None
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            return CallSite(code.co_filename, frame.f_lineno or 0, code.co_qualname), of_jax
        if is_jaxs(code.co_filename):
            of_jax = code
        frame = frame.f_back
    return CallSite("<unknown>", 0), of_jax


def place_of(frame: types.FrameType) -> Place:
    """Return what a thread is doing, by its innermost frame, and for which line of the user's."""
    line, of_jax = _user_frame(frame)
    if of_jax is not None:
        return _NAMES.get(of_jax.co_name, OPERATIONS), line
    if frame.f_code.co_filename.startswith(OUR_FILES):
        # On the way into a jitted call, or out of it.
        return CALLS, line
    return _kind_of_call(frame), line


# --- Calls without a frame ------------------------------------------------------------------------
# `jnp.sin(x)`, `np.asarray(x)` and `x.block_until_ready()` run in C. What a frame calls is read
# from its source, by the place of its current instruction.


def _kind_of_call(frame: types.FrameType) -> str:
    call = _call_at(frame.f_code, frame.f_lasti)
    if call is None:
        return PYTHON
    if isinstance(call.func, ast.Attribute) and call.func.attr == "block_until_ready":
        return WAITING
    callee = _value_of(call.func, frame)
    module = str(getattr(callee, "__module__", None) or "").partition(".")[0]
    if isinstance(callee, _PjitFunction):
        return OPERATIONS if module in ("jax", "jaxlib") else CALLS
    name = getattr(callee, "__name__", "")
    if module == "numpy" and call.args and name in ("array", "asarray"):
        # What can't be told, as the result of another call, is JAX's more often than not.
        given = _value_of(call.args[0], frame)
        return WAITING if isinstance(given, (jax.Array, ast.AST)) else PYTHON
    return _NAMES.get(name, OPERATIONS) if module in ("jax", "jaxlib") else PYTHON


@functools.lru_cache(maxsize=4096)
def _call_at(code: types.CodeType, offset: int) -> ast.Call | None:
    """Return the call that an instruction makes; None if it makes none, or has no source."""
    place = next(itertools.islice(code.co_positions(), offset // 2, None), (None,) * 4)
    first, last, start, stop = place
    if None in place:
        return None
    lines = linecache.getlines(code.co_filename)[first - 1 : last]  # type: ignore[operator]
    if not lines:
        return None
    # Columns count bytes.
    lines = [line.encode() for line in lines]
    lines[-1] = lines[-1][:stop]
    lines[0] = lines[0][start:]
    try:
        found = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return found if isinstance(found, ast.Call) else None


def _value_of(node: ast.expr, frame: types.FrameType) -> Any:
    """Return the value of a name or an attribute, running no code; the node for anything else."""
    if isinstance(node, ast.Name):
        code, name = frame.f_code, node.id
        if name in {*code.co_varnames, *code.co_cellvars, *code.co_freevars}:
            return _local(frame, name)
        return frame.f_globals.get(name, getattr(builtins, name, None))
    if isinstance(node, ast.Attribute):
        owner = _value_of(node.value, frame)
        if isinstance(owner, types.ModuleType):
            return vars(owner).get(node.attr)
        return (
            node if isinstance(owner, ast.AST) else inspect.getattr_static(owner, node.attr, None)
        )
    return None if isinstance(node, (ast.Constant, ast.List, ast.ListComp, ast.Tuple)) else node


def _local(frame: types.FrameType, name: str) -> Any:
    is_copy = sys.version_info < (3, 13) and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if is_copy and (frame.f_trace is not None or "locals" in frame.f_code.co_names):
        # A debugger, or the function itself, uses the same copy.
        return None
    found = frame.f_locals.get(name)
    if is_copy:
        # The frame would keep it, with arrays that the function drops.
        frame.f_locals.clear()
    return found
