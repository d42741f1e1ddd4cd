"""Sees the compilations that JAX starts by itself in a warm call, without tracing again.

A new device, for instance: the jaxpr stays, but what it is lowered to may hold other custom calls.
"""

import os
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

import jax

from ._source import GENERATED_FOLDER

if TYPE_CHECKING:
    from ._entry import Entry

#: The entries with a program that was compiled in a warm call and hasn't been looked at.
recompiled: set["Entry"] = set()

#: The variable, local or global, that holds the entry whose jitted function a frame calls; `None`
#: where the call is in the miss path, which looks at its program anyway.
ENTRY_VARIABLE = "__eqxjit_entry__"

_COMPILED = "/jax/core/compile/backend_compile_duration"
_OUR_FILES = (os.path.dirname(__file__) + os.sep, GENERATED_FOLDER + "/")


def _on_duration(event: str, duration_secs: float, **_: Any) -> None:
    if event == _COMPILED:
        entry = _calling_entry(sys._getframe(1))
        if entry is not None:
            recompiled.add(entry)


def _calling_entry(frame: FrameType | None) -> "Entry | None":
    """The entry of the innermost call through eqxjit on the stack."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OUR_FILES):
            for variables in (frame.f_locals, frame.f_globals):
                if ENTRY_VARIABLE in variables:
                    return variables[ENTRY_VARIABLE]
        frame = frame.f_back
    return None


jax.monitoring.register_event_duration_secs_listener(_on_duration)
