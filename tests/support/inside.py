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
    """Whether the programs of each structure are waited for: all must be classified."""
    entries = [*table(wrapper).entries.values()]
    assert not any(entry.pending or entry.unclassified for entry in entries)
    return [entry.must_wait for entry in entries]


def clear_tables() -> None:
    """Drop the programs of all functions."""
    for found in gc.get_objects():
        if type(found) is _table.Table:
            found.clear()


def forget_families() -> None:
    """Note no function so far as one with which others are compared."""
    _history._family_of.cache_clear()
