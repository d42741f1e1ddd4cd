"""Finds calls through eqxjit on the stack: an interrupt leaves nothing to be unset there."""

from types import FrameType

from .._code.tracebacks import OUR_FILES
from .entry import ENTRY_VARIABLE, CacheEntry
from .request import CALL_VARIABLE, Call


def call_in(frame: FrameType) -> tuple[Call | None, CacheEntry | None]:
    """Return the call that a frame makes in the miss path, or the entry of one that is warm."""
    if not frame.f_code.co_filename.startswith(OUR_FILES):
        return None, None
    variables = frame.f_locals
    call = variables.get(CALL_VARIABLE)
    if call is not None:
        return call, None
    return None, variables.get(ENTRY_VARIABLE) or frame.f_globals.get(ENTRY_VARIABLE)
