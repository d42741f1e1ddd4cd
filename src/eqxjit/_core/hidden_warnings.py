"""Hides JAX's warnings: of donated buffers that it can't reuse, and of options once more.

Nothing of it depends on being undone: a filter of ours matches only in a thread in which such a
call is on the stack, so that neither other threads nor an interrupt can turn it against anybody.
"""

import threading
from collections.abc import Callable

from .._compat import warning_filters

_HIDDEN = "Some donated buffers were not usable", "backend and device argument on jit is deprecated"


class _Pattern:
    """A stand-in for the regular expression of a filter, which can be pickled as that."""

    def match(self, text: str) -> bool:
        """Return whether this is a warning to hide, in a thread that hides them."""
        return hasattr(_hiding, "is_on") and text.startswith(_HIDDEN)


# A thread that hides them has `is_on`.
_hiding = threading.local()


def hide_warnings() -> Callable[[], None]:
    """Put a filter before all others; return what removes it."""
    filters = warning_filters()
    # A new one for each call: another thread's may be removed first.
    item = ("ignore", _Pattern(), Warning, None, 0)
    filters.insert(0, item)
    _hiding.is_on = True

    def remove() -> None:
        vars(_hiding).pop("is_on", None)
        # What was restored since, and what will be.
        for those in (filters, warning_filters()):
            if item in those:
                those.remove(item)

    return remove
