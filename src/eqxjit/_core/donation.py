"""Hides JAX's warning about unusable donated buffers wherever Equinox hides it.

Equinox changes Python's warning filters in each call, which affects all threads. Here one filter
stays in place. It matches only in a thread that is in a call of a function that hides the warning.
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
    """Takes the place of a regular expression in a warning filter.

    A regular expression would match in any thread, and for any function.
    """

    def match(self, text: str) -> bool:
        if not text.startswith("Some donated buffers were not usable"):
            return False
        call = in_flight()
        return call is not None and call.entry.hides_donation_warning

    def __reduce__(self) -> Any:
        # A library may send the filters to another process. There this pattern matches nothing.
        return re.compile, ("(?!)",)


_filter: Any = ("ignore", _Pattern(), Warning, None, 0)


def hide_warning() -> None:
    """Put our filter before all others, just before JAX lowers a program and may warn.

    This is repeated before each lowering, because the filter may have lost its place: the user may
    have added filters, or left a `warnings.catch_warnings` block, which restores the filters from
    before the block.
    """
    _listen()
    filters = cast(list[Any], warnings.filters)
    if filters[:1] != [_filter]:
        # Not by `warnings.filterwarnings`, because that accepts only a regular expression.
        with contextlib.suppress(ValueError):
            filters.remove(_filter)
        filters.insert(0, _filter)


@functools.cache
def _listen() -> None:
    """Hide the warning also if JAX lowers without a trace, as in `jax.grad` of a warm function.

    The first trace of a function that hides the warning calls this. Later calls do nothing.
    """

    def before_lowering(event: str, *_: Any, **__: Any) -> None:
        if event == LOWERING_EVENT and (call := in_flight()) and call.entry.hides_donation_warning:
            hide_warning()

    jax.monitoring.register_scalar_listener(before_lowering)
