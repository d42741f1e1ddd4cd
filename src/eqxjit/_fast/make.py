"""Makes fast paths: in C where that is built, in generated Python elsewhere."""

from typing import Any

import numpy as np
from jax.core import Tracer

from .._compat import (
    ArrayImpl,
    connect,
    flatten_one_level,
    native,
    registered_nodes,
    unflatten_node,
)
from .._spec.arrays import passed, wait_for
from .._spec.static_key import Opaque, same
from .._spec.tree import ARRAY, ARRAY_CLASSES, is_array
from .writer import Writer, is_for_slow_path

if native is not None:
    # What it compares with, and calls.
    native.setup(
        *(ARRAY, ArrayImpl, Tracer, np.ndarray, ARRAY_CLASSES, is_array, passed),
        *(flatten_one_level, registered_nodes, same, unflatten_node, wait_for, Opaque),
        is_for_slow_path,
    )


class PythonFast:
    """The fast path of an entry in generated Python, for any wrapper of its function.

    - `entry`: the entry.
    - `hits`: how many calls it has served; `hits_before`: as of when the table last looked.
    - `is_first`: whether it was the first of its function's fast paths when it last ran. A warm
        call reads this flag alone.
    """

    __slots__ = "_fasts", "_make", "entry", "hits", "hits_before", "is_first"

    def __init__(self, function: Any, entry: Any):
        self.entry = entry
        self.hits = self.hits_before = 0
        self.is_first = False
        self._fasts: list[Any] = []
        _, self._make = Writer(function, entry).write()

    def link(self, fasts: list[Any]) -> None:
        """Tell it the list of its function's fast paths, of which the latest hit is the first."""
        self._fasts = fasts
        self.is_first = fasts[:1] == [self]

    def move_to_front(self) -> None:
        fasts = self._fasts
        for other in fasts[:]:
            other.is_first = False
        # Without a lock: in the worst case another thread's order wins.
        try:
            fasts.remove(self)
        except ValueError:
            # It was dropped meanwhile.
            return
        fasts.insert(0, self)
        self.is_first = True

    def instantiate(self, handler: Any, otherwise: Any) -> Any:
        signature, statics = handler.function.signature, handler.function.statics
        bound = handler, otherwise, self.entry.jitted, self
        made = self._make(*bound, *statics, *handler.fun_arrays)
        made.__name__, made.__qualname__ = signature.name, signature.called
        return made


def native_enabled() -> bool:
    """Return whether calls run in C: the native back end is built, and not disabled.

    Otherwise calls run in generated Python, with the same results.

    !!! example

        ```python
        >>> import eqxjit
        >>> eqxjit.native_enabled() in (True, False)
        True

        ```
    """
    return native is not None


def link(wrapper: Any, handler: Any) -> None:
    """Have a wrapper call the fast paths of its handler in turn, then the slow path."""
    function, otherwise = handler.function, handler.slow_call
    if native is not None:
        names = function.signature.keywords_by_position
        parts = handler, handler.fun_arrays, function.statics, names, handler.fasts
        connect(wrapper, otherwise, *parts)
        return
    for fast in handler.fasts[::-1]:
        fast.link(handler.fasts)
        otherwise = fast.instantiate(handler, otherwise)
    connect(wrapper, otherwise)
