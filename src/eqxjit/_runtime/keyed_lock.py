"""Lets one thread at a time do what the others then need not do again."""

import threading
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from .._lock import Lock

# Then all go ahead. A computation may wait for a callback, in another thread, that is kept waiting
# here: late is better than never, and more than one trace is no wrong result.
_PATIENCE_SECONDS = 10.0


class KeyedLock:
    """A lock for each key, held by one thread at a time."""

    __slots__ = ("_lock", "_locks")

    def __init__(self) -> None:
        self._lock = Lock()
        #: A lock for each key at which someone is, who keeps it alive: an interrupt leaves nothing.
        self._locks: weakref.WeakValueDictionary[Hashable, threading.RLock] = (
            weakref.WeakValueDictionary()
        )

    @contextmanager
    def hold(self, key: Hashable) -> Iterator[None]:
        """Wait until nobody else holds `key`."""
        with self._lock:
            lock = self._locks.setdefault(key, threading.RLock())
        acquired = lock.acquire(timeout=_PATIENCE_SECONDS)
        try:
            yield
        finally:
            if acquired:
                lock.release()
