"""Keeps garbage collection out of what makes very many objects, none of which is garbage."""

import gc
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")

# From so many nodes on, a collection would take longer than what it interrupts.
_MANY_NODES = 1_000


def without_collecting(action: Callable[[], _Result], n_nodes: int = _MANY_NODES) -> _Result:
    """Return `action()`, while no garbage is collected if it is about many nodes."""
    collects = n_nodes >= _MANY_NODES and gc.isenabled()
    try:
        if collects:
            gc.disable()
        return action()
    finally:
        if collects:
            # An interrupt may come before the first.
            try:
                gc.enable()
            finally:
                gc.enable()
