"""Runs both kinds of fast path without a program, to see what they match, take and combine."""

import dataclasses
from typing import Any

import pytest

import eqxjit
from eqxjit._compat import Dispatcher
from eqxjit._core.slow import combine_output
from eqxjit._fast.make import PythonFast, fast_path, link
from eqxjit._spec.tree import combine
from tests.support import inside

C, PYTHON = "C", "generated Python"

#: Runs a test for each kind of fast path, both in one process.
each_path = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            C, marks=pytest.mark.skipif(not eqxjit.native_enabled(), reason="C isn't built")
        ),
        PYTHON,
    ],
)


@dataclasses.dataclass
class Taken:
    """What a fast path does with a call that it matches.

    - `arrays`: the arrays that it passes to the jitted function.
    - `output`: the output that it combines.
    """

    arrays: tuple[Any, ...]
    output: Any


class Caller:
    """Stands for the handler of a wrapper, in calls that match, don't match, or raise an error.

    - `function`: the wrapped function.
    - `fun_arrays`: the arrays of that function.
    """

    #: What a call that doesn't match returns.
    no_match = object()

    def __init__(self, function: Any, fun_arrays: tuple[Any, ...] = ()):
        self.function = function
        self.fun_arrays = fun_arrays

    def slow_call(self, /, *_: Any, **__: Any) -> Any:
        return self.no_match

    def make_matched_call(self, /, *_: Any, **__: Any) -> Any:
        # Nothing is traced, so this is called only before `failed_fast`.
        return None

    def failed_fast(self, error: BaseException, /, *_: Any, **__: Any) -> Any:
        raise error

    def finish_fast(self, /, *_: Any, **__: Any) -> Any:
        # Nothing is traced, and the program isn't unread.
        raise AssertionError


class Jitted:
    """A jitted function that runs nothing. It notes the arrays, and returns a fixed output."""

    def __init__(self, output: Any = None):
        self.output = output
        self.arrays: tuple[Any, ...] = ()

    def __call__(self, *arrays: Any) -> Any:
        self.arrays = arrays
        return self.output


class Path:
    """A fast path for calls like `fun(*args, **kwargs)`. Its program returns what `body` returns.

    - `spec`: the spec of that call.
    - `run`: a callable that tries the fast path. It returns `Caller.no_match` if the call doesn't
        match.
    """

    def __init__(self, kind: str, fun: Any, body: Any, *args: Any, **kwargs: Any):
        """**Raises:** `TooLarge`, and any error that the slow path raises for a bad argument."""
        self.caller = inside.caller(eqxjit.filter_jit(fun))
        # Otherwise an entry of an earlier test with an equal spec might be found.
        self.caller.table.clear()
        call = self.split(*args, **kwargs)
        entry = self.entry = call.entry
        self.spec = call.spec
        bound = combine(call.spec, iter(call.arrays), iter(call.statics))
        self.output = entry.split_output(body(*bound), call.all_statics)
        self.jitted = entry.jitted = Jitted(self.output)
        [program] = self.output
        program.unread = False
        stand_in = Caller(self.caller.function, self.caller.fun_arrays)
        self.fast: Any
        if kind == C:
            self.fast = fast_path(call)
            self.run = linked(stand_in, self.fast)
        else:
            self.fast = PythonFast(stand_in.function, entry)
            self.run = self.fast.instantiate(stand_in, stand_in.slow_call)

    def split(self, *args: Any, **kwargs: Any) -> Any:
        """Return the `Call` of the slow path for these arguments."""
        return self.caller.make_call(args, kwargs)

    def expected(self, call: Any) -> Taken:
        """Return what the slow path does with a call that has the same spec."""
        call.entry = self.entry
        [arrays] = self.output.values()
        return Taken((*call.flat,), combine_output(call, self.entry.out, arrays))

    def __call__(self, *args: Any, **kwargs: Any) -> Taken | None:
        """Return what the fast path does with a call; `None` if the call doesn't match."""
        output = self.run(*args, **kwargs)
        return None if output is Caller.no_match else Taken(self.jitted.arrays, output)


def linked(caller: Any, fast: Any) -> Any:
    """Return a wrapper that tries one fast path in C."""
    wrapper = Dispatcher()
    caller.fasts = [fast]
    link(wrapper, caller)
    return wrapper
