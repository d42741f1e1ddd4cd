"""The one way into eqxjit's private state: tests read and set it by these names.

Beside this, a test may import the unit that it tests, and use what of it has no underscore.
"""

from typing import Any

import pytest

from eqxjit import _compat
from eqxjit._core import function as _function
from eqxjit._deploy import install as _install
from eqxjit._deploy import saved as _saved
from eqxjit._diagnostics import history as _history

# --- A wrapper --------------------------------------------------------------------------------


def table(wrapper: Any) -> Any:
    """The table of a wrapper's function."""
    return wrapper._function.table


def caller(wrapper: Any) -> Any:
    """The calls of a wrapper."""
    return wrapper._caller


def entries(wrapper: Any) -> list[Any]:
    """The cache entries of a wrapper's function."""
    return list(table(wrapper).entries.values())


def n_fast(wrapper: Any) -> int:
    """How many structures of a wrapper's function have a fast path."""
    return len(table(wrapper).fasts)


def blocks(wrapper: Any) -> list[bool]:
    """Whether the programs of each structure are waited for: all must be classified."""
    assert not any(entry.pending for entry in entries(wrapper))
    return [entry.blocks for entry in entries(wrapper)]


def compiled_blocks(compiled: Any) -> bool:
    """The same of a function that was compiled ahead of time."""
    return compiled._caller.entry.blocks


def in_progress(wrapper: Any) -> int:
    """How many traces are taken for ones that go on."""
    return len(table(wrapper).history._begun)


# --- Settings ---------------------------------------------------------------------------------


def set_platform(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    """Make it seem that JAX runs on another platform, as its exported programs call it."""
    monkeypatch.setattr(_saved, "default_export_platform", lambda: platform)


def deserialiser() -> Any:
    """JAX's function that reads the program of a saved file."""
    return _saved.deserialize


def set_deserialiser(monkeypatch: pytest.MonkeyPatch, read: Any) -> None:
    """Read the programs of saved files by another function than JAX's."""
    monkeypatch.setattr(_saved, "deserialize", read)


def forget_storms() -> None:
    """Note no trace so far as the beginning of a storm."""
    _history.definition_at.cache_clear()


def set_seconds(report: Any, seconds: Any) -> None:
    """Have a report's only function take so long."""
    spans = {span.trace: span for _, span in report._events if span.trace is not None}.values()
    report._events.clear()
    start = 0.0
    for span in spans:
        for phase, total in vars(seconds).items():
            share = total / len(spans)
            report._events.append((0, span._replace(phase=phase, start=start, seconds=share)))
            start += share


clear_tables = _function.clear_tables

# --- What is done -----------------------------------------------------------------------------


def link(wrapper: Any) -> Any:
    """What ties a wrapper of upstream's to ours, once an installed eqxjit has called it."""
    return _compat.fields_of(wrapper)[_install._LINK]


def sees_axis_names() -> bool:
    """Whether the names of a transformation's axes can be read from JAX."""
    return "axis_env_state" in _compat._trace_context_names()


def assert_nothing_installed() -> None:
    """Nothing of Equinox is replaced."""
    assert not _install._installations
