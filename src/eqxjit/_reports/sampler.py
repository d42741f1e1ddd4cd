"""Samples the main thread's stack, to tell how long each line spends on each kind of work."""

import ast
import builtins
import functools
import gc
import inspect
import itertools
import re
import sys
import threading
import time
import types
from collections import Counter, defaultdict
from dis import opmap
from linecache import getlines
from typing import Any

import jax

from .._core.wrapper import JitFunction
from .._places import OUR_FILES, CallSite, is_jaxs, is_users
from .._signals import suppressed
from .log import Log
from .timer import Timer

CALLS = "jitted calls"
COMPILING = "tracing and compiling"
OPERATIONS = "operations outside jit"
WAITING = "waiting"
MOVING = "moving data"
PYTHON = "Python"

#: The kinds of work.
KINDS = CALLS, COMPILING, OPERATIONS, WAITING, MOVING, PYTHON

# The functions and methods of JAX that wait or move data. All others are operations.
_KIND_OF_NAME = {
    **dict.fromkeys(("asarray", "array", "device_put", "from_dlpack"), MOVING),
    **dict.fromkeys(("block_until_ready", "device_get", "effects_barrier"), WAITING),
    **dict.fromkeys(("item", "_item", "tolist", "_value", "__array__", "__bool__"), WAITING),
    **dict.fromkeys(("__complex__", "__float__", "__format__", "__index__", "__int__"), WAITING),
    **dict.fromkeys(("__repr__", "__str__"), WAITING),
}
# The methods by which any code reads an array of JAX.
_READS = "_value", "__array__"

_PjitFunction = type(jax.jit(abs))

# Other threads are sampled in one of this many ticks.
_ONE_IN = 20

# A program that waits more than this many seconds after a call doesn't wait for its results.
_RECENT = 0.5

# A call that takes this many seconds longer than a fast one may have waited for a computation.
_LONG_CALL = 2e-4

#: Stands for the user's line where no line of the user's is on the stack.
NO_LINE = CallSite("<unknown>", 0)

#: A kind of work, and the user's line that does it.
Place = tuple[str, CallSite]


