"""eqxjit: `equinox.filter_jit`, fast to call.

from eqxjit import filter_jit  # instead of: from equinox import filter_jit
"""

import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import get_overloads as _get_overloads
from typing import overload as _typing_overload

from ._code.call_site import CallSite
from ._core.ahead import CompileCost, Compiled, Lowered
from ._core.counter import TooManyTracesError
from ._core.counter import install as _install_hook
from ._core.donation import _Pattern
from ._core.options import Options as _Options
from ._core.staging import currently_jitting
from ._core.table import CacheInfo
from ._core.wrapper import (
    BoundJitFunction,
    JitFunction,
    _blank,
    _found_or_blank,
    _named,
    _wrap,
    fast_filter_jit,
    filter_jit,
)
from ._deploy.freeze import FrozenFunction, freeze, load
from ._deploy.install import Installation, install, uninstall
from ._deploy.layout import LeafType as _LeafType
from ._deploy.layout import Slot as _Slot
from ._deploy.layout import _from_skeleton
from ._deploy.pack import Packed, pack
from ._diagnostics.differences import Difference
from ._diagnostics.history import History as _History
from ._diagnostics.log import explain_retraces
from ._diagnostics.report import CompileReport, ReportRow, compile_report
from ._diagnostics.timeline import ReportSpan
from ._diagnostics.trace import Seconds, Trace, TraceList
from ._fast.make import native_enabled

if _TYPE_CHECKING:
    __version__: str

__all__ = [
    "BoundJitFunction",
    "CacheInfo",
    "CallSite",
    "CompileCost",
    "CompileReport",
    "Compiled",
    "Difference",
    "FrozenFunction",
    "Installation",
    "JitFunction",
    "Lowered",
    "Packed",
    "ReportRow",
    "ReportSpan",
    "Seconds",
    "TooManyTracesError",
    "Trace",
    "TraceList",
    "compile_report",
    "currently_jitting",
    "explain_retraces",
    "fast_filter_jit",
    "filter_jit",
    "freeze",
    "install",
    "load",
    "native_enabled",
    "pack",
    "uninstall",
]

# Users know them by this name: in tracebacks, pickles and `help`.
for _name in __all__:
    _value = globals()[_name]
    if isinstance(_value, type):
        # Where doctest looks for the examples of its methods, which are of that file still.
        vars(_sys.modules[_value.__module__]).setdefault("__test__", {})[_name] = _value
    else:
        for _overload in _get_overloads(_value):
            _overload.__module__ = __name__
            _typing_overload(_overload)
    _value.__module__ = __name__

# What is pickled refers to these: a pickle is read after private modules have moved.
for _value in (_blank, _found_or_blank, _named, _wrap, _from_skeleton, _Pattern):
    _value.__module__ = __name__
for _value in (_LeafType, _Options, _Slot):
    _value.__module__, _value.__qualname__ = __name__, f"_{_value.__name__}"

_install_hook(_History)


def __getattr__(name: str) -> str:
    # Looked up when it is asked for: that takes longer than any import here.
    if name == "__version__":
        from importlib.metadata import version

        return globals().setdefault(name, version(__name__))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
