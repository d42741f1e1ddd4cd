"""Logs, once for each function, that it is traced again and again, and for which causes."""

import collections
import functools
import logging

from .._code.place import Place
from .._code.text import times
from .._lock import Lock
from .differences import FUNCTION, Difference
from .trace import Trace

_logger = logging.getLogger("eqxjit")

# After so many traces in a row that were each for something new, a message.
_MANY = 10

# How many causes a message names, and how many of those of one trace are counted.
_MAX_CAUSES = 4
_MAX_COUNTED = 16

# How many places are remembered at which functions are defined, the most recently used ones.
_MAX_PLACES = 1024


class Streak:
    """The traces in a row of one function, or the functions in a row defined at one place."""

    def __init__(self, place: Place):
        self._place = place
        self._lock = Lock()
        self._has_function = False
        self._has_logged = False
        #: How these differ.
        self._causes: list[tuple[Difference, ...]] = []

    def restart(self) -> None:
        """Begin to count anew."""
        with self._lock:
            self._causes.clear()

    def add(self, trace: Trace) -> None:
        """Count a trace, and log the streak once it is long."""
        with self._lock:
            if self._has_logged:
                return
            self._causes.append(trace.differences)
            if len(self._causes) < _MANY:
                return
            self._has_logged = True
            message = self._message(trace)
            self.restart()
        # Not a Python warning: under `-W error` that would fail what works with Equinox. And not
        # under the lock: a handler may be anybody's code.
        _logger.warning("%s", message)

    def add_function(self, trace: Trace) -> None:
        """Count the first trace of a function, unless it is the first of them all."""
        with self._lock:
            is_first, self._has_function = not self._has_function, True
        if not is_first:
            self.add(trace)

    def _defined_again(self) -> Difference:
        place = self._place
        what = f"made of the code at {place.site}" if place.site else f"of `{place.qualname}`"
        remedy = "Define and wrap it once, and pass what varies as arrays" if place.is_users else ""
        return Difference(FUNCTION, "", "", f"another one {what} was traced before", remedy)

    def _message(self, trace: Trace) -> str:
        # In how many traces something was a cause, and how it differed the last time.
        counts: collections.Counter[tuple[str, str]] = collections.Counter()
        latest: dict[tuple[str, str], Difference] = {}
        for causes in self._causes:
            for cause in causes[:_MAX_COUNTED] or (self._defined_again(),):
                key = (cause.category, cause.path)
                counts[key] += 1
                latest[key] = cause
        lines = [
            f"`{trace.function}` was traced {_MANY} times in a row, last for the call at "
            f"{trace.call_site}:"
        ]
        remedies: set[str] = set()
        for key, count in counts.most_common(_MAX_CAUSES):
            cause = latest[key]
            lines.append(f"  - {times(count)}, the last time: {cause}")
            if cause.remedy and cause.remedy not in remedies:
                remedies.add(cause.remedy)
                lines.append(f"    {cause.remedy}.")
        if len(counts) > _MAX_CAUSES:
            lines.append(f"  - and {len(counts) - _MAX_CAUSES} more")
        lines.append(
            "Each trace is compiled, which is fine if few more are to come. This is logged once a "
            "function."
        )
        return "\n".join(lines)


@functools.lru_cache(maxsize=_MAX_PLACES)
def streak_of(place: Place) -> Streak:
    """Return the streak of a place: the same one for each function that is defined there."""
    return Streak(place)
