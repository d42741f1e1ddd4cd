"""Tells the errors of signal handlers from those of the code that a handler interrupts."""

import contextlib
import signal
import traceback
import types
from typing import Any

# A trial replaces `signal.getsignal`, to give way to programs that call it.
_getsignal = signal.getsignal


def comes_from_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised this error, as the handler of a timeout does.

    Python runs a handler in the middle of whatever the main thread does. The handler's error isn't
    an error of the interrupted code, so code that handles its own errors must let this one pass.
    """
    handlers = [_code_of_handler(_getsignal(each)) for each in signal.valid_signals()]
    previous: types.FrameType | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # Python passes a handler the frame that it interrupts. In the traceback, that frame comes
        # right before the handler's own. To look for the code of installed handlers isn't enough,
        # because some handlers reinstall an earlier handler before they raise.
        #
        # The first frame has caught the error. Its `f_locals` isn't read. Before Python 3.13, that
        # is a dict, which would keep the error alive until the garbage collector runs.
        if previous is not None:
            variables = [*frame.f_locals.values()]
            variables += [each for value in variables if type(value) is tuple for each in value]
            if any(value is previous for value in variables):
                return True
        if frame.f_code in handlers:
            return True
        previous = frame
    return False


def may_be_dropped(error: BaseException | None) -> bool:
    """Return whether code that may fail can drop this error: a signal handler hasn't raised it."""
    return isinstance(error, Exception) and not comes_from_signal_handler(error)


# Not a generator function, because the stack may be too deep for its frames.
class _Suppressed(contextlib.AbstractContextManager[None]):
    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        # After a `RecursionError`, the stack may be too deep to look at the error.
        return isinstance(error, RecursionError) or may_be_dropped(error)


#: Suppresses the errors of a block that may fail, but not those that a signal handler raises.
suppressed = _Suppressed()


def _code_of_handler(handler: Any) -> types.CodeType | None:
    # A function or method has code itself. To call any other object runs its class's `__call__`.
    for each in (handler, type(handler).__call__):
        code = getattr(each, "__code__", None)
        if isinstance(code, types.CodeType):
            return code
    return None
