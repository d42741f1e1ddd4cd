"""Measures a jaxpr: how many equations it has, and which line of the user's made most of them."""

import collections
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from .._code.call_site import location
from .._code.files import LIBRARY_FILES, is_users
from .._compat import source_line
from .._core.events import observers
from .._core.traced import NotInFlight
from .._spec.tree import has_tracers
from .trace import Trace

# A line stands out if it made so many equations, and so large a share of them.
_MANY_EQUATIONS = 200
_LARGE_SHARE = 0.5

# So many equations tell that no line stands out, without looking at all: a line takes microseconds.
_SAMPLE = 50
_LARGE_SHARE_OF_SAMPLE = 0.3


def size_of(jaxpr: Any) -> tuple[int, str]:
    """Return how many equations a closed jaxpr has, nested ones included, and the busiest line.

    That is the user's line that made most of them, with their number; empty if none stands out.
    """
    equations = [equation for part in _with_nested(jaxpr.jaxpr) for equation in part.eqns]
    n_equations = len(equations)
    if n_equations < _MANY_EQUATIONS:
        return n_equations, ""
    sample = equations[:: n_equations // _SAMPLE]
    _, count = _busiest_line(sample)
    if count < _LARGE_SHARE_OF_SAMPLE * len(sample):
        return n_equations, ""
    line, count = _busiest_line(equations)
    stands_out = count >= max(_MANY_EQUATIONS, _LARGE_SHARE * n_equations)
    # Of a library's line there is nothing for the user to change.
    if line is None or not stands_out or not is_users(line[0]):
        return n_equations, ""
    return n_equations, f"{location(*line)} ({count:,})"


def _busiest_line(equations: list[Any]) -> tuple[tuple[str, int] | None, int]:
    """Return the line that made most of the equations, and how many."""
    lines = [source_line(equation, LIBRARY_FILES) for equation in equations]
    return collections.Counter(lines).most_common(1)[0]


def _with_nested(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """Yield a jaxpr and those in its equations, each as often as it is used."""
    pending: list[Any] = [jaxpr]
    while pending:
        part = pending.pop()
        yield part
        for equation in part.eqns:
            for value in equation.params.values():
                for nested in value if isinstance(value, (tuple, list)) else (value,):
                    if isinstance(nested, ClosedJaxpr):
                        pending.append(nested.jaxpr)
                    elif isinstance(nested, Jaxpr):
                        pending.append(nested)


def measure(trace: Trace, call: Any, jaxpr: Any) -> None:
    """Fill in the size of a trace made in a call; `jaxpr` is what JAX lowered, if it did."""
    jitted, arrays = call.entry.jitted, call.flat
    # What became part of an outer program is measured there; and asking takes its time.
    # `EQX_ON_ERROR=breakpoint` jits without a `trace`.
    asks = (observers or not has_tracers(arrays)) and hasattr(jitted, "trace")
    if jaxpr is None and asks:
        try:
            jaxpr = jitted.trace(*arrays).jaxpr
        except NotInFlight:
            # JAX's caches don't hold it: the call failed after it was traced.
            return
    if jaxpr is not None:
        trace.equations, trace.busiest_line = size_of(jaxpr)
