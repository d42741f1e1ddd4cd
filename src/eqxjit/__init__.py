"""eqxjit: `equinox.filter_jit`, fast to call.

from eqxjit import filter_jit  # instead of: from equinox import filter_jit
"""

import os as _os

from ._compat import exclude_from_tracebacks as _exclude_from_tracebacks
from ._differences import Difference
from ._explain import explain_retraces
from ._freeze import CompiledProgram, FrozenPjitFunction, freeze, load
from ._history import RetraceWarning, TooManyTracesError
from ._install import Installation, install, uninstall
from ._program import CacheInfo
from ._report import CompileReport, ReportRow, compile_report
from ._trace import Trace
from ._tracing import currently_jitting
from ._wrapper import fast_filter_jit, filter_jit

__all__ = [
    "CacheInfo",
    "CompileReport",
    "CompiledProgram",
    "Difference",
    "FrozenPjitFunction",
    "Installation",
    "ReportRow",
    "RetraceWarning",
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
    "uninstall",
]

_exclude_from_tracebacks(_os.path.dirname(__file__))
