"""The log: why a function was traced once more, and again and again."""

import collections
import logging
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any, TypeVar

from .._text import short, switch, times
from .constants import CapturedArray, note_on
from .differences import Difference, causes_of, with_remedies_once
from .trace import Trace

_SILENCE = '\n(`logging.getLogger("eqxjit").setLevel("ERROR")` silences these messages; said once.)'


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """The logger `eqxjit`, whose messages say whose they are, and once how to silence them.

    Not Python warnings, because under `-W error` these would fail what works with Equinox.
    """

    _has_said = False

    def process(self, msg: str, kwargs: Any) -> tuple[str, Any]:
        hint, self._has_said = "" if self._has_said else _SILENCE, True
        return f"eqxjit: {msg}{hint}", kwargs


logger = _Logger(logging.getLogger("eqxjit"), {})

F = TypeVar("F", bound=Callable[..., Any])

#: Those in force: of the environment, of each switch and `with`. The last one decides.
switches: "list[Explaining]" = []

# Captured arrays of so many bytes are worth a message.
_HUGE_BYTES = 100_000_000

# How many causes a message names.
_MAX_CAUSES = 4


class Explaining(ContextDecorator):
    """A switch that was set: the end of its `with` sets it back."""

    def __init__(self, on: bool):
        self.on = on
        self._is_set = True
        switches.append(self)

    def __enter__(self) -> None:
        if not self._is_set:
            # A second `with`, or a call of a decorated function, maybe within another.
            switches.append(self)
        self._is_set = False

    def __exit__(self, *_: object) -> None:
        if self in switches:
            switches.remove(self)

    def __call__(self, fun: F) -> F:
        # Not from here on, but in its calls.
        with self:
            return super().__call__(fun)


Explaining(bool(switch("EQXJIT_EXPLAIN_RETRACES")))


def explain_retraces(on: bool = True) -> Explaining:
    """Log each trace after a function's first: why it was made, and how long it took.

    A switch, a context manager and a decorator of functions, for all threads. The environment
    variable `EQXJIT_EXPLAIN_RETRACES=1` switches it on for a whole process. The messages are
    warnings of the logger `eqxjit`. Warm calls stay as fast.

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
        eqxjit: `<lambda>` was traced again (trace 2) for the call at ...:2, in ... s (tracing ...).
          Compared with trace 1:
          - static value changed: `n` was 3, is 4
            If it varies, pass `np.int32(n)`, which is traced, or an array made once, unless ...
        >>> logging.getLogger("eqxjit").removeHandler(handler)

        ```
    """
    if not isinstance(on, bool):
        raise TypeError(
            f"`on` is True or False, not {short(on)}. A decorator is `@eqxjit.explain_retraces()`."
        )
    return Explaining(on)


_logged_constants: set[tuple[str, CapturedArray]] = set()


def log_constants(function: str, constants: tuple[CapturedArray, ...]) -> None:
    """Log, once for each function and array, that a program holds very large constants."""
    if sum([each.bytes for each in constants]) < _HUGE_BYTES:
        return
    key = function, constants[0]
    if key not in _logged_constants:
        _logged_constants.add(key)
        logger.warning("`%s` %s", function, note_on(constants))


def _with_example(cause: str, example: Difference) -> str:
    return str(example) if cause == example.cause else f"{cause}, such as {example}"


def log_streak(streak: list[Trace], n_between: int | None) -> None:
    """Log that a function was traced again and again, and why each time.

    `n_between` calls between these traces traced nothing, None if they are of callables that were
    wrapped one after another.
    """
    often = "in a row"
    if n_between is None:
        often = "for another callable each time"
    elif n_between:
        often = f"with {n_between:,} other call{'s' * (n_between > 1)} between"
    causes = [causes_of(trace.differences) for trace in streak]
    counts = collections.Counter(cause for each in causes for cause in each)
    latest = {cause: example for each in causes for cause, example in each.items()}
    shown = counts.most_common(_MAX_CAUSES)
    lines = with_remedies_once(
        (f"  - {times(n)}, the last time: {_with_example(key, latest[key])}", latest[key].remedy)
        for key, n in shown
    )
    if len(counts) > _MAX_CAUSES:
        lines.append(f"  - and {len(counts) - _MAX_CAUSES} more")
    logger.warning(
        "`%s` was traced %d times %s, last for the call at %s:\n%s\nEach trace is compiled. "
        "Ignore this if you expect only a few more: it is logged once per function.",
        *(streak[-1].function, len(streak), often, streak[-1].call_site, "\n".join(lines)),
    )
