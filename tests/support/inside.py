"""Access to eqxjit's private state. Tests read and set private state only by these functions.

A test may also import the unit that it tests, and use its names without an underscore.
"""

import gc
from typing import Any

from eqxjit._core import table as _table
from eqxjit._diagnostics import history as _history


def table(wrapper: Any) -> Any:
    """Return the table of a wrapper's function."""
    return wrapper._function.table


def caller(wrapper: Any) -> Any:
    """Return the object that handles the calls of a wrapper."""
    return wrapper._handler


def blocks(wrapper: Any) -> list[bool]:
    """Return, for each structure, whether calls wait for one of the programs that were read."""
    entries = [*table(wrapper).entries.values()]
    programs = [[ref() for _, ref in entry.outs.values()] for entry in entries]
    return [any(p.must_wait for p in each if p is not None and not p.unread) for each in programs]


def clear_tables() -> None:
    """Drop the programs of all functions."""
    for found in gc.get_objects():
        if type(found) is _table.Table:
            found.clear()


def forget_families() -> None:
    """Forget the functions with which later functions would be compared."""
    _history._family_of.cache_clear()


def interceptor_of(wrapper: Any) -> Any:
    """Return what a trial that is on calls instead of a wrapper."""
    [interceptor] = [each for each in gc.get_referents(wrapper) if hasattr(each, "swap")]
    return interceptor
