"""Both fast paths of one call, without a program: what they match, take and make."""

import dataclasses
import itertools
from typing import Any

import pytest

import eqxjit
from eqxjit._core.slow import HELPERS
from eqxjit._fast.make import PythonFast, native_fast
from eqxjit._fast.source import write
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

    arrays: list[Any]
    made: Any


class Path:
    """The fast path of a function for calls like one; its program returns what `body` does.

    - `spec`: that of the call.
    """

    def __init__(self, kind: str, fun: Any, body: Any, *args: Any, **kwargs: Any):
        """**Raises:** `TooLarge`, and what a bad argument raises."""
        self.caller = inside.caller(eqxjit.filter_jit(fun))
        # Or an equal one of an earlier test would serve.
        self.caller.table.clear()
        call = self.split(*args, **kwargs)
        entry = self.entry = self.caller.find_or_add(call)
        self.spec = call.spec
        bound = combine(call.spec, iter(call.arrays), iter(call.statics))
        self.output = entry.describe(body(*bound), call.all_statics)
        self.fast: Any
        if kind == C:
            self.fast = native_fast(call, entry.jitted)
        else:
            signature = self.caller.function.signature
            self.fast = PythonFast(entry, write(signature, call.spec, entry, HELPERS))

    def split(self, *args: Any, **kwargs: Any) -> Any:
        """A call, as the slow path takes it apart."""
        return self.caller.split(*self.caller.bind(args, kwargs))

    def expected(self, call: Any) -> Taken:
        """What the slow path takes of a call, and what it makes of the output."""
        call.entry = self.entry
        return Taken(call.flat, self.caller.combine(self.output, call))

    def __call__(self, *args: Any, **kwargs: Any) -> Taken | None:
        """What is taken and made of a call; None if it doesn't match."""
        if isinstance(self.fast, PythonFast):
            return self._in_python(args, kwargs)
        call = self.caller.bind(args, kwargs)
        args, kwargs = call
        found = self.fast.match(self.caller.fun_arrays, *args, **kwargs)
        if found is None:
            return None
        arrays, statics = found
        return Taken(arrays, self.fast.make(self.output, (*self.caller.function.statics, *statics)))

    def _in_python(self, args: Any, kwargs: Any) -> Taken | None:
        taken: list[Any] = []

        def jitted(*arrays: Any) -> Any:
            taken.extend(arrays)
            return self.output

        refused = object()
        statics = self.caller.function.statics
        run = self.fast.written.make(
            _Raises(),
            lambda *_, **__: refused,
            jitted,
            itertools.repeat(None),
            *self.caller.fun_arrays,
            *statics,
        )
        entry = self.entry
        pending, entry.pending = entry.pending, False
        try:
            made = run(*args, **kwargs)
        finally:
            entry.pending = pending
        return None if made is refused else Taken(taken, made)


class _Raises:
    """The caller of a call that nothing but a match, or an error of its guards, is expected of."""

    def interrupted(self, error: BaseException, *_: Any) -> Any:
        raise error

    def failed_fast(self, error: BaseException, *_: Any) -> Any:
        raise error

    def settle_fast(self, *_: Any) -> Any:
        # An output of a trace other than the first.
        raise AssertionError
