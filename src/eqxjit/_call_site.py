"""Finds the user's line that made a call."""

import contextlib
import os
import sys
from types import FrameType
from typing import NamedTuple

import equinox
import jax

from ._source import GENERATED_FOLDER

#: How the paths of files begin that aren't the user's.
LIBRARY_FILES = (
    *(os.path.dirname(file) + os.sep for file in (__file__, jax.__file__, equinox.__file__)),
    GENERATED_FOLDER + "/",
    # By which some of our own frames are entered.
    contextlib.__file__,
)


class CallSite(NamedTuple):
    """A line of the user's: its file, and its number from 1."""

    filename: str
    line: int

    def __str__(self) -> str:
        return f"{os.path.basename(self.filename)}:{self.line}"


def call_site() -> CallSite:
    """The innermost line on the stack that isn't of eqxjit, JAX or Equinox."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(LIBRARY_FILES):
            return CallSite(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return CallSite("<unknown>", 0)
