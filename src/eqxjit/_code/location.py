"""Finds where a user's function is defined."""

import functools
import types
from typing import Any, NamedTuple

import equinox as eqx

from .tracebacks import OUR_FILES


class Location(NamedTuple):
    """The definition of a function: its file, and its first line from 1."""

    filename: str
    line: int

    def __str__(self) -> str:
        return f"{self.filename}:{self.line}"

    @property
    def code(self) -> types.CodeType:
        """A code object that seems to be from there, and holds nothing of what is."""
        return _nothing.__code__.replace(co_filename=self.filename, co_firstlineno=self.line)


def _nothing() -> None:
    pass


def location_of(fun: Any) -> Location | None:
    """Return where the Python code below a callable is; None without such code of a user's."""
    try:
        code = _code_of(fun)
    except Exception:
        # Objects may answer for attributes as they like.
        return None
    if code is None or code.co_filename.startswith(OUR_FILES):
        return None
    return Location(code.co_filename, code.co_firstlineno)


def _code_of(fun: Any) -> types.CodeType | None:
    for _ in range(100):
        if isinstance(fun, (functools.partial, eqx.Partial)):
            below = fun.func
        elif hasattr(fun, "__wrapped__"):
            below = fun.__wrapped__
        elif isinstance(getattr(fun, "__code__", None), types.CodeType):
            return fun.__code__
        else:
            below = type(fun).__call__
        if below is fun:
            break
        fun = below
    return None
