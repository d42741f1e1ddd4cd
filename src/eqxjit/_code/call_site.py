"""Lines of code: which of the user's made a call, and what to call it."""

import builtins
import functools
import os
import re
import sys
from types import FrameType
from typing import Any, NamedTuple

from .._interruptions import unless_it_raises
from .files import LIBRARY_FILES, is_users

# What IPython calls a cell where it doesn't write the cell to a file.
_IPYTHON_INPUT = re.compile(r"<ipython-input-(\d+)-")


class CallSite(NamedTuple):
    """A line of the user's: its file, and its number from 1."""

    filename: str
    line: int

    def __str__(self) -> str:
        return location(self.filename, self.line)


def call_site() -> CallSite:
    """Return the innermost line on the stack that is the user's, or at least isn't JAX's."""
    innermost: CallSite | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(LIBRARY_FILES):
            site = CallSite(filename, frame.f_lineno)
            if is_users(filename):
                return site
            innermost = innermost or site
        frame = frame.f_back
    return innermost or CallSite("<unknown>", 0)


def location(filename: str, line: int) -> str:
    """Return what to call a line: `src/train.py:31`, `Cell In[11], line 3`.

    The path is relative to the working directory; of a file elsewhere it is absolute, or begins
    with `~`.
    """
    cell = _cell(filename)
    return f"Cell {cell}, line {line}" if cell else f"{_path(filename)}:{line}"


def _cell(filename: str) -> str:
    """Return what IPython calls the cell that it gave this file name; empty if it is none."""

    def label() -> Any:
        # Not imported here: without IPython there is no cell.
        get_ipython = getattr(builtins, "get_ipython", None) or sys.modules["IPython"].get_ipython
        return get_ipython().compile.format_code_name(filename)[1]

    # No IPython, no session of it, no cell of it, or one of another release.
    found = unless_it_raises(label, None) if _may_have_cells() else None
    if found is not None:
        return found
    match = _IPYTHON_INPUT.match(filename)
    return f"In[{match[1]}]" if match else ""


def _may_have_cells() -> bool:
    return "IPython" in sys.modules or hasattr(builtins, "get_ipython")


def _path(filename: str) -> str:
    # It may have been removed.
    here = unless_it_raises(os.getcwd, "")
    return _path_from(here, os.path.expanduser("~"), filename)


@functools.lru_cache(maxsize=256)
def _path_from(here: str, home: str, filename: str) -> str:
    if not os.path.isabs(filename):
        return filename
    filename = os.path.normpath(filename)
    # The working directory comes without symbolic links.
    return (
        _below(here, filename, "")
        or _below(here, os.path.realpath(filename), "")
        or _below(home, filename, os.path.join("~", ""))
        or filename
    )


def _below(folder: str, filename: str, prefix: str) -> str:
    """Return the path from a folder to a file below it; empty for any other file."""
    start = folder + os.sep
    # All is below the root, which is no help.
    if os.path.dirname(folder) == folder or not filename.startswith(start):
        return ""
    return prefix + filename[len(start) :]
