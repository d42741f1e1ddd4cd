"""Lets one thread at a time do what the others then need not do again."""

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

# Then all go ahead. A computation may wait for a callback, in another thread, that is kept waiting
# here: late is better than never, and more than one trace is no wrong result.
_PATIENCE_SECONDS = 10.0


class Turns:
    """Takes turns at whatever a key names."""

    __slots__ = ("_lock", "_locks")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: For each key at which someone is: its lock, and how many have it or want it.
        self._locks: dict[Hashable, tuple[threading.RLock, int]] = {}

    @contextmanager
    def take(self, key: Hashable) -> Iterator[None]:
        """Waits until nobody else is at `key`."""
        with self._lock:
            lock, users = self._locks.get(key) or (threading.RLock(), 0)
            self._locks[key] = lock, users + 1
        acquired = lock.acquire(timeout=_PATIENCE_SECONDS)
        try:
            yield
        finally:
            if acquired:
                lock.release()
            with self._lock:
                lock, users = self._locks.pop(key)
                if users > 1:
                    self._locks[key] = lock, users - 1
