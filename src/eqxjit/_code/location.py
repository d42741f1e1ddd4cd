"""Finds where a user's function is defined."""

import functools
import types
from typing import Any

import equinox as eqx

from .._interruptions import unless_it_raises
from .call_site import CallSite
from .files import OUR_FILES


def stub_at(site: CallSite) -> types.CodeType:
    """Return a code object that seems to be from a line, and holds nothing of what is there."""
    return _nothing.__code__.replace(co_filename=site.filename, co_firstlineno=site.line)


def _nothing() -> None:
    pass


def location_of(fun: Any) -> CallSite | None:
    """Return where the Python code below a callable is; None without such code of a user's."""
    # Objects may answer for attributes as they like.
    code = unless_it_raises(lambda: _code_of(fun), None)
    if code is None or code.co_filename.startswith(OUR_FILES):
        return None
    return CallSite(code.co_filename, code.co_firstlineno)


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
