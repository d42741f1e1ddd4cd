"""`explain_retraces`: logs why a function was traced once more."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from .._lock import Weak
from .trace import Trace

_logger = logging.getLogger("eqxjit")

_OFF = ("", "0", "false", "no", "off")
_IS_ON = os.environ.get("EQXJIT_EXPLAIN_RETRACES", "").lower() not in _OFF


class _Request:
    """A request for the log, as long as it lives: that of a `with` dies with it."""


_requests: Weak[_Request] = Weak()


@contextmanager
def explain_retraces() -> Iterator[None]:
    """Log each trace after a function's first: why it was made, and how long it took.

    In the manner of `jax.log_compiles`: a context manager, for all threads; the environment
    variable `EQXJIT_EXPLAIN_RETRACES=1` has the same effect on a whole process. The messages are
    warnings of the logger `eqxjit`. Warm calls pay nothing.

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
    request = _Request()
    try:
        _requests.add(request)
        yield
    finally:
        _requests.discard(request)


def log(trace: Trace) -> None:
    """Log a trace that is complete, if that is wanted."""
    if not (_IS_ON or _requests) or not trace.differences:
        return
    what = "traced again" if trace.number > 1 else "traced"
    _logger.warning(
        "`%s` was %s (trace %d) for the call at %s, in %s.\n%s",
        trace.function,
        what,
        trace.number,
        trace.call_site,
        trace.seconds,
        trace.explanation(),
    )
