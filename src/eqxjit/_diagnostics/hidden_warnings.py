"""Hides JAX's warnings: of donated buffers that it can't reuse, and of options once more.

A filter of ours matches only in a thread in which such a call is on the stack, so that it hides
nothing from other threads.
"""

import threading
import warnings
from collections.abc import Callable
from typing import Any

_HIDDEN = "Some donated buffers were not usable", "backend and device argument on jit is deprecated"


class _Hiding(threading.local):
    #: How many filters are for this thread.
    depth = 0


_hiding = _Hiding()


class _Pattern:
    """The pattern of a filter, in place of a regular expression; it can be pickled, as that can."""

    def match(self, text: str) -> bool:
        """Return whether this is a warning to hide, in a thread that hides them."""
        return _hiding.depth > 0 and text.startswith(_HIDDEN)


def hide_warnings() -> Callable[[], None]:
    """Put a filter before all others; return what removes it."""
    # Not `warnings.filterwarnings`, which takes nothing but a regular expression.
    filters: Any = warnings.filters
    # A new one for each call: another thread's may be removed first.
    item = ("ignore", _Pattern(), Warning, None, 0)
    filters.insert(0, item)
    _hiding.depth += 1

    def remove() -> None:
        _hiding.depth -= 1
        # What was restored since, and what will be.
        now: Any = warnings.filters
        for those in (filters, now):
            if item in those:
                those.remove(item)

    return remove
