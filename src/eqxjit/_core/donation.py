"""Hides JAX's warning about donated buffers where Equinox hides it.

Equinox changes the filters of Python's warnings in each call, for all threads. Here one filter
stays in place, and matches only in the middle of a call of a function that hides the warning.
"""

import contextlib
import functools
import re
import warnings
from typing import Any, cast

import jax

from .._compat import LOWERING_EVENT
from .in_flight import in_flight


class _Pattern:
    """Stands for the regular expression of a filter, which would match in any thread."""

    def match(self, text: str) -> bool:
        if not text.startswith("Some donated buffers were not usable"):
            return False
        call = in_flight()
        return call is not None and call.entry.hides_donation_warning

    def __reduce__(self) -> Any:
        # Filters may be sent to another process, where this one matches nothing.
        return re.compile, ("(?!)",)


_filter: Any = ("ignore", _Pattern(), Warning, None, 0)


def hide_warning() -> None:
    """Put the filter before all others: JAX warns when it lowers.

    Done before each lowering, because the user may have added filters, or left a `catch_warnings`.
    """
    _listen()
    filters = cast(list[Any], warnings.filters)
    if filters[:1] != [_filter]:
        # Not by `warnings.filterwarnings`, which takes nothing but a regular expression.
        with contextlib.suppress(ValueError):
            filters.remove(_filter)
        filters.insert(0, _filter)


@functools.cache
def _listen() -> None:
    """Hide the warning in lowerings without a trace, too, as under `jax.grad` of a warm function.

    Called once, by the first trace that hides it.
    """

    def before_lowering(event: str, *_: Any, **__: Any) -> None:
        if event == LOWERING_EVENT and (call := in_flight()) and call.entry.hides_donation_warning:
            hide_warning()

    jax.monitoring.register_scalar_listener(before_lowering)
