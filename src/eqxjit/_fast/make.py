"""Creates fast paths: in C if the native back end is in use, and in generated Python otherwise."""

from typing import Any

import numpy as np
from jax.core import Tracer

from .._compat import (
    ArrayImpl,
    EvalTrace,
    connect,
    flatten_one_level,
    native,
    registered_nodes,
    trace_ctx,
    unflatten_node,
)
from .._signals import may_be_dropped
from .._spec.arrays import passed, wait_for
from .._spec.static_key import Opaque, same
from .._spec.tree import ARRAY, ARRAY_CLASSES, DICT, is_array
from .writer import TooLarge, Writer, is_for_slow_path

if native is not None:
    # C compares with these objects, and calls them.
    native.setup(
        ARRAY,
        ArrayImpl,
        Tracer,
        np.ndarray,
        ARRAY_CLASSES,
        is_array,
        passed,
        flatten_one_level,
        registered_nodes,
        same,
        unflatten_node,
        wait_for,
        Opaque,
        is_for_slow_path,
        may_be_dropped,
        trace_ctx,
        EvalTrace,
    )


class PythonFast:
    """The fast path of an entry in generated Python. It serves all wrappers of its function.

    - `entry`: the entry.
    - `hits`: how many calls this fast path has served.
    - `hits_before`: the value of `hits` when the table last looked.
    - `is_first`: whether this fast path is at the front of its list, as far as it knows. Each call
        reads this flag, because looking at the list takes longer.
    """

    __slots__ = "_fasts", "_make_call", "entry", "hits", "hits_before", "is_first"

    def __init__(self, function: Any, entry: Any):
        """**Raises:** `TooLarge` if the trees of the entry are too large for generated Python."""
        self.entry = entry
        self.hits = 0
        self.hits_before = 0
        self.is_first = False
        self._fasts: list[Any] = []
        _, self._make_call = Writer(function, entry).write()

    def link(self, fasts: list[Any]) -> None:
        """Set the list that holds this fast path. The fast path of the latest call comes first."""
        self._fasts = fasts
        self.is_first = fasts[:1] == [self]

    def move_to_front(self) -> None:
        """Move this fast path to the front of its list, unless the table has dropped it."""
        fasts = self._fasts
        for other in fasts[:]:
            other.is_first = False
        # Without a lock, because the order matters for speed alone. If another thread moves a fast
        # path at the same time, either may end up first.
        try:
            fasts.remove(self)
        except ValueError:
            # The table has dropped this fast path since the call began.
            return
        fasts.insert(0, self)
        self.is_first = True

    def instantiate(self, handler: Any, otherwise: Any) -> Any:
        """Return the generated function for one wrapper.

        **Arguments:**

        - `handler`: the `CallHandler` of the wrapper.
        - `otherwise`: the callable that makes the call if the guards don't match: the next fast
            path, or the slow path.
        """
        function = handler.function
        fun_variables = *function.statics, *handler.fun_arrays
        call = self._make_call(handler, otherwise, self.entry.jitted, self, *fun_variables)
        # Python's error for a call with wrong arguments shows the qualified name.
        call.__name__ = function.signature.name
        call.__qualname__ = function.signature.called
        return call


def fast_path(call: Any) -> Any | None:
    """Return a fast path for calls like this one, which the slow path has run.

    `None` if a fast path can't serve such calls. The fast path may not match this very call any
    more, because its function may have changed an argument in place. The slow path then serves the
    next such call, too.
    """
    entry = call.entry
    args_spec, kwargs_spec = call.spec[3:]
    if kwargs_spec[0] != DICT:
        # `kwargs` isn't a plain dict of strings, because the name of a keyword argument is an
        # object of a subclass of `str`. The guards don't know such dicts.
        return None
    if native is not None:
        return native.Fast(
            entry,
            entry.jitted,
            args_spec,
            kwargs_spec,
            entry.outs,
            len(call.statics),
            entry.n_arrays,
            entry.n_fun,
        )
    try:
        return PythonFast(call.function, entry)
    except TooLarge:
        return None


def native_enabled() -> bool:
    """Return whether calls run in C: the native back end is built, and not disabled.

    Otherwise calls run in generated Python, with the same results.

    **Returns:**

    True if calls run in C.

    !!! example

        ```python
        >>> import eqxjit
        >>> eqxjit.native_enabled() in (True, False)
        True

        ```
    """
    return native is not None


def link(wrapper: Any, handler: Any) -> None:
    """Have a wrapper try the fast paths of its handler in turn, and then call the slow path."""
    function = handler.function
    if native is not None:
        connect(
            wrapper,
            handler.slow_call,
            handler,
            handler.fun_arrays,
            function.statics,
            function.signature.keywords_by_position,
            handler.fasts,
        )
        return
    # Each function calls the next one, so the last is created first.
    called = handler.slow_call
    for fast in handler.fasts[::-1]:
        fast.link(handler.fasts)
        called = fast.instantiate(handler, called)
    connect(wrapper, called)
