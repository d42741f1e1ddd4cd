"""The types of eqxjit's results, for annotations and `isinstance`.

Functions and methods of eqxjit make them, so that you needn't call them.
"""

from ._core.ahead import CompileCost, Compiled, Lowered
from ._core.table import CacheInfo
from ._core.wrapper import BoundJitFunction, JitFunction
from ._deploy.freeze import FrozenFunction
from ._diagnostics.differences import Difference
from ._diagnostics.report import CompileReport, ReportRow
from ._diagnostics.size import MadeArray, Memory, Program
from ._diagnostics.timeline import ReportSpan
from ._diagnostics.trace import Seconds, Trace, TraceList
from ._places import CallSite

__all__ = [
    "BoundJitFunction",
    "CacheInfo",
    "CallSite",
    "CompileCost",
    "CompileReport",
    "Compiled",
    "Difference",
    "FrozenFunction",
    "JitFunction",
    "Lowered",
    "MadeArray",
    "Memory",
    "Program",
    "ReportRow",
    "ReportSpan",
    "Seconds",
    "Trace",
    "TraceList",
]
