"""Lines of code: which of them the user wrote, which one made a call, and what to call them."""

import builtins
import contextlib
import functools
import os
import re
import sys
import sysconfig
from types import FrameType
from typing import NamedTuple

import equinox
import jax

from .source import GENERATED_FOLDER

#: How the paths of files begin that are of JAX, Equinox or eqxjit.
LIBRARY_FILES = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    *(os.path.dirname(file) + os.sep for file in (jax.__file__, equinox.__file__)),
    GENERATED_FOLDER + "/",
    # By which some of our own frames are entered.
    contextlib.__file__,
)

# The same for the standard library, and for source that was generated.
_OTHER_LIBRARY_FILES = (
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")),
    *("<frozen ", "<@beartype", "<attrs generated", "<decorator-gen", "<__array_function__"),
)
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")

# What IPython calls a cell where it doesn't write the cell to a file.
_IPYTHON_INPUT = re.compile(r"<ipython-input-(\d+)-")


def is_users(filename: str) -> bool:
    """Return whether a file is the user's: neither installed nor of the standard library."""
    if filename.startswith((*LIBRARY_FILES, *_OTHER_LIBRARY_FILES)):
        return False
    return not _INSTALLED.search(filename)


def is_users_module(name: str) -> bool:
    """Return whether a module, by its name, is the user's."""
    if not isinstance(name, str) or name in sys.builtin_module_names:
        return False
    filename = getattr(sys.modules.get(name), "__file__", None)
    # Without a file it is a session, a notebook, or one that the user made.
    return not isinstance(filename, str) or is_users(filename)


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
    try:
        # Not imported here: without IPython there is no cell.
        get_ipython = getattr(builtins, "get_ipython", None) or sys.modules["IPython"].get_ipython
        label = get_ipython().compile.format_code_name(filename)
        if label is not None:
            return label[1]
    except Exception:
        # No IPython, no session of it, or one of another release.
        pass
    match = _IPYTHON_INPUT.match(filename)
    return f"In[{match[1]}]" if match else ""


def _path(filename: str) -> str:
    try:
        here = os.getcwd()
    except OSError:
        # It was removed.
        here = ""
    return _path_from(here, os.path.expanduser("~"), filename)


@functools.lru_cache(maxsize=256)
def _path_from(here: str, home: str, filename: str) -> str:
    if not os.path.isabs(filename):
        return filename
    filename = os.path.normpath(filename)
    # The working directory is known without symbolic links.
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
