"""Tells operations outside of any jit from jitted functions, and what of the user's calls them.

JAX compiles each operation that runs outside of any jit by itself, and reports it by a name of its
own. Here it is named by the function and the line that a user knows.
"""

import itertools
import sys
import types
import weakref
from typing import Any, NamedTuple

from .._compat import jitted_in
from .._places import CallSite, code_of, innermost_line, is_jaxs, is_users, public_name

# A number for each function that was passed to an operation. Another function of the same code has
# another number, also once the first one is gone.
_numbers: "weakref.WeakKeyDictionary[types.FunctionType, int]" = weakref.WeakKeyDictionary()
_count = itertools.count()


class Caller(NamedTuple):
    """What of the user's made JAX compile something that isn't under eqxjit's `filter_jit`.

    - `line`: the user's line that is innermost on the stack.
    - `operation`: the public function that this line called outside of any jit, such as
        `optax.global_norm`, or else JAX's name for the operation; empty for a jitted function.
    - `functions`: of an operation, the user's functions that were passed: the code of each, and a
        number that tells functions of one code apart.
    """

    line: CallSite | None
    operation: str = ""
    functions: tuple[tuple[types.CodeType, int], ...] = ()


def caller_of(name: str) -> Caller:
    """Return what made JAX compile a function of this name just now."""
    frames, outer = list[types.FrameType](), list[types.FrameType]()
    frame: types.FrameType | None = sys._getframe(1)
    line = innermost_line(frame)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frames.append(frame)
        frame = frame.f_back
    # The outermost function that is jitted below the user's line decides: what is jitted within it
    # is a part of it. JAX jits its own operations, also those that aren't public.
    while frames and jitted_in(frames[-1]) is None:
        outer.append(frames.pop())
    fun = jitted_in(frames[-1]) if frames else None
    if line is None or not _is_jaxs_own(fun):
        return Caller(line)
    # From the user's line inwards.
    codes = [*[each.f_code for each in outer], code_of(fun)]
    operation = next(filter(None, [_name_of(code) for code in codes if code]), name)
    passed = [v for each in outer for v in each.f_locals.values() if type(v) is types.FunctionType]
    functions = [
        (fun.__code__, _numbers.setdefault(fun, next(_count)))
        for fun in passed
        if is_users(fun.__code__.co_filename)
    ]
    return Caller(line, operation, tuple(dict.fromkeys(functions)))


def _is_jaxs_own(fun: Any) -> bool:
    # A user may jit a function of JAX's, too. That is most often jitted or wrapped already.
    if type(fun) is not types.FunctionType or code_of(fun) is not fun.__code__:
        return False
    return is_jaxs(fun.__code__.co_filename)


def _name_of(code: types.CodeType) -> str:
    return public_name(CallSite(code.co_filename, code.co_firstlineno), code.co_qualname)