class Sampler:
    """Samples the main thread from `start` to `stop`, by a clock that the trial can stop.

    - `log`: the log of the main thread's calls.
    - `places`: the seconds spent in each place, by `function_of`, since `Spans` has taken them.
    - `waited_in_calls`: the seconds for which jitted calls waited for computations, a part of those
        of `WAITING`.
    - `others`: how often each other thread was found in each place, by the thread's name.
    - `timer`: the timer that interrupts the main thread.
    """

    def __init__(self, log: Log, entrance: types.CodeType):
        """`entrance` is the code through which all jitted calls go, except those that C logs."""
        self.log = log
        self.places: defaultdict[tuple[Place, Any], float] = defaultdict(float)
        self.waited_in_calls = 0.0
        self.others: defaultdict[str, Counter[Place]] = defaultdict(Counter)
        self.timer = Timer(self._tick)
        self._entrance = entrance
        # When the clock was stopped; None while it runs. It stands at zero until the start.
        self._stopped: float | None = 0.0
        self._n_ticks = 0
        # What was found since `begun`.
        self._since = 0.0, defaultdict[tuple[Place, Any], float](float)
        # The clocks at the end of the latest tick.
        self._seen = 0.0, 0.0, 0.0

    def start(self) -> None:
        self._seen = _clocks()
        self.release(self._seen[0])
        self.timer.start()

    def stop(self) -> None:
        self.hold(time.perf_counter())
        self.timer.stop()

    # --- The clock ----------------------------------------------------------------------------

    def hold(self, now: float) -> None:
        """Stop the clock, because the trial works for itself in the main thread from now on."""
        if self._stopped is None and threading.get_ident() == self.log.thread:
            self._stopped = now

    def release(self, now: float) -> None:
        """Let the clock run again, if the main thread has stopped it and goes on."""
        if self._stopped is not None and threading.get_ident() == self.log.thread:
            self.log.offset += now - self._stopped
            self._stopped = None

    def clock(self) -> float:
        """Return the seconds since the start, without those for which the clock was held."""
        now = time.perf_counter() if self._stopped is None else self._stopped
        return now - self.log.offset

    # --- Samples ------------------------------------------------------------------------------

    def place_of(
        self, innermost: types.FrameType | None, is_in_call: bool = False, is_main: bool = True
    ) -> Place:
        """Return what a thread is doing, and for which line of the user's.

        `is_in_call` tells whether it is inside a jitted call. If C has made the call, it has no
        frame of ours. The variables of a thread that runs on meanwhile, other than the main thread,
        aren't read.
        """
        line = of_jax = kind = None
        if innermost is not None and _is_users_beginning(innermost):
            # Python checks for signals when a function begins, but not after `a @ b` or `x = y`.
            # The time is more often that of the work before the call.
            innermost = innermost.f_back
        frame = innermost
        of_collector = [getattr(each, "__code__", None) for each in gc.callbacks]
        while frame is not None:
            code = frame.f_code
            if code in of_collector:
                # Python's garbage collector has called it, JAX's function for example. It may run
                # whenever an object is created, so what the program was doing counts.
                innermost, line, of_jax, kind = frame.f_back, None, None, None
            elif code is self._entrance:
                # All frames further inside belong to the jitted call. The user's line is outside.
                # If a line of the user's is further inside, it is traced.
                is_waiting = line is None and _KIND_OF_NAME.get(of_jax or "") is WAITING
                kind, line = WAITING if is_waiting else CALLS, None
            elif line is None and code.co_filename.startswith("<frozen importlib"):
                # A module does whatever it likes while it is imported, with operations of JAX, too.
                kind = PYTHON
            elif line is None and is_users(code.co_filename) and _has_source(code.co_filename):
                # Without the function, because a comprehension is a function of its own.
                line = CallSite(code.co_filename, _line_number(frame))
            elif line is None and is_jaxs(code.co_filename):
                # The last assignment counts: the outermost JAX function inside the user's line,
                # which is the function that the line has called. But whatever reads an array waits
                # for it, such as `jax.tree.map(float, results)`.
                of_jax = of_jax if of_jax in _READS else code.co_name
            frame = frame.f_back
        line = line or NO_LINE
        if kind is None and of_jax is not None:
            kind = _KIND_OF_NAME.get(of_jax, OPERATIONS)
        if is_in_call and kind is not WAITING:
            kind = CALLS
        if kind is not None:
            return kind, line
        if innermost is None or innermost.f_code.co_filename.startswith(OUR_FILES):
            return PYTHON, line
        return _kind_of_call(innermost, is_main), line

    def function_of(self, kind: str) -> Any:
        """Return the `Tried` of the function that work of a kind belongs to; None for no function.

        Only calls and waiting take more or less time if Equinox serves the calls. A program that
        waits long after its last call waits for something else.
        """
        if kind is CALLS or (kind is WAITING and self.clock() - self.log.begun < _RECENT):
            return self.log.latest
        return None

    def add(self, place: Place, function: Any, seconds: float) -> None:
        """Add some seconds to a place, unless sampling has ended."""
        if self.timer.is_on:
            self.places[place, function] += seconds

    def forget_call(self) -> None:
        """Forget what was found since the call under way has begun."""
        begun, found = self._since
        if begun == self.log.begun:
            # A tick may come during the loop, and add another key.
            for key, seconds in [*found.items()]:
                self.places[key] -= seconds
            found.clear()

    def _tick(self, frame: types.FrameType, seconds: float) -> None:
        if self._stopped is not None:
            return
        self.hold(time.perf_counter())
        place = PYTHON, NO_LINE
        try:
            # The program's stack may be too deep for another call, and a class of the user's may
            # raise an error if it is asked for an attribute.
            with suppressed:
                place = self.place_of(frame, self.log.is_inside)
                if place[0] is CALLS and self._has_waited(frame):
                    place = WAITING, place[1]
                    self.waited_in_calls += seconds
                self._n_ticks += 1
                if self._n_ticks % _ONE_IN == 0:
                    self._sample_others()
        finally:
            key = place, self.function_of(place[0])
            self.places[key] += seconds
            if self._since[0] != self.log.begun:
                self._since = self.log.begun, defaultdict(float)
            self._since[1][key] += seconds
            self._seen = _clocks()
            self.release(self._seen[0])

    def _has_waited(self, frame: types.FrameType) -> bool:
        """Return whether a jitted call that was interrupted has waited for a computation.

        On a CPU a call waits if too many computations are under way. It also waits, in effect, if
        the system gives this thread's core to the computation that the call has started. While it
        waits, other threads of the process run instead of this one.
        """
        if self.log.latest is None or is_jaxs(frame.f_code.co_filename):
            # Below a warm call there is no frame of JAX's. Otherwise, JAX compiles.
            return False
        call = self.clock() - self.log.begun
        if call < self.log.latest.least + _LONG_CALL:
            return False
        seconds, mine, everyones = (
            now - seen for now, seen in zip(_clocks(), self._seen, strict=True)
        )
        return min(seconds - mine, everyones - mine) > call / 2

    def _sample_others(self) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        # A variable of this frame that refers to the frame itself would keep alive all that is on
        # the stack.
        del frames[self.log.thread]
        for ident, frame in frames.items():
            place = self.place_of(frame, is_main=False)
            self.others[names.get(ident, str(ident))][place] += 1


def _clocks() -> tuple[float, float, float]:
    """Return the time, and the seconds for which this thread and all threads have been running."""
    return time.perf_counter(), time.thread_time(), time.process_time()


def _is_users_beginning(frame: types.FrameType) -> bool:
    code = frame.f_code
    is_beginning = frame.f_lasti >= 0 and code.co_code[frame.f_lasti] == opmap["RESUME"]
    return is_beginning and is_users(code.co_filename)


