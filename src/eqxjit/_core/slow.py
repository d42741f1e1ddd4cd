"""The slow path: the specification of a call.

Bind the arguments, split them, find the entry of their spec or add one, call its jitted function,
read a new program, wait if it can raise, and combine the output. A fast path is a guarded replay of
this.
"""

from typing import Any

from .._compat import ArrayImpl, is_transforming
from .._places import is_from_user
from .._spec.tree import Parts, as_array, combine, has_tracers, wait_for
from .call import Call
from .entry import Entry
from .errors import drop_unused, raise_clearer, split_named
from .in_flight import make
from .program import Out, Output
from .table import Function

#: What a call's arguments are, bound to parameters and split: `args`, `kwargs`, and their parts.
BoundParts = tuple[tuple[Any, ...], dict[str, Any], Parts]


def bind_and_split(
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    more_arrays: tuple[type, ...] = (),
) -> BoundParts:
    """Return the arguments of a call, bound and split. An error names the argument at fault."""
    __tracebackhide__ = True
    signature = function.signature
    args, kwargs = signature.bind(args, kwargs)
    named = lambda: signature.named(args, kwargs)  # noqa: E731
    return args, kwargs, split_named((args, kwargs), named, True, more_arrays)


def make_call(
    function: Function,
    fun_arrays: tuple[Any, ...],
    bound: BoundParts,
    entry: Entry,
    is_staged: bool = False,
) -> Call:
    args, kwargs, parts = bound
    return Call(function, fun_arrays, args, kwargs, *parts, entry, is_staged)


class ending:
    """The part of a call in which JAX may trace: however it ends, the call leaves nothing behind.

    If it raises, the error is replaced by a clearer one where there is one.
    """

    # Not a `contextmanager`, because its generator would add frames to the user's traceback.
    __slots__ = ("_call",)

    def __init__(self, call: Call):
        self._call = call

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        __tracebackhide__ = True
        call = self._call
        try:
            if error is not None:
                drop_unused(call)
                raise_clearer(error, call)
        finally:
            # Last, because the log shows the time of all that JAX did for this call.
            call.function.table.history.finish(call)


def run(call: Call) -> Any:
    """Run the program of a call, tracing and compiling it if it is new; return the output."""
    __tracebackhide__ = True
    with ending(call):
        return finish(call, make(call, call.entry.jitted, *map(as_array, call.flat)))


def finish(call: Call, output: Output) -> Any:
    """Return the user's output of a call, once its program has run if that can raise."""
    __tracebackhide__ = True
    [(program, arrays)] = output.items()
    call.program = program
    is_part = has_tracers(arrays)
    # A transformed program is a part of another program, which can't be read. So is a program that
    # is called on arrays alone, if it refers to the axis of a `vmap` by name.
    if program.unread and not is_part and not is_transforming():
        call.jaxpr, call.lowered = lower_again(call)
        program.read(call.lowered)
    if program.must_wait or program.unread or is_part:
        wait_for(arrays)
    # Another thread may have traced it, while this call waited within JAX.
    call.entry.n_hits += call.trace is None
    return combine_output(call, call.entry.outs[program.number][0], arrays)


def lower_again(call: Call) -> tuple[Any, Any]:
    """Return the jaxpr of a call's program and JAX's lowering of it, both from JAX's caches.

    Each is `None` if JAX has it no longer, or can't tell.
    """
    jitted = call.entry.jitted
    # `EQX_ON_ERROR=breakpoint` replaces `jax.jit`, and a compiled function has no `trace`.
    if not hasattr(jitted, "trace"):
        return None, None
    # JAX finds it fastest for what says no more of an array than its type. Donated arrays are
    # deleted by now, but still have their types.
    flat = [x.aval if type(x) is ArrayImpl and not x.committed else x for x in call.flat]
    try:
        traced = jitted.trace(*flat)
        return traced.jaxpr, traced.lower()
    except Exception as error:
        # The program has run, so the call mustn't fail because JAX doesn't find it again. No code
        # of the user's runs here, but a signal handler may raise.
        if is_from_user(error):
            raise
        return None, None


def combine_output(call: Call, out: Out, arrays: list[Any]) -> Any:
    """Return the user's output, from its arrays and from what else the program returns."""
    statics = out.statics
    # Mostly no static object came in, and a list of all that did takes a while.
    if max(out.slots, default=-1) >= 0:
        came_in = call.all_statics
        statics = [came_in[i] if i >= 0 else v for v, i in zip(statics, out.slots, strict=True)]
    return combine(out.spec, iter(arrays), iter(statics))
