"""Makes fast paths: in C where that is built, in generated Python elsewhere.

Each is tried on the call that it is made for: where it doesn't do the same, the slow path serves.
"""

import itertools
import operator
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from .._compat import (
    DEBUGGING,
    ArrayImpl,
    flatten_one_level,
    native_back_end,
    unflatten_node,
)
from .._interruptions import raise_if_interruption
from .._spec.static import Opaque, same
from .._spec.tree import ARRAY, DICT, split
from .signature import KEYWORD_ONLY, POSITIONAL_ONLY, VAR_KEYWORD, VAR_POSITIONAL
from .source import FastSource, TooLarge, write

_native = native_back_end()


def set_up(take: Any, wait_for: Any) -> None:
    """Give the native back end what it calls: of the core, of the trees, and of JAX."""
    if _native is not None:
        _native.setup(
            ARRAY,
            ArrayImpl,
            np.ndarray,
            take,
            flatten_one_level,
            same,
            unflatten_node,
            wait_for,
            Opaque,
        )


class PythonFast:
    """The fast path of an entry in generated Python, for any wrapper of its function.

    - `entry`: the entry.
    - `hits`: how many calls it has served; `hits_before`: as of when the table last looked.
    """

    def __init__(self, entry: Any, written: FastSource):
        self.entry = entry
        self.hits_before = 0
        #: Its source compares what programs read.
        self.is_stale = False
        self.written = written
        #: Its `next` counts a hit: in C, hence without a lock, and faster than an addition.
        self._counter: Iterator[None] = itertools.repeat(None, sys.maxsize)

    @property
    def hits(self) -> int:
        """The number of calls it has served."""
        return sys.maxsize - operator.length_hint(self._counter)

    def instantiate(self, caller: Any, otherwise: Any, jitted: Any) -> Any:
        """Return the function for one wrapper."""
        statics = caller.function.statics
        made = self.written.make(
            caller, otherwise, jitted, self._counter, *caller.fun_arrays, *statics
        )
        signature = caller.function.signature
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
    return _native is not None


def fast_path(
    caller: Any, call: Any, output: Any, result: Any, helpers: dict[str, Any]
) -> Any | None:
    """Return a fast path for calls like this one; None if there is none that does the same.

    **Arguments:**

    - `caller`: that of the wrapper.
    - `call`: the call, which the slow path has made.
    - `output`, `result`: what JAX returned, and what the user's function did.
    - `helpers`: functions of the core that generated Python calls.
    """
    entry = call.entry
    kwargs = call.spec[4]
    if kwargs[0] != DICT:
        # A name of a class derived from `str`.
        return None
    if _native is not None:
        fast = native_fast(call, entry.jitted)
    else:

        def make() -> PythonFast:
            written = write(call.function.signature, call.spec, entry, helpers)
            return PythonFast(entry, written)

        try:
            fast = make()
        except TooLarge:
            return None
        except (RecursionError, MemoryError) as error:
            raise_if_interruption(error, make)
            return None
    return fast if _does_the_same(fast, call, output, result) else None


def native_fast(call: Any, jitted: Any) -> Any:
    """Return the fast path for calls like this one in C, which calls `jitted`."""
    assert _native is not None
    entry = call.entry
    args, kwargs = call.spec[3:]
    uses = entry.uses or b"\1" * entry.n_arrays
    return _native.Fast(
        entry, jitted, args, kwargs, entry.outs, uses, entry.n_arrays, entry.n_first, entry.n_fun
    )


# --- The trial ------------------------------------------------------------------------------------


class _NoMatch(Exception):
    """The guards don't hold for the call that the fast path was made for."""


class _Caller:
    """A stand-in for the wrapper's caller: nothing but a match is expected."""

    def interrupted(self, error: BaseException, *_: Any) -> Any:
        raise error

    def failed_fast(self, error: BaseException, *_: Any) -> Any:
        raise error

    def settle_fast(self, *_: Any) -> Any:
        raise _NoMatch


def _does_the_same(fast: Any, call: Any, output: Any, result: Any) -> bool:
    """Return whether a fast path does what the slow path did with a call.

    **Arguments:** as of `fast_path`.
    """
    try:
        passed, made = _run(fast, call, output)
    except _NoMatch:
        # Generated Python makes outputs of the first trace alone, C those of later ones, too.
        is_made = _native is not None or type(output) is not dict
        # Not once, because a flatten of the user's may vary.
        specs = (split((call.args, call.kwargs))[0] for _ in range(3))
        if DEBUGGING and is_made and all(spec == call.spec for spec in specs):
            raise AssertionError(
                f"the fast path of `{call.entry.label}` doesn't match the call it was made for"
            ) from None
        # What ran has changed the arguments.
        return False
    except Exception as error:
        # The user's flatten or `hash`, after what ran has changed the arguments.
        raise_if_interruption(error, lambda: split((call.args, call.kwargs)))
        return False
    if made is None and result is not None:
        return False
    flat = call.flat
    if len(passed) != len(flat) or not all(map(_is_passed, passed, flat)):
        return False
    spec, arrays, statics = split(made, is_input=False)
    expected_spec, expected_arrays, expected_statics = split(result, is_input=False)
    return (
        spec == expected_spec
        and len(arrays) == len(expected_arrays)
        and all(one is other for one, other in zip(arrays, expected_arrays, strict=True))
        and len(statics) == len(expected_statics)
    )


def _is_passed(passed: Any, array: Any) -> bool:
    # A warm call copies NumPy arrays.
    return passed is array or (issubclass(type(array), np.ndarray) and type(passed) is type(array))


def _run(fast: Any, call: Any, output: Any) -> tuple[list[Any], Any]:
    """Return the arrays that a fast path passes on, and what it makes of an output."""
    passed: list[Any] = []

    def jitted(*arrays: Any) -> Any:
        passed.extend(arrays)
        return output

    def otherwise(*_: Any, **__: Any) -> Any:
        raise _NoMatch

    if not hasattr(fast, "written"):
        matched = fast.match(call.fun_arrays, *call.args, **call.kwargs)
        if matched is None:
            raise _NoMatch
        arrays, statics = matched
        return arrays, fast.make(output, (*call.function.statics, *statics))
    run = fast.written.make(
        _Caller(),
        otherwise,
        jitted,
        itertools.repeat(None),
        *call.fun_arrays,
        *call.function.statics,
    )
    made = run(*call.args, **call.kwargs)
    return passed, made


# --- Wrappers -------------------------------------------------------------------------------------


def link(caller: Any, fasts: list[Any]) -> Any:
    """Return what a wrapper calls: the fast paths of its function in turn, then the slow path."""
    if _native is not None:
        return native_dispatcher(caller, fasts)
    caller.table.linked.add(caller)
    otherwise = caller.slow_call
    for fast in reversed(fasts):
        otherwise = fast.instantiate(caller, otherwise, fast.entry.jitted)
    return otherwise


def native_dispatcher(caller: Any, fasts: list[Any]) -> Any:
    """Return the call of a wrapper in C."""
    assert _native is not None
    names = tuple(
        [
            None if parameter.kind == POSITIONAL_ONLY else parameter.name
            for parameter in caller.function.signature.parameters
            if parameter.kind not in (KEYWORD_ONLY, VAR_POSITIONAL, VAR_KEYWORD)
        ]
    )
    return _native.Dispatcher(
        caller, fasts, caller.fun_arrays, tuple(caller.function.statics), names
    )
