"""eqxjit: `equinox.filter_jit`, fast to call.

from eqxjit import filter_jit  # instead of: from equinox import filter_jit
"""

import importlib.metadata as _metadata
import inspect as _inspect
import typing as _typing

from . import types
from ._core.options import Options as _Options
from ._core.traced import currently_jitting
from ._core.wrapper import _blank, _wrap, fast_filter_jit, filter_jit
from ._deploy.freeze import freeze, load
from ._deploy.install import install, uninstall
from ._deploy.pack import Packed, _from_skeleton, pack
from ._diagnostics.history import TooManyTracesError
from ._diagnostics.log import explain_retraces
from ._diagnostics.log import logger as _logger
from ._fast.make import native_enabled
from ._reports.report import compile_report
from ._reports.trial import trial
from ._text import unknown_switches as _unknown_switches

__all__ = [
    "Packed",
    "TooManyTracesError",
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
    "trial",
    "uninstall",
]

# Tracebacks, pickles and `help` show public names by their public module.
for _name in __all__:
    globals()[_name].__module__ = __name__
for _value in filter(_inspect.isclass, [*vars(types).values()]):
    _value.__module__ = types.__name__

# Pickles refer to these private functions, and must still load after a module has moved.
for _value in (_blank, _wrap, _from_skeleton):
    _value.__module__ = __name__
_Options.__module__ = __name__
_Options.__qualname__ = "_Options"

# Without a warning, the user of a misspelt variable wouldn't know that it has no effect.
for _sentence in _unknown_switches():
    _logger.warning("%s", _sentence)

__version__: str

if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> str:
        # Computed lazily, because reading the metadata takes longer than any import here.
        if name == "__version__":
            return _metadata.version(__name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
