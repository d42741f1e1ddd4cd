"""Runs calls of a function under Equinox's `filter_jit`, too, and keeps how results differ."""

import dataclasses
import functools
import io
import random
import sys
import threading
from collections import Counter, deque
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from .._compat import UpstreamWrapper, upstream_filter_jit
from .._core.wrapper import JitFunction
from .._diagnostics.trace import Trace
from .._places import CallSite, captured, code_of, place_of, wrapped_by
from .._spec.static_key import CONSTANTS
from .._spec.tree import combine, split
from .comparison import Unequal, compare, compare_errors

#: Who serves a call. An awaited call is served by eqxjit, and returns when its results are there.
OURS, AWAITED, THEIRS = "ours", "awaited", "theirs"

# How many calls of each structure are compared first.
_N_FIRST = 3

# Equinox's own, because `install` replaces these names while a trial is on.
_upstream_filter_jit = functools.partial(upstream_filter_jit)
_upstream_call: Any = vars(UpstreamWrapper or object).get("__call__")

# A function that reads one of these computes something else each time.
_STATEFUL = np.random.Generator, np.random.RandomState, random.Random, io.IOBase


class Parts(NamedTuple):
    """The arguments of a call: their spec, their arrays, and their static objects."""

    spec: Any
    arrays: list[Any]
    statics: list[Any]


class Outcome(NamedTuple):
    """What a call returned, or else the error that it raised."""

    result: Any
    error: Exception | None


def _times() -> dict[str, deque[float]]:
    return {mode: deque(maxlen=2_000) for mode in (OURS, AWAITED, THEIRS)}


@dataclasses.dataclass(eq=False)
class Tried:
    """What a trial knows of one function.

    - `name`, `site`: the function's name, and where it is defined.
    - `options`: the options of its `filter_jit`.
    - `effects`: why at most one call is compared; empty without a reason.
    - `is_excluded`: whether no call may run under Equinox.
    - `calls`: how often the function was called.
    - `n_due`: how many of the next calls are candidates for a comparison in any case, because they
        may have a new structure.
    - `compared`: how many calls were compared.
    - `by_structure`: how many calls of each spec were compared.
    - `statics`: the static objects of the first compared call of each spec.
    - `unequal`: the first parts that differed, by their paths.
    - `known`: how results differ that differ as documented; empty if none does.
    - `traces`: eqxjit's traces of the function during the trial.
    - `times`: the seconds of the timed calls, by who served them.
    """

    name: str
    site: CallSite | None
    options: Any
    effects: str = ""
    is_excluded: bool = False
    calls: int = 0
    n_due: int = _N_FIRST
    compared: int = 0
    by_structure: Counter[Any] = dataclasses.field(default_factory=Counter)
    statics: dict[Any, list[Any]] = dataclasses.field(default_factory=dict)
    unequal: dict[str, Unequal] = dataclasses.field(default_factory=dict)
    known: str = ""
    traces: list[Trace] = dataclasses.field(default_factory=list)
    times: dict[str, deque[float]] = dataclasses.field(default_factory=_times)

    @property
    def donates(self) -> bool:
        return self.options.donate != "none"

    @property
    def is_wrong(self) -> bool:
        """Whether results differ by more than rounding, and not as documented."""
        return any(each.rounding is None for each in self.unequal.values())

    @property
    def is_comparable(self) -> bool:
        """Whether a call may run under Equinox, too."""
        return not (self.is_excluded or (self.effects and self.compared))

    @property
    def is_right(self) -> bool:
        """Whether calls were compared, and Equinox's results were the same."""
        return self.compared > 0 and not (self.is_excluded or self.known or self.is_wrong)

    def parts_of(self, args: Any, kwargs: Any) -> Parts | None:
        """Return the parts of a call; None if the call may not run under Equinox."""
        if self.is_excluded:
            return None
        try:
            parts = Parts(*split((args, kwargs)))
        except Exception:
            # The call itself raises a better error.
            return None
        self.exclude_if_stateful(parts.statics)
        return None if self.is_excluded else parts

    def exclude_if_stateful(self, values: list[Any]) -> None:
        """Exclude the function if it reads something that each call changes."""
        for each in values:
            if isinstance(each, _STATEFUL) or hasattr(type(each), "__next__"):
                self.effects, self.is_excluded = f"it reads a `{type(each).__name__}`", True

    def is_due(self, parts: Parts) -> bool:
        """Return whether a call is one of the first of its structure."""
        n_wanted = _N_FIRST if self.has_traced(parts) else 2 * _N_FIRST
        return self.by_structure[parts.spec] < n_wanted

    def expect_new_structure(self) -> None:
        """Have the next calls be candidates for a comparison."""
        self.n_due = _N_FIRST

    def has_traced(self, parts: Parts) -> bool:
        """Return whether Equinox has traced this structure for these very static objects.

        For equal ones it would return those that it has traced.
        """
        known = self.statics.get(parts.spec)
        return known is not None and all(
            a is b or type(a) in CONSTANTS for a, b in zip(parts.statics, known, strict=True)
        )

    def copied(self, arrays: list[Any]) -> list[Any]:
        """Return copies of the arrays that a call may delete, or their owner overwrite."""
        return [
            each.copy() if self.donates or not isinstance(each, jax.Array) else each
            for each in arrays
        ]

    def compare(self, fun: Any, theirs: Any, parts: Parts, given: list[Any], ours: Outcome) -> None:
        """Run a call under Equinox, and keep how its outcome differs from that of eqxjit.

        `theirs` is `fun` under Equinox's `filter_jit`. `given` are copies of the call's arrays.
        """
        self.compared += 1
        self.by_structure[parts.spec] += 1
        self.statics.setdefault(parts.spec, parts.statics)
        again = self._run(theirs, parts, given)
        found = _differences(ours, again)
        if any(each.rounding is None for each in found):
            # Equinox may have returned what it traced for equal static objects. A function that is
            # new each time is traced anew.
            renewed = eqx.Partial(lambda f, *args, **kwargs: f(*args, **kwargs), fun)
            anew = self._run(upstream(renewed, self.options), parts, given)
            if not _differences(ours, anew):
                why = "Equinox returns what it traced for an equal static value"
                self.known = f"{found[0]}: {why}"
                return
            if _differences(again, anew):
                self.effects = self.known = "its results differ from trace to trace"
                return
        for each in found[:10]:
            self.unequal.setdefault(each.path, each)

    def _run(self, theirs: Any, parts: Parts, given: list[Any]) -> Outcome:
        arrays = self.copied(given)
        args, kwargs = combine(parts.spec, iter(arrays), iter(parts.statics))
        with Prints(drops=True):
            try:
                return Outcome(theirs(*args, **kwargs), None)
            except Exception as error:
                return Outcome(None, error)


