"""eqxjit: `equinox.filter_jit`, fast to call.

from eqxjit import filter_jit  # instead of: from equinox import filter_jit
"""

import os as _os

from ._compat import exclude_from_tracebacks as _exclude_from_tracebacks
from ._program import CacheInfo
from ._tracing import currently_jitting
from ._wrapper import fast_filter_jit, filter_jit

__all__ = ["CacheInfo", "currently_jitting", "fast_filter_jit", "filter_jit"]

_exclude_from_tracebacks(_os.path.dirname(__file__))
