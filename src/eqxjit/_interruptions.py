"""Tells what the user's code raises from what interrupts it.

A signal handler, or another thread, may raise wherever Python runs. Who catches what the user's
code raises asks here whether that is raised again: an interruption isn't, and goes on its way.
"""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def raise_if_interruption(error: BaseException, action: Callable[[], Any]) -> None:
    """Raise an error that an action has raised, unless it raises that again."""
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
