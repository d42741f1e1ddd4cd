"""Calls in flight: calls for which a thread is inside a jitted function right now.

A trace compiles in the static objects of the call in flight, because an equal object of an earlier
call may have changed since. Each thread has a stack of calls in flight. With the native back end C
keeps this stack. Without it, generated Python does.
"""

from typing import Any

from .._compat import native
from .entry import Call, Entry

if native is not None:
    call_in_flight = native.call_in_flight
    in_flight = native.in_flight

else:
    from .._fast.writer import call_of
    from .._fast.writer import in_flight as _stack

    def call_in_flight(call: Call, jitted: Any, *arrays: Any) -> Any:
        """Return `jitted(*arrays)`; meanwhile `call` is this thread's innermost call in flight.

        `jitted` is a jitted function, or a method of one, such as `lower`.
        """
        __tracebackhide__ = True
        calls = _stack.calls
        n_before = len(calls)
        try:
            calls.append([call.entry, None, call])
            return jitted(*arrays)
        finally:
            # Not `pop`, because a signal handler may have raised before `append` was done.
            del calls[n_before:]

    def in_flight(entry: Entry | None = None) -> Call | None:
        """Return this thread's innermost call in flight, or `None`.

        With an `entry`, calls of other entries are skipped.
        """
        for record in reversed(_stack.calls):
            if entry is None or record[0] is entry:
                return call_of(record)
        return None
