"""The types of eqxjit's results, for annotations and `isinstance`.

Functions and methods of eqxjit return objects of these types. You needn't create any yourself.
"""

from ._core.ahead import CompileCost as CompileCost
from ._core.ahead import Compiled as Compiled
from ._core.ahead import Lowered as Lowered
from ._core.table import CacheInfo as CacheInfo
from ._core.wrapper import BoundJitFunction as BoundJitFunction
from ._core.wrapper import JitFunction as JitFunction
from ._deploy.freeze import FrozenFunction as FrozenFunction
from ._diagnostics.constants import CapturedArray as CapturedArray
from ._diagnostics.differences import Difference as Difference
from ._diagnostics.record import Seconds as Seconds
from ._diagnostics.size import MadeArray as MadeArray
from ._diagnostics.size import Memory as Memory
from ._diagnostics.size import Program as Program
from ._diagnostics.trace import Trace as Trace
from ._diagnostics.trace import TraceList as TraceList
from ._places import CallSite as CallSite
from ._reports.report import CompileReport as CompileReport
from ._reports.report import ReportRow as ReportRow
from ._reports.timeline import ReportSpan as ReportSpan
from ._reports.trial import Trial as Trial
from ._reports.trial import TrialFunction as TrialFunction
from ._reports.trial import TrialLine as TrialLine
