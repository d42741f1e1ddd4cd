"""Calls in flight: those that JAX is making in a thread right now.

A trace compiles in the static objects of the call in flight, because an equal object of an earlier
call may have changed since. Each thread has a stack of calls in flight. C keeps it with the native
back end, and generated Python without.
"""

from typing import Any

from .._compat import native
from .entry import Call, Entry

if native is not None:
    make, in_flight = native.run, native.in_flight

else:
    from .._fast.writer import call_of
    from .._fast.writer import in_flight as _stack

    def make(call: Call, action: Any, *arrays: Any) -> Any:
        """Call a jitted function, or its `lower`, with the arrays of a call in flight."""
        __tracebackhide__ = True
        calls = _stack.calls
        n = len(calls)
        try:
            calls.append([call.entry, None, call])
            return action(*arrays)
        finally:
            del calls[n:]

    def in_flight(entry: Entry | None = None) -> Call | None:
        """Return this thread's innermost call in flight, of an entry or of any; or None."""
        for record in reversed(_stack.calls):
            if entry is None or record[0] is entry:
                return call_of(record)
        return None
