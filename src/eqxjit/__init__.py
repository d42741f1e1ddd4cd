"""eqxjit: `equinox.filter_jit`, fast to call.

from eqxjit import filter_jit  # instead of: from equinox import filter_jit
"""

import os as _os
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

from ._call_site import CallSite
from ._compat import exclude_from_locations as _exclude_from_locations
from ._compat import exclude_from_tracebacks as _exclude_from_tracebacks
from ._counter import TooManyTracesError
from ._differences import Difference
from ._explain import explain_retraces
from ._freeze import FrozenPjitFunction, freeze, load
from ._history import History as _History
from ._hooks import install as _install_hook
from ._install import Installation, install, uninstall
from ._lower import Compiled, CompiledProgram, Lowered
from ._pack import Packed, pack
from ._program import CacheInfo
from ._report import CompileReport, ReportRow, compile_report
from ._trace import Seconds, Trace
from ._tracing import currently_jitting
from ._wrapper import (
    BoundFilterPjitFunction,
    FilterPjitFunction,
    fast_filter_jit,
    filter_jit,
)

if _TYPE_CHECKING:
    __version__: str

__all__ = [
    "BoundFilterPjitFunction",
    "CacheInfo",
    "CallSite",
    "CompileReport",
    "Compiled",
    "CompiledProgram",
    "Difference",
    "FilterPjitFunction",
    "FrozenPjitFunction",
    "Installation",
    "Lowered",
    "Packed",
    "ReportRow",
    "Seconds",
    "TooManyTracesError",
    "Trace",
    "compile_report",
    "currently_jitting",
    "explain_retraces",
    "fast_filter_jit",
    "filter_jit",
    "freeze",
    "install",
    "load",
    "pack",
    "uninstall",
]

# Users know them by this name: in tracebacks, pickles and `help`.
for _name in __all__:
    _value = globals()[_name]
    if isinstance(_value, type):
        # Where doctest looks for the examples of its methods, which are of that file still.
        vars(_sys.modules[_value.__module__]).setdefault("__test__", {})[_name] = _value
        _value.__module__ = __name__

_install_hook(_History)

_exclude_from_tracebacks(_os.path.dirname(__file__))
_exclude_from_locations(_os.path.dirname(__file__) + _os.sep)


def __getattr__(name: str) -> str:
    # Looked up when it is asked for: that takes longer than any import here.
    if name == "__version__":
        from importlib.metadata import version

        return globals().setdefault(name, version(__name__))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
