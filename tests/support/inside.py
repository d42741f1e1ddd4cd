"""The one way into eqxjit's private state: tests read and set it by these names.

Beside this, a test may import the unit that it tests, and use what of it has no underscore.
"""

from typing import Any

import pytest

from eqxjit import _compat
from eqxjit._core import function as _function
from eqxjit._deploy import install as _install
from eqxjit._deploy import saved as _saved

# --- A wrapper --------------------------------------------------------------------------------


def table(wrapper: Any) -> Any:
    """The table of a wrapper's function."""
    return wrapper._function.table


def caller(wrapper: Any) -> Any:
    """The calls of a wrapper."""
    return wrapper._caller


def blocks(wrapper: Any) -> list[bool]:
    """Whether the programs of each structure are waited for: all must be classified."""
    entries = [*table(wrapper).entries.values()]
    assert not any(entry.pending for entry in entries)
    return [entry.blocks for entry in entries]


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


clear_tables = _function.clear_tables

# --- What is done -----------------------------------------------------------------------------


def link(wrapper: Any) -> Any:
    """What ties a wrapper of upstream's to ours, once an installed eqxjit has called it."""
    return _compat.fields_of(wrapper)[_install._LINK]


def assert_nothing_installed() -> None:
    """Nothing of Equinox is replaced."""
    assert not _install._installations