def tried_of(ours: Any) -> Tried:
    """Return a new `Tried` for the function of one of our wrappers."""
    function, fun = ours._function, ours.__wrapped__
    tried = Tried(function.signature.label, place_of(fun).site, function.options)
    if type(ours) is not JitFunction:
        tried.effects, tried.is_excluded = "Equinox has none like it", True
    *_, innermost = wrapped_by(fun)
    code = code_of(innermost)
    if code is not None:
        variables = getattr(innermost, "__globals__", {})
        tried.exclude_if_stateful([variables.get(name) for name in code.co_names])
        if hasattr(innermost, "__closure__"):
            tried.exclude_if_stateful([value for _, value in captured(innermost)])
    return tried


def upstream(fun: Any, options: Any) -> Any:
    """Return a function under Equinox's own `filter_jit`, with the options of ours."""
    wrapper = _upstream_filter_jit(fun, donate=options.donate, **dict(options.jit_arguments))
    return wrapper if _upstream_call is None else functools.partial(_upstream_call, wrapper)


def _differences(ours: Outcome, theirs: Outcome) -> list[Unequal]:
    if ours.error is not None or theirs.error is not None:
        return [*compare_errors(ours.error, theirs.error)]
    return [*compare(ours.result, theirs.result)]


class Prints:
    """A context manager that counts what this thread prints, and drops it if `drops`.

    - `n_printed`: how many strings were printed.
    """

    def __init__(self, drops: bool = False):
        self.n_printed = 0
        self._drops = drops
        self._thread = threading.get_ident()
        self._stream: Any = None

    def __enter__(self) -> "Prints":
        self._stream, sys.stdout = sys.stdout, self  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        # The call may have put another stream there.
        if sys.stdout is self:
            sys.stdout = self._stream

    def write(self, text: str) -> int:
        is_mine = threading.get_ident() == self._thread
        self.n_printed += is_mine
        return len(text) if is_mine and self._drops else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
