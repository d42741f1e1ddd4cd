"""The logger `eqxjit`, the switch for explanations, and messages that are logged unasked."""

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
    """The logger `eqxjit`. It begins each message with `eqxjit:`, and says once how to silence it.

    Messages aren't Python warnings, because under `-W error` a warning would raise an error in
    programs that work with Equinox.
    """

    _has_said_how_to_silence = False

    def process(self, msg: str, kwargs: Any) -> tuple[str, Any]:
        hint = "" if self._has_said_how_to_silence else _SILENCE
        self._has_said_how_to_silence = True
        return f"eqxjit: {msg}{hint}", kwargs


logger = _Logger(logging.getLogger("eqxjit"), {})

F = TypeVar("F", bound=Callable[..., Any])

#: The switches in force: first the environment variable's, then one for each call of
#: `explain_retraces` and each `with`. The last switch decides.
switches: "list[Explaining]" = []

# Captured arrays that take at least this many bytes together are logged.
HUGE_BYTES = 100_000_000

# A message names at most this many causes.
_MAX_CAUSES = 4


class Explaining(ContextDecorator):
    """A switch for explanations: in force from its creation to the end of its `with` block.

    Each further `with`, and each call of a function that it decorates, puts it in force again.
    """

    def __init__(self, on: bool):
        self.on = on
        # Whether the switch has been in force since its creation. The first `with` then must not
        # put it in force once more.
        self._is_new = True
        switches.append(self)

    def __enter__(self) -> None:
        if not self._is_new:
            switches.append(self)
        self._is_new = False

    def __exit__(self, *_: object) -> None:
        # The latest one, because the switch may be in force twice, with others in between.
        for i in reversed(range(len(switches))):
            if switches[i] is self:
                del switches[i]
                return

    def __call__(self, fun: F) -> F:
        # A decorator works in the calls of its function only, so this `with` ends the effect that
        # the switch has had since its creation.
        with self:
            return super().__call__(fun)


# The switch of the environment variable, which is never removed.
Explaining(bool(switch("EQXJIT_EXPLAIN_RETRACES")))


def explain_retraces(on: bool = True) -> Explaining:
    """Log each trace after a function's first: why it was needed, and how long it took.

    Call it to switch explanations on, or use it as a context manager or as a decorator. It works
    for all threads. The environment variable `EQXJIT_EXPLAIN_RETRACES=1` switches explanations on
    for a whole process. The messages are warnings of the logger `eqxjit`. Warm calls stay as fast
    as without.

    **Arguments:**

    - `on`: whether to log. `explain_retraces(False)` switches explanations off.

    **Returns:**

    A context manager and decorator, at whose end the earlier setting is in force again.

    **Raises:**

    - `TypeError`, if `on` isn't a `bool`, as in `@eqxjit.explain_retraces` without parentheses.

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


_logged_constants: set[tuple[str, tuple[CapturedArray, ...]]] = set()


def log_constants(function: str, constants: tuple[CapturedArray, ...]) -> None:
    """Log that a program holds very large constants, once for each function and largest array."""
    key = function, constants[:1]
    if constants and key not in _logged_constants:
        _logged_constants.add(key)
        logger.warning("`%s` %s", function, note_on(constants))


def _with_example(cause: str, example: Difference) -> str:
    """Return a cause with an example, or the example alone if it says as much as the cause."""
    return str(example) if cause == example.cause else f"{cause}, such as {example}"


def log_streak(streak: list[Trace], n_between: int | None) -> None:
    """Log that a function was traced many times, and the causes.

    `n_between` is the number of calls between these traces that traced nothing. It is `None` for
    the traces of several callables that were wrapped one after another.
    """
    how = "in a row"
    if n_between is None:
        how = "for another callable each time"
    elif n_between:
        how = f"with {n_between:,} other call{'s' if n_between > 1 else ''} between"
    counts: collections.Counter[str] = collections.Counter()
    latest: dict[str, Difference] = {}
    for trace in streak:
        causes = causes_of(trace.differences)
        counts.update([*causes])
        latest |= causes
    pairs: list[tuple[str, str]] = []
    for cause, n in counts.most_common(_MAX_CAUSES):
        example = latest[cause]
        line = f"  - {times(n)}, the last time: {_with_example(cause, example)}"
        pairs.append((line, example.remedy))
    lines = with_remedies_once(pairs)
    if len(counts) > _MAX_CAUSES:
        lines.append(f"  - and {len(counts) - _MAX_CAUSES} more")
    last = streak[-1]
    logger.warning(
        "`%s` was traced %d times %s, last for the call at %s:\n%s\nEach trace is compiled. "
        "Ignore this if you expect only a few more: it is logged once per function.",
        last.function,
        len(streak),
        how,
        last.call_site,
        "\n".join(lines),
    )
