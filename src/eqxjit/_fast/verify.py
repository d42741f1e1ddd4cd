"""Checks a fast path when it is made: it takes what `split` takes, and makes what `combine` makes.

On any difference the slow path serves: slower, never wrong.
"""

import itertools
from typing import Any

import numpy as np

from .._interruptions import raise_if_interruption
from .._spec.tree import split


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


def does_the_same(fast: Any, call: Any, output: Any, result: Any) -> bool:
    """Return whether a fast path does what the slow path did with a call.

    **Arguments:** as of `fast_path`.
    """
    try:
        passed, made = _run(fast, call, output)
    except _NoMatch:
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
