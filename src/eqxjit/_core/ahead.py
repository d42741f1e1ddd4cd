"""Ahead-of-time compilation: `f.lower(...)`, `f.lower(...).compile()` and `f.compile(...)`."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from .._compat import Dispatcher, connect
from .._diagnostics import events
from .._diagnostics.differences import OF_ARRAYS, differences
from .._fast.make import fast_path, link
from .entry import Call, Entry, Program
from .in_flight import call_in_flight
from .slow import CallHandler, ending, lower_again


def stage(
    handler: CallHandler, action: Callable[[Any], Any], args: tuple[Any, ...], kwargs: Any
) -> tuple[Call, Any]:
    """Return the `Call` for these arguments, and what `action(jitted)(*arrays)` returns for it.

    `action` selects what JAX does with the jitted function, such as `lower`. Nothing is run.
    """
    __tracebackhide__ = True
    call = handler.make_call(args, kwargs, is_staged=True)
    with ending(call):
        staged = call_in_flight(call, action(call.entry.jitted), *call.flat)
        if isinstance(staged, jax.stages.Lowered):
            call.program = _program_in(staged)
        if call.trace is not None:
            call.jaxpr, call.lowered = lower_again(call)
        return call, staged


def _program_in(lowered: jax.stages.Lowered) -> Program:
    """Return the `Program` that the traced function returned to JAX as the key of its arrays."""
    # The leaves may be anything, because only the key matters.
    out_tree = lowered.out_tree
    [program] = jax.tree.unflatten(out_tree, [0] * out_tree.num_leaves)
    return program


def lower(
    handler: CallHandler, bound: tuple[Any, ...], args: tuple[Any, ...], kwargs: Any
) -> "Lowered":
    """Trace and lower the function of a handler for `(*bound, *args)` and `kwargs`.

    `bound` has the instance of a bound method. Calls of the compiled function don't pass it.
    """
    __tracebackhide__ = True
    call, lowered = stage(handler, lambda jitted: jitted.lower, (*bound, *args), kwargs)
    return Lowered(handler, call, lowered, bound)


class CompileCost:
    """The cost of compiling a function ahead of time, as returned by `f.compile(...)`.

    - `seconds`: how long tracing, lowering and compiling took. Phases that were done before don't
        count, so this is 0 if the program was compiled already.
    """

    def __init__(self, seconds: float, compiled: jax.stages.Compiled):
        self.seconds = seconds
        self._compiled = compiled

    @property
    def executable_bytes(self) -> int | None:
        """The size of the executable as JAX would store it in a file, constants included.

        `None` if the backend can't serialise executables. The size is computed when it is read: JAX
        serialises the executable, which temporarily takes as much memory again.
        """
        return _size_of(self._compiled)

    def __repr__(self) -> str:
        return f"CompileCost(seconds={self.seconds:.3g})"


def _size_of(compiled: jax.stages.Compiled) -> int | None:
    executable: Any = compiled.runtime_executable()
    try:
        return len(executable.serialize())
    except (AttributeError, NotImplementedError, RuntimeError):
        # Some backends can't serialise executables.
        return None


class Lowered:
    """A function, traced and lowered for arguments of given structure, shapes and static values.

    Returned by `f.lower(...)`, in the manner of `jax.stages.Lowered`.

    - `lowered`: the `jax.stages.Lowered`, which has `cost_analysis()`, for example.

    !!! example

        ```python
        >>> import jax.numpy as jnp
        >>> from eqxjit import filter_jit
        >>> f = filter_jit(lambda x, power: x**power)
        >>> lowered = f.lower(jnp.ones(3), 2)
        >>> lowered.as_text().startswith("module @jit")
        True
        >>> lowered.compile()(jnp.ones(3), 2)
        Array([1., 1., 1.], dtype=float32)

        ```
    """

    def __init__(
        self,
        handler: CallHandler,
        call: Call,
        lowered: jax.stages.Lowered,
        bound: tuple[Any, ...],
    ):
        self.lowered = lowered
        self._handler = handler
        self._entry = call.entry
        self._program = _program_in(lowered)
        # An earlier call may have traced the program. The seconds of that trace don't count here.
        self._record = handler.table.history.record_of(self._program)
        self._seconds_before = 0.0 if call.trace else self._total_seconds
        self._description = call.description
        self._bound = bound

    @property
    def _total_seconds(self) -> float:
        return 0.0 if self._record is None else self._record.seconds.total

    @property
    def seconds(self) -> float:
        """The time that tracing, lowering and compiling have taken so far.

        Phases that were done before this object was created don't count.
        """
        return self._total_seconds - self._seconds_before

    def as_text(self) -> str:
        """Return the program in StableHLO, as a string."""
        return self.lowered.as_text()

    def compile(self, compiler_options: dict[str, str | bool] | None = None) -> "Compiled":
        """Compile the program.

        **Arguments:**

        - `compiler_options`: options of XLA, as for `jax.stages.Lowered.compile`.

        **Returns:**

        A `Compiled`, to be called with arguments like those that it was lowered for.
        """
        # This entry differs from that of the function only in `jitted`. Calls run the compiled
        # program itself, because a `jax.jit` would trace again for other shapes.
        traced = self._entry
        entry = Entry(traced.spec, self._handler.function, traced.n_fun)
        entry.jitted = self._compile(compiler_options)
        entry.out = traced.out
        entry.outs = traced.outs
        return Compiled(self._handler, entry, self._description, self._bound)

    def _compile(self, options: dict[str, str | bool] | None = None) -> jax.stages.Compiled:
        with events.compiling(self._record, self._entry.name):
            compiled = self.lowered.compile(compiler_options=options)  # type: ignore[arg-type]
        self._entry.read(self._program, self.lowered, None)
        return compiled

    def cost(self) -> CompileCost:
        """Compile the program, so that later calls of the function find it compiled.

        **Returns:**

        A `CompileCost`: how long it took, and how large the executable is.
        """
        compiled = self._compile()
        return CompileCost(self.seconds, compiled)


class Compiled(Dispatcher):
    """A function, compiled for arguments of given structure, shapes and static values.

    Returned by `f.lower(...).compile()`. Call it like the function itself, with all arguments, the
    static ones included. Such a call is as fast as a warm call of the function.

    - `compiled`: the `jax.stages.Compiled`, which has `cost_analysis()` and `memory_analysis()`.

    **Raises** in a call:

    - `ValueError`, if the structure or a static argument differs from that of the lowering.
    - JAX's error, if an array has a different shape or dtype.

    !!! example

        ```python
        >>> import jax.numpy as jnp
        >>> from eqxjit import filter_jit
        >>> f = filter_jit(lambda x, power: x**power)
        >>> compiled = f.lower(jnp.arange(3.0), 2).compile()
        >>> compiled(jnp.arange(3.0), 2)
        Array([0., 1., 4.], dtype=float32)
        >>> compiled(jnp.arange(3.0), 3)
        Traceback (most recent call last):
        ValueError: `<lambda>` was lowered for other static arguments: ...

        ```
    """

    __slots__ = ("__weakref__", "_handler", "compiled")

    def __init__(
        self, handler: CallHandler, entry: Entry, description: Any, bound: tuple[Any, ...]
    ):
        self.compiled: jax.stages.Compiled = entry.jitted
        if bound:
            unbound = Compiled(handler, entry, description, ())
            self._handler = unbound._handler
            connect(self, functools.partial(unbound, *bound))
        else:
            self._handler = _CompiledCallHandler(handler, entry, description, self)

    @property
    def executable_bytes(self) -> int | None:
        """The size of the executable as JAX would store it in a file, constants included.

        `None` if the backend can't serialise executables.
        """
        return _size_of(self.compiled)


class _CompiledCallHandler(CallHandler):
    """Handles the calls of a `Compiled`, which all have the same entry.

    - `entry`: the entry.
    - `description`: the description of the arguments that the function was lowered for.
    """

    def __init__(self, handler: CallHandler, entry: Entry, description: Any, wrapper: Any):
        super().__init__(handler.function, handler.fun_arrays, wrapper, [])
        self.entry = entry
        self.description = description

    def make_call(self, *args: Any, **kwargs: Any) -> Call:
        """Return the `Call` for these arguments; raise if they don't have the entry's spec."""
        __tracebackhide__ = True
        call = super().make_call(*args, **kwargs)
        if call.spec != self.entry.spec:
            found = differences(self.description, call.description)
            static = [str(each) for each in found if each.category not in OF_ARRAYS]
            raise ValueError(
                f"`{self.entry.name}` was lowered for other static arguments: "
                f"{'; '.join(static) or 'the structure differs'}. Lower the function again for "
                "these arguments."
            )
        return call

    def entry_of(self, spec: Any) -> Entry:
        # `make_call` compares the spec, because its error needs the call.
        return self.entry

    def add_fast(self, call: Call) -> None:
        # One fast path is enough, because all calls have the same entry. It isn't in the function's
        # table, because calls of the function itself have a different `jitted`.
        if not self.fasts and (fast := fast_path(call)) is not None:
            self.fasts.append(fast)
            link(self.wrapper(), self)
