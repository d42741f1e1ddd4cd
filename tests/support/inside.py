"""The one way into eqxjit's private state: tests read and set it by these names.

Beside this, a test may import the unit that it tests, and use what of it has no underscore.
"""

import collections
import math
from typing import Any

import pytest

from eqxjit import _compat
from eqxjit._deploy import install as _install
from eqxjit._deploy import save as _save
from eqxjit._diagnostics import description as _description
from eqxjit._diagnostics import history as _history
from eqxjit._diagnostics import iterators as _iterators
from eqxjit._diagnostics import storms as _storms
from eqxjit._plan import budget as _budget
from eqxjit._plan import native as _native
from eqxjit._plan import native_planner as _native_planner
from eqxjit._runtime import cache as _cache
from eqxjit._runtime import events as _events
from eqxjit._runtime import specialize as _specialize
from eqxjit._trees import key_cache as _key_cache
from eqxjit._trees import snapshot as _snapshot
from eqxjit._trees import static_key as _static_key

# --- A wrapper --------------------------------------------------------------------------------


def cache(wrapper: Any) -> Any:
    """The cache of a wrapper's function."""
    return wrapper._wrapped.cache


def entries(wrapper: Any) -> list[Any]:
    """The cache entries of a wrapper's function."""
    return list(cache(wrapper).entries.values())


MOST_AT_ONCE = _specialize._MOST_AT_ONCE


def n_specialized(wrapper: Any) -> int:
    """How many structures of a wrapper's function have a specialised call in use."""
    return len(cache(wrapper).specialized)


def is_native(wrapper: Any) -> bool:
    """Return whether the native back end carries out the latest specialised call, or its match."""
    call = wrapper._dispatcher.specialized_calls()[0]
    made = call.instantiate(wrapper._dispatcher, None)
    return type(made).__name__ == "Call" or "bind_match" in call.source()


def trial_order(wrapper: Any) -> list[Any]:
    """The entries whose specialised calls a wrapper tries, in turn."""
    return [call.entry for call in wrapper._dispatcher.specialized_calls()]


def blocks(wrapper: Any) -> list[bool]:
    """Whether the programs of each structure are waited for: all must be classed."""
    assert not any(entry.unclassified for entry in entries(wrapper))
    return [entry.blocks for entry in entries(wrapper)]


def compiled_blocks(compiled: Any) -> bool:
    """The same of a function that was compiled ahead of time."""
    assert not compiled._call.entry.unclassified
    return compiled._call.entry.blocks


def mutable(wrapper: Any) -> list[Any]:
    """The static objects of a wrapped function that may be changed in place."""
    return wrapper._wrapped.mutable


def definition(wrapper: Any) -> Any:
    """How a function is recognised when it is defined again."""
    return cache(wrapper).traces.hook._definition


MAX_TEMPLATES = _history._MAX_TEMPLATES


def n_templates(wrapper: Any) -> int:
    """How many structures' descriptions are kept, of `MAX_TEMPLATES` at most."""
    return len(cache(wrapper).traces.hook._templates)


def in_progress(wrapper: Any) -> int:
    """How many traces, and phases of compilations, are taken for ones that go on."""
    # As the next call does that traces.
    _events.drop_interrupted()
    traces = cache(wrapper).traces
    return len(_events._state.phases) + len(traces._begun) + len(traces.hook._begun)


# --- Settings ---------------------------------------------------------------------------------

_MANY_NODES = _budget._MANY_NODES


def lift_budget() -> None:
    """Make specialised calls however long it takes: else a busy machine decides."""
    _budget._MANY_NODES = math.inf


def restore_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound the time for a specialised call, as it is for users."""
    monkeypatch.setattr(_budget, "_MANY_NODES", _MANY_NODES)


def take_compiling_for_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count no time for the compilation of generated source."""
    monkeypatch.setattr(_budget, "_seconds_per_character", lambda: 0.0)


