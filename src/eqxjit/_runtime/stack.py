"""Finds calls through eqxjit on the stack: an interrupt leaves nothing to be unset there.

A warm call in the native back end has no frame. JAX's own tells of it, where it has no program.
"""

import contextlib
import os
from types import FrameType

import jax

from .._code.tracebacks import OUR_FILES
from .._compat import function_missed_in
from .entry import ENTRY_VARIABLE, CacheEntry
from .request import CALL_VARIABLE, Call

#: The files of frames that may be between what JAX does and the call that it belongs to.
_PASSED = (os.path.dirname(jax.__file__) + os.sep, contextlib.__file__, *OUR_FILES)


class CacheMiss(Exception):
    """A signal: JAX traces in the middle of a warm call, which must go through the miss path."""


class Traced:
    """The base of what we have JAX trace.

    - `entry_ref`: its entry, weakly.
    """

    def entry_ref(self) -> CacheEntry | None:
        return None


def call_in(frame: FrameType) -> tuple[Call | None, CacheEntry | None]:
    """Return the entry that a frame calls, and before it the call, if that is in the miss path."""
    if not frame.f_code.co_filename.startswith(OUR_FILES):
        return None, frameless_in(frame)
    variables = frame.f_locals
    call = variables.get(CALL_VARIABLE)
    if call is not None:
        return call, call.entry
    return None, variables.get(ENTRY_VARIABLE) or frame.f_globals.get(ENTRY_VARIABLE)


def is_foreign(frame: FrameType) -> bool:
    """Return whether a frame is neither JAX's nor ours."""
    return not frame.f_code.co_filename.startswith(_PASSED)


def frameless_in(frame: FrameType) -> CacheEntry | None:
    """Return the entry of a call that has no frame, if JAX looks for its program in this one."""
    function = function_missed_in(frame)
    entry = function.entry_ref() if isinstance(function, Traced) else None
    if entry is None or not entry.has_frameless_calls:
        return None
    caller = frame.f_back
    while caller is not None and not is_foreign(caller):
        _, called = call_in(caller)
        if called is not None:
            return None if called is entry else entry
        caller = caller.f_back
    return entry
