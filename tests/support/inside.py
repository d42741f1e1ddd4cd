"""The one way into eqxjit's private state: tests read and set it by these names.

Beside this, a test may import the unit that it tests, and use what of it has no underscore.
"""

import gc
from typing import Any

from eqxjit._core import table as _table
from eqxjit._diagnostics import history as _history


def table(wrapper: Any) -> Any:
    """The table of a wrapper's function."""
    return wrapper._function.table


def caller(wrapper: Any) -> Any:
    """The calls of a wrapper."""
    return wrapper._handler


def blocks(wrapper: Any) -> list[bool]:
    """For each structure, whether calls wait for a program: programs that were run must be read."""
    entries = [*table(wrapper).entries.values()]
    programs = [[ref() for _, ref in entry.outs.values()] for entry in entries]
    return [any(p.must_wait for p in each if p is not None and not p.unread) for each in programs]


def clear_tables() -> None:
    """Drop the programs of all functions."""
    for found in gc.get_objects():
        if type(found) is _table.Table:
            found.clear()


def forget_families() -> None:
    """Note no function so far as one with which others are compared."""
    _history._family_of.cache_clear()
