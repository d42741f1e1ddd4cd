"""A lock that no signal handler and no profiler's hook leaves locked, wherever it comes.

And, without one, what is alive of a set to which other threads add.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

_WITH = ("__enter__", "__exit__")


class _Held:
    """A context manager without a frame of its own, and without a call that hooks are told of.

    A hook may raise, and then what was to be called isn't: a lock would stay locked. `with` calls
    what these slots hold, and hooks aren't told of a `partial`.
    """

    __slots__ = _WITH

    def __init__(self, *with_: Callable[..., Any]):
        for name, function in zip(_WITH, with_, strict=True):
            setattr(self, name, functools.partial(function))

    if TYPE_CHECKING:

        def __enter__(self) -> bool: ...

        def __exit__(self, *_: object) -> None: ...


class Lock(_Held):
    """A lock for `with`: re-entrant, as garbage collection and signal handlers may come anywhere.

    - `attempt`: for `with` as well, but doesn't wait: it gives False if another thread has the
        lock, and then raises a `RuntimeError` at its end.
    """

    __slots__ = ("attempt",)

    def __init__(self) -> None:
        lock = threading.RLock()
        super().__init__(lock.__enter__, lock.__exit__)
        self.attempt = _Held(functools.partial(lock.acquire, blocking=False), lock.__exit__)


def alive(objects: weakref.WeakSet[T]) -> list[T]:
    """Return the objects in a set, to which another thread may add at any moment."""
    while True:
        try:
            return [*objects]
        except RuntimeError as error:
            # It did; or a signal handler raised another one.
            if "changed size" not in str(error):
                raise