def _has_source(filename: str) -> bool:
    # Libraries generate code, too, whose file is "<string>", for example.
    return not filename.startswith("<") or filename == "<stdin>" or bool(getlines(filename))


def _line_number(frame: types.FrameType) -> int:
    if frame.f_lineno is not None:
        return frame.f_lineno
    # The compiler gives no line to some instructions, such as the jump back at the end of a loop.
    code = frame.f_code
    before = [line for start, _, line in code.co_lines() if line and start <= frame.f_lasti]
    return before[-1] if before else code.co_firstlineno


# --- Calls without a frame ------------------------------------------------------------------------
# `jnp.sin(x)`, `np.asarray(x)` and `x.block_until_ready()` run in C, without a frame of Python's.
# The source of the interrupted instruction tells which function it has called.


def _kind_of_call(frame: types.FrameType, may_read_locals: bool) -> str:
    call = _call_at(frame.f_code, frame.f_lasti)
    if call is None:
        return PYTHON
    if isinstance(call.func, ast.Attribute) and call.func.attr == "block_until_ready":
        return WAITING
    function = _value_of(call.func, frame, may_read_locals)
    module = str(getattr(function, "__module__", None) or "").partition(".")[0]
    if isinstance(function, JitFunction):
        return CALLS
    if isinstance(function, _PjitFunction):
        # A function that the user has passed to `jax.jit`, or an operation.
        return OPERATIONS if module in ("jax", "jaxlib") else CALLS
    name = getattr(function, "__name__", "")
    if module == "numpy" and name in ("array", "asarray") and call.args:
        # The argument is unknown if it is the result of another call, for example. Such a result
        # is an array of JAX more often than not.
        given = _value_of(call.args[0], frame, may_read_locals)
        return WAITING if isinstance(given, jax.Array) or given is _UNKNOWN else PYTHON
    return _KIND_OF_NAME.get(name, OPERATIONS) if module in ("jax", "jaxlib") else PYTHON


@functools.lru_cache(maxsize=4096)
def _call_at(code: types.CodeType, offset: int) -> ast.Call | None:
    """Return the call that an instruction makes; None if it makes none, or has no source."""
    positions = itertools.islice(code.co_positions(), offset // 2, None)
    first, last, start, stop = next(positions, (None,) * 4)
    if first is None or last is None or start is None or stop is None:
        return None
    lines = [line.encode() for line in getlines(code.co_filename)[first - 1 : last]]
    if not lines:
        return None
    # The columns count bytes.
    lines[-1] = lines[-1][:stop]
    lines[0] = lines[0][start:]
    # Without escapes, because Python warns of those that are invalid.
    source = re.sub(rb"\\[^'\"]", b"", b"".join(lines))
    try:
        found = ast.parse(b"(" + source + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return found if isinstance(found, ast.Call) else None


_UNKNOWN = object()

# A function that uses one of these names may read its own local variables as a dict.
_READ_LOCALS = frozenset(("locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"))


def _value_of(node: ast.expr, frame: types.FrameType, may_read_locals: bool) -> Any:
    """Return the value of an expression if that takes no code to run; else `_UNKNOWN`.

    For a constant, a list or a tuple, an empty tuple is returned, which is enough to tell it from
    an array.
    """
    if isinstance(node, (ast.Constant, ast.List, ast.ListComp, ast.Tuple)):
        return ()
    if isinstance(node, ast.Name):
        return _variable(node.id, frame, may_read_locals)
    if not isinstance(node, ast.Attribute):
        return _UNKNOWN
    owner = _value_of(node.value, frame, may_read_locals)
    if owner is _UNKNOWN:
        return _UNKNOWN
    found = inspect.getattr_static(owner, node.attr, _UNKNOWN)
    # A property or a field of a named tuple would have to be called for its value.
    return _UNKNOWN if hasattr(type(found), "__set__") else found


def _variable(name: str, frame: types.FrameType, may_read_locals: bool) -> Any:
    """Return the value of a variable that a frame sees; `_UNKNOWN` if it can't be read."""
    code = frame.f_code
    found = _UNKNOWN
    if not code.co_flags & inspect.CO_OPTIMIZED:
        # The frame of a module or a class.
        found = frame.f_locals.get(name, _UNKNOWN)
    elif name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        # Before Python 3.13, every read of `f_locals` returns the same dict, which a debugger or
        # the function itself may be using.
        is_shared = sys.version_info < (3, 13)
        if is_shared and (frame.f_trace is not None or not _READ_LOCALS.isdisjoint(code.co_names)):
            may_read_locals = False
        if not may_read_locals:
            return _UNKNOWN
        found = frame.f_locals.get(name, _UNKNOWN)
        if is_shared:
            # The dict would keep arrays alive that the function has dropped.
            frame.f_locals.clear()
        return found
    if found is _UNKNOWN:
        found = frame.f_globals.get(name, getattr(builtins, name, _UNKNOWN))
    return found