def specialize_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave all calls to the generic path, as `EQXJIT_SPECIALIZE=0` does."""
    monkeypatch.setattr(_specialize, "SPECIALIZING", False)


def specialize_in_second_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no specialised call in a first call."""
    monkeypatch.setattr(_specialize, "_MOST_AT_ONCE", 0)


def keep_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each specialised call in a frame of its own."""
    monkeypatch.setattr(_compat, "_PjitFunction", None)


def scan_few_nodes(monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    """Let only so many nodes be scanned at first, in what is wrapped from now on."""
    monkeypatch.setattr(_cache, "MAX_NODES", many)


def set_platform(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    """Make it seem that JAX runs on another platform, as its exported programs call it."""
    monkeypatch.setattr(_save, "default_export_platform", lambda: platform)


def forget_storms() -> None:
    """Note no trace so far as the beginning of a storm."""
    _storms.streak_of.cache_clear()


def bound_keys(monkeypatch: pytest.MonkeyPatch, many: int) -> dict:
    """Remember the keys of so many objects; return them by address."""
    monkeypatch.setattr(_key_cache, "_MOST_MET", many)
    monkeypatch.setattr(_key_cache, "_met", {})
    return _key_cache._met


def bound_iterators(monkeypatch: pytest.MonkeyPatch, many: int) -> collections.OrderedDict:
    """Remember so many iterators that were logged; return them."""
    monkeypatch.setattr(_iterators, "_MAX_LOGGED", many)
    monkeypatch.setattr(_iterators, "_logged", collections.OrderedDict())
    return _iterators._logged


def set_seconds(report: Any, seconds: Any) -> None:
    """Have a report's only function take so long."""
    [function] = report._functions.values()
    function.seconds = seconds


ARRAY_INSTRUCTION = _native._ARRAY


def native_shape_of(inputs: bool) -> Any:
    """How the native back end is told of classes: of arguments, or of an output."""
    return _native_planner._input_shape if inputs else _native_planner._output_shape


clear_tables = _cache._clear_tables

# --- What is done -----------------------------------------------------------------------------


def link(wrapper: Any) -> Any:
    """What ties a wrapper of upstream's to ours, once an installed eqxjit has called it."""
    return _compat.fields_of(wrapper)[_install._LINK]


def sees_axis_names() -> bool:
    """Whether the names of a transformation's axes can be read from JAX."""
    return _compat._trace_context is not _compat._context_without_names


def assert_nothing_installed() -> None:
    """Nothing of Equinox is replaced."""
    assert _install._replaced == []
    assert _install._methods == {}
    assert not _install._installations


def describe_no_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail wherever an array is to be described."""
    monkeypatch.delattr(_description, "array_part")


def remember_few_parts(monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    """Drop the descriptions of older traces, where all have more parts than that."""
    monkeypatch.setattr(_history, "_MAX_PARTS", many)


def count_descriptions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """List the structures that are described from here on."""
    described, original = [], _description._template_of
    monkeypatch.setattr(
        _description, "_template_of", lambda *a: described.append(a) or original(*a)
    )
    return described


def count_snapshots(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """List the static objects of which snapshots are taken from here on."""
    taken, of, if_long = [], _key_cache.snapshots_of, _key_cache.snapshots_if_long
    monkeypatch.setattr(_key_cache, "snapshots_of", lambda v: taken.append(v) or of(v))
    monkeypatch.setattr(_key_cache, "snapshots_if_long", lambda v: taken.append(v) or if_long(v))
    return taken


def bound_elements(monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    """Hold on to fewer elements of the objects with one key."""
    monkeypatch.setattr(_key_cache, "_MOST_ELEMENTS", many)


def describe_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Describe trees of any size before a call returns."""
    monkeypatch.setattr(_description, "_FEW_PARTS", math.inf)


def take_for_living(snapshot: Any, objects: list[Any]) -> None:
    """Have a snapshot find these at the addresses where it noted what lived."""
    snapshot.addresses = _snapshot._addresses(objects)


def count_comparisons(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    """Append to a list for each `==` by which a snapshot compares."""
    monkeypatch.setattr(_static_key.ByEquality, "matches", lambda self, value: asked.append("=="))
