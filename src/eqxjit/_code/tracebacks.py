"""Leaves our frames out of the tracebacks that users see, whatever shows them.

JAX's filter does so for printed tracebacks alone, and only where it isn't switched off.
"""

import sys
from types import TracebackType
from typing import Any

from .files import OUR_FILES


def trim() -> None:
    """Trim the traceback of the exception that the caller handles, before `raise`.

    Of our frames two are left: the caller's, which stands for the jitted call, and the innermost.
    """
    error = sys.exception()
    assert error is not None
    error.__traceback__ = _trimmed(error.__traceback__)


def _trimmed(traceback: TracebackType | None) -> TracebackType | None:
    entries: list[TracebackType] = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    trimmed: TracebackType | None = None
    for index in reversed(range(len(entries))):
        entry = entries[index]
        frame = entry.tb_frame
        is_end = index in (0, len(entries) - 1)
        if is_end or not frame.f_code.co_filename.startswith(OUR_FILES):
            trimmed = TracebackType(trimmed, frame, entry.tb_lasti, entry.tb_lineno)
    return trimmed


class _Trimming:
    """A context whose exceptions leave it with a trimmed traceback."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            error.__traceback__ = _trimmed(error.__traceback__)


#: For functions that aren't generated. (Not a generator, which would add frames.)
trimming = _Trimming()
