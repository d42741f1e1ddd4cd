"""How long something takes: a count of all, and percentiles of the latest."""

import collections
from typing import Any

import numpy as np

# Enough for sixteen above the highest percentile, in half a megabyte.
_LATEST = 2**14
_PERCENTILES = (50, 99, 99.9)


class Latencies:
    """The seconds that something took, each time that it was done."""

    def __init__(self) -> None:
        self._count = 0
        self._latest: collections.deque[float] = collections.deque(maxlen=_LATEST)

    def add(self, seconds: float) -> None:
        """Once more."""
        self._count += 1
        self._latest.append(seconds)

    def report(self) -> dict[str, Any]:
        """The count, and the percentiles in microseconds, `None` where there is nothing yet."""
        names = [f"p{percentile}" for percentile in _PERCENTILES]
        figures: list[float | None] = [None] * len(names)
        if self._latest:
            figures = (np.percentile(self._latest, _PERCENTILES) * 1e6).round(1).tolist()
        return {"count": self._count, "microseconds": dict(zip(names, figures, strict=True))}
