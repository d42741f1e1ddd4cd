"""The log: why a function was traced once more, again and again, or with an iterator.

All messages are warnings of the logger `eqxjit`. Not Python warnings: under `-W error` these would
fail what works with Equinox.
"""

import collections
import functools
import logging
from collections.abc import Callable
from typing import Any

from .._code.place import Place
from .._code.text import times
from .._switches import switch
from .advice import for_iterator
from .differences import Difference, defined_again
from .trace import Trace

_logger = logging.getLogger("eqxjit")

# --- `explain_retraces` ---------------------------------------------------------------------------

# Those for which the log explains: of the environment, of a switch, of each `with`.
_requests: list[object] = []
if switch("EQXJIT_EXPLAIN_RETRACES"):
    _requests.append("EQXJIT_EXPLAIN_RETRACES")


class _Explaining:
    """A switch that was set: the end of its `with` sets it back."""

    def __init__(self, on: bool):
        self._on = on
        self._before: list[object] = []
        self._switch()

    def _switch(self) -> None:
        if self._on:
            _requests.append(self)
        else:
            self._before = [*_requests]
            _requests.clear()

    def __enter__(self) -> None:
        # Called again, it is a `with` of its own.
        if self._on and self not in _requests:
            self._switch()

    def __exit__(self, *_: object) -> None:
        if self in _requests:
            _requests.remove(self)
        _requests.extend(self._before)
        self._before = []

    def __call__(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        # A decorator: on only while the function runs.
        self.__exit__()

        @functools.wraps(fun)
        def explained(*args: Any, **kwargs: Any) -> Any:
            with _Explaining(self._on):
                return fun(*args, **kwargs)

        return explained

    def __repr__(self) -> str:
        return f"<retraces are {'' if _requests else 'not '}explained in the log>"


def explain_retraces(on: bool | Callable[..., Any] = True) -> Any:
    """Log each trace after a function's first: why it was made, and how long it took.

    A switch, a context manager and a decorator, in the manner of `torch.set_grad_enabled`, and for
    all threads. The environment variable `EQXJIT_EXPLAIN_RETRACES=1` switches it on for a whole
    process. The messages are warnings of the logger `eqxjit`. Warm calls pay nothing.

    **Arguments:**

    - `on`: `explain_retraces(False)` switches it off.

    !!! example

        ```python
        >>> import logging, sys
        >>> import jax.numpy as jnp
        >>> import eqxjit
        >>> f = eqxjit.filter_jit(lambda x, n: x * n)
        >>> handler = logging.StreamHandler(sys.stdout)
        >>> logging.getLogger("eqxjit").addHandler(handler)
        >>> with eqxjit.explain_retraces():
        ...     _ = f(jnp.ones(2), 3), f(jnp.ones(2), 4)
        `<lambda>` was traced again (trace 2) for the call at ...:2, in ... s (tracing ...).
          Compared with trace 1:
          - static value changed: `n` was 3, is 4
            If it varies, pass `jnp.asarray(n, dtype=jnp.int32)`, unless a shape or control flow ...
        >>> logging.getLogger("eqxjit").removeHandler(handler)

        ```
    """
    if not isinstance(on, bool) and callable(on):
        return _Explaining(True)(on)
    return _Explaining(bool(on))


def log(trace: Trace) -> None:
    """Log a trace that is complete, if `explain_retraces` is on."""
    if not _requests or not trace.differences:
        return
    _logger.warning(
        "`%s` was traced%s (trace %d) for the call at %s, in %s.\n%s",
        trace.function,
        " again" if trace.number > 1 else "",
        trace.number,
        trace.call_site,
        trace.seconds,
        trace.explanation(),
    )


# --- Traced again and again -----------------------------------------------------------------------

# How many causes a message names, and how many of those of one trace are counted.
_MAX_CAUSES = 4
_MAX_COUNTED = 16


def log_streak(trace: Trace, place: Place, streak: list[tuple[Difference, ...]]) -> None:
    """Log that a function was traced again and again; a streak holds how each trace differed."""
    # In how many traces something was a cause, and how it differed the last time.
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    latest: dict[tuple[str, str], Difference] = {}
    for causes in streak:
        for cause in causes[:_MAX_COUNTED] or (defined_again(place),):
            key = (cause.category, cause.path)
            counts[key] += 1
            latest[key] = cause
    lines = [
        f"`{trace.function}` was traced {len(streak)} times in a row, last for the call at "
        f"{trace.call_site}:"
    ]
    remedies = {""}
    for key, count in counts.most_common(_MAX_CAUSES):
        cause = latest[key]
        lines.append(f"  - {times(count)}, the last time: {cause}")
        if cause.remedy not in remedies:
            remedies.add(cause.remedy)
            lines.append(f"    {cause.remedy}.")
    if len(counts) > _MAX_CAUSES:
        lines.append(f"  - and {len(counts) - _MAX_CAUSES} more")
    lines.append(
        "Each trace is compiled. Ignore this if you expect only a few more: it is logged once "
        "per function."
    )
    _logger.warning("%s", "\n".join(lines))


# --- Iterators ------------------------------------------------------------------------------------


def log_iterator(trace: Trace, place: Place, path: str, kind: str) -> None:
    """Log that a static value of a complete trace is an iterator, or a partial that holds one."""
    _logger.warning(
        "`%s`, called at %s: %s. Tracing takes values from it and compiles them in: later "
        "calls with it take nothing more, and use the same values again.%s",
        trace.function,
        trace.call_site,
        f"{path} holds an iterator"
        if kind == "partial"
        else f"{path} is an iterator ({kind}), and static",
        for_iterator(place),
    )
