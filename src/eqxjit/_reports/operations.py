"""Finds the user's line for which JAX compiles something that isn't under eqxjit's `filter_jit`.

JAX compiles each operation that runs outside of any jit by itself, and reports it by a private
name. A report names it by the public function, and by the user's line that calls this function.
"""

import itertools
import sys
import types
import weakref
from typing import Any, NamedTuple

from .._compat import jitted_in
from .._places import CallSite, code_of, innermost_line, is_jaxs, is_users, public_name

# A number for each function that was passed to an operation. Unlike an `id`, it isn't given to
# a later function when the function has died.
_numbers: "weakref.WeakKeyDictionary[types.FunctionType, int]" = weakref.WeakKeyDictionary()
_count = itertools.count()


class Caller(NamedTuple):
    """The user's line that made JAX compile something, and what the line called.

    - `line`: the innermost line of the user's on the stack; `None` if there is none.
    - `operation`: the public function that this line called outside of any jit, such as
        `optax.global_norm`, or else JAX's name for the operation; empty for a jitted function.
    - `functions`: the user's functions that were passed to the operation, as pairs of the
        function's code and a number that tells functions of one code apart.
    """

    line: CallSite | None
    operation: str = ""
    functions: tuple[tuple[types.CodeType, int], ...] = ()


def caller_of(name: str) -> Caller:
    """Return the caller of the function that JAX has just traced, lowered or compiled.

    `name` is the function's name in JAX.
    """
    frame: types.FrameType | None = sys._getframe(1)
    line = innermost_line(frame)
    # The frames below the user's line, innermost first.
    frames: list[types.FrameType] = []
    while frame is not None and not is_users(frame.f_code.co_filename):
        frames.append(frame)
        frame = frame.f_back
    # The outermost function that is jitted below the user's line decides, because all other jitted
    # functions are parts of it. JAX also jits private operations of its own.
    outside: list[types.FrameType] = []
    while frames and jitted_in(frames[-1]) is None:
        outside.append(frames.pop())
    jitted = jitted_in(frames[-1]) if frames else None
    if line is None or not _is_operation(jitted):
        return Caller(line)
    # The outermost public function between the user's line and the jitted function.
    codes = [*[each.f_code for each in outside], code_of(jitted)]
    names = [_public_name_of(code) for code in codes if code is not None]
    operation = next(filter(None, names), name)
    functions: list[tuple[types.CodeType, int]] = []
    for each in outside:
        for value in each.f_locals.values():
            if type(value) is types.FunctionType and is_users(value.__code__.co_filename):
                functions.append((value.__code__, _numbers.setdefault(value, next(_count))))
    return Caller(line, operation, tuple(dict.fromkeys(functions)))


def _is_operation(jitted: Any) -> bool:
    """Return whether JAX itself has jitted this function, as it does with its operations."""
    # A function of JAX that a user passes to `jax.jit` isn't an operation. JAX has usually jitted
    # such a function already, and then `jitted` isn't a plain function.
    if type(jitted) is not types.FunctionType or code_of(jitted) is not jitted.__code__:
        return False
    return is_jaxs(jitted.__code__.co_filename)


def _public_name_of(code: types.CodeType) -> str:
    """Return the public name of the function with this code; empty without one."""
    return public_name(CallSite(code.co_filename, code.co_firstlineno), code.co_qualname)
