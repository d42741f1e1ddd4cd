"""Both fast paths of one call, without a program: what they match, take and make."""

import dataclasses
from typing import Any

import pytest

import eqxjit
from eqxjit._compat import Dispatcher
from eqxjit._core.slow import combine_output
from eqxjit._core.table import fast_path
from eqxjit._fast.make import PythonFast, link
from eqxjit._spec.tree import combine
from tests.support import inside

C, PYTHON = "C", "generated Python"

#: Runs a test for each fast path, in one process.
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
    """What a fast path takes from a call that it matches, and what it makes of its output."""

    arrays: tuple[Any, ...]
    made: Any


class Caller:
    """The caller of a call of which nothing but a match, or an error of its guards, is expected.

    - `function`, `fun_arrays`: those of the wrapper.
    """

    #: What a call returns that doesn't match.
    refused = object()

    def __init__(self, function: Any, fun_arrays: tuple[Any, ...] = ()):
        self.function = function
        self.fun_arrays = fun_arrays

    def slow_call(self, /, *_: Any, **__: Any) -> Any:
        return self.refused

    def make_matched_call(self, /, *_: Any, **__: Any) -> Any:
        # Of a call that fails: nothing is traced.
        return None

    def failed_fast(self, error: BaseException, /, *_: Any, **__: Any) -> Any:
        raise error

    def finish_fast(self, /, *_: Any, **__: Any) -> Any:
        # In generated Python, an output of a trace other than the first.
        raise AssertionError


class Jitted:
    """A jitted function that runs nothing: it notes what it takes, and returns an output."""

    def __init__(self, output: Any = None):
        self.output = output
        self.arrays: tuple[Any, ...] = ()

    def __call__(self, *arrays: Any) -> Any:
        self.arrays = arrays
        return self.output


class Path:
    """The fast path of a function for calls like one; its program returns what `body` does.

    - `spec`: that of the call.
    - `run`: the fast path, which returns `Caller.refused` where it doesn't match.
    """

    def __init__(self, kind: str, fun: Any, body: Any, *args: Any, **kwargs: Any):
        """**Raises:** `TooLarge`, and what a bad argument raises."""
        self.caller = inside.caller(eqxjit.filter_jit(fun))
        # Or an equal one of an earlier test would serve.
        self.caller.table.clear()
        call = self.split(*args, **kwargs)
        entry = self.entry = call.entry
        self.spec = call.spec
        bound = combine(call.spec, iter(call.arrays), iter(call.statics))
        self.output = entry.split_output(body(*bound), call.all_statics)
        self.jitted = entry.jitted = Jitted(self.output)
        [program] = self.output
        program.unread = False
        mine = Caller(self.caller.function, self.caller.fun_arrays)
        self.fast: Any
        if kind == C:
            self.fast = fast_path(call)
            self.run = linked(mine, self.fast)
        else:
            self.fast = PythonFast(mine.function, entry)
            self.run = self.fast.instantiate(mine, mine.slow_call)

    def split(self, *args: Any, **kwargs: Any) -> Any:
        """A call, as the slow path splits it."""
        return self.caller.make_call(args, kwargs)

    def expected(self, call: Any) -> Taken:
        """What the slow path takes of a call, and what it makes of the output."""
        call.entry = self.entry
        [arrays] = self.output.values()
        return Taken((*call.flat,), combine_output(call, self.entry.out, arrays))

    def __call__(self, *args: Any, **kwargs: Any) -> Taken | None:
        """What is taken and made of a call; None if it doesn't match."""
        made = self.run(*args, **kwargs)
        return None if made is Caller.refused else Taken(self.jitted.arrays, made)


def linked(caller: Any, fast: Any) -> Any:
    """A wrapper that tries one fast path."""
    wrapper = Dispatcher()
    caller.fasts = [fast]
    link(wrapper, caller)
    return wrapper
