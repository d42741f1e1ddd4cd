"""What holds wherever a signal handler, another thread or a fork comes in between.

A signal handler, or another thread, may raise wherever Python runs. Who catches what the user's
code raises asks here whether that is raised again: an interruption isn't, and goes on its way.
"""

import functools
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ._switches import switch

T = TypeVar("T")


#: `EQXJIT_DEBUG=1` raises what one of our lines raised and somebody's code is taken to have raised.
IS_DEBUGGING = bool(switch("EQXJIT_DEBUG"))

_OURS = os.path.join(os.path.dirname(__file__), "")

# The errors of bugs. A `TypeError` may be of the user's `__hash__`, for which a line of ours asks;
# an `AttributeError` of a release of JAX that lacks a name.
_BUGS = (AssertionError, NameError)


def raise_if_interruption(error: BaseException, action: Callable[[], Any]) -> None:
    """Raise an error that an action has raised, unless it raises that again."""
    # Or a bug of ours would look like an error of the user's, and make calls slow, silently.
    if IS_DEBUGGING and isinstance(error, _BUGS):
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename.startswith(_OURS):
            raise error
    try:
        action()
    except BaseException as again:
        if type(again) is type(error):
            return
        try:
            action()
        except BaseException as third:
            if type(third) is type(error):
                # The second time came the interruption.
                raise again from None
    raise error


def raised_by(action: Callable[[], Any]) -> Exception | None:
    """Return what an action raises by itself; None if it raises nothing."""
    try:
        action()
    except Exception as error:
        raise_if_interruption(error, action)
        return error
    return None


def unless_it_raises(action: Callable[[], T], otherwise: T) -> T:
    """Return what an action returns, or `otherwise` if it raises by itself."""
    try:
        return action()
    except Exception as error:
        raise_if_interruption(error, action)
        return otherwise


# --- Locks, and sets of what is alive -------------------------------------------------------------


class _With:
    """A context manager without a frame and without a call that hooks would see."""

    # `with` calls what these slots hold.
    __slots__ = ("__enter__", "__exit__")

    def __init__(self, enter: Callable[[], bool], exit_: Callable[..., None]):
        # Hooks of profilers and debuggers aren't called for a `partial`: one may raise, and then
        # what was to be called isn't, and a lock is left locked.
        self.__enter__ = functools.partial(enter)
        self.__exit__ = functools.partial(exit_)


class Lock(_With):
    """A lock for `with`: re-entrant, as garbage collection and signal handlers may come anywhere.

    - `attempt`: for `with` as well, but doesn't wait: it gives False if another thread has the
        lock, and then raises a `RuntimeError` at its end.
    """

    __slots__ = ("__weakref__", "attempt")

    def __init__(self) -> None:
        self.renew()
        _locks.add(self)

    def renew(self) -> None:
        """Forget who has the lock; who is within its `with` releases the old one."""
        lock = threading.RLock()
        super().__init__(lock.__enter__, lock.__exit__)
        self.attempt = _With(functools.partial(lock.acquire, blocking=False), lock.__exit__)


class Weak(Generic[T]):
    """A set of objects, by identity, each as long as it lives."""

    __slots__ = ("_refs",)

    def __init__(self) -> None:
        self._refs: set[weakref.ref[T]] = set()

    def __len__(self) -> int:
        return len(self._refs)

    def add(self, value: T) -> None:
        # Unlike a `WeakSet` this runs no Python when one dies: an exception of a signal handler,
        # raised there, would go nowhere.
        self._refs.add(weakref.ref(value, self._refs.discard))

    def discard(self, value: T) -> None:
        self._refs.discard(weakref.ref(value))

    def alive(self) -> list[T]:
        """Return the objects, to which another thread may add at any moment."""
        # The copy is made in one step.
        return [value for ref in self._refs.copy() if (value := ref()) is not None]


_locks: Weak[Lock] = Weak()


def _renew_locks() -> None:
    for lock in _locks.alive():
        lock.renew()


# A thread that has one isn't there in the child of a fork, where none would release it.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
