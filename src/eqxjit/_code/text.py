"""Short texts: for values of the user's, whatever their `repr` does, for arrays and for numbers."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def of_user(action: Callable[[], T], fallback: Callable[[], T]) -> T:
    """Return what an action returns that runs the user's code; the fallback's where that raises.

    What it doesn't raise a second time came from elsewhere, such as a signal handler: it is raised.
    """
    try:
        return action()
    except Exception as error:
        try:
            action()
        except Exception:
            # The user's `__repr__`, `__getattr__`, flatten, ...
            return fallback()
        raise error


def short(value: Any, limit: int = 40) -> str:
    """Return the `repr` of a value on one line, cut to so many characters."""
    if type(value) is str and len(value) <= limit - 2 and value.isidentifier():
        # Most keys of dicts.
        return f"'{value}'"
    text = of_user(lambda: " ".join(repr(value).split()), lambda: f"{type(value).__name__} object")
    if not text.isprintable():
        # Source, or a terminal, takes no NUL and no half of a character.
        text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= limit else text[: limit - 3] + "..."


def array_text(dtype: Any, shape: Iterable[Any]) -> str:
    """Return the text of an array's type, as `float32[2,3]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def times(count: int) -> str:
    """Return how often, in words: once, or so many times."""
    return "once" if count == 1 else f"{count} times"


def counted(count: int, noun: str) -> str:
    """Return a number of things, in words."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
