"""Ahead-of-time compilation: `f.lower(...)`, `f.lower(...).compile()` and `f.compile(...)`."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from .._compat import Dispatcher, connect
from .._diagnostics import events
from .._diagnostics.differences import OF_ARRAYS, differences
from .._fast.make import link
from .entry import Call, Entry, Program
from .in_flight import make
from .slow import CallHandler, ending, lower_again
from .table import fast_path


def stage(
    handler: CallHandler, action: Callable[[Any], Any], args: tuple[Any, ...], kwargs: Any
) -> tuple[Call, Any]:
    """Return a call that isn't run, and what `action(jitted)` returns for its arrays."""
    __tracebackhide__ = True
    # A `ShapeDtypeStruct` stands for an array here.
    call = handler.take_apart(args, kwargs, (jax.ShapeDtypeStruct,), is_staged=True)
    with ending(call):
        staged = make(call, action(call.entry.jitted), *call.flat)
        if isinstance(staged, jax.stages.Lowered):
            call.program = _program_in(staged)
        if call.trace is not None:
            call.jaxpr, call.lowered = lower_again(call)
        return call, staged


def _program_in(lowered: jax.stages.Lowered) -> Program:
    """Return the program that a traced function returned to JAX as the key of its arrays."""
    out_tree = lowered.out_tree
    [program] = jax.tree.unflatten(out_tree, [0] * out_tree.num_leaves)
    return program


def lower(
    handler: CallHandler, bound: tuple[Any, ...], args: tuple[Any, ...], kwargs: Any
) -> "Lowered":
    """Trace and lower the function of a handler, `bound` being its first arguments."""
    __tracebackhide__ = True
    call, lowered = stage(handler, lambda jitted: jitted.lower, (*bound, *args), kwargs)
    return Lowered(handler, call, lowered, bound)


class CompileCost:
    """The cost of compiling a function ahead of time.

    - `seconds`: the time of tracing, lowering and compiling; 0 if that was done before.
    """

    def __init__(self, seconds: float, compiled: jax.stages.Compiled):
        self.seconds = seconds
        self._compiled = compiled

    @property
    def executable_bytes(self) -> int | None:
        """The size of the executable as JAX would store it, constants included.

        `None` if the backend can't tell. JAX serialises the executable to find out, which takes as
        much memory again, so it is done when this is read.
        """
        return _size_of(self._compiled)

    def __repr__(self) -> str:
        return f"CompileCost(seconds={self.seconds:.3g})"


def _size_of(compiled: jax.stages.Compiled) -> int | None:
    executable: Any = compiled.runtime_executable()
    try:
        return len(executable.serialize())
    except (AttributeError, NotImplementedError, RuntimeError):
        # Some backends can't.
        return None


class Lowered:
    """A function that is traced and lowered for one call's structure, shapes and static arguments.

    - `lowered`: the `jax.stages.Lowered`, for example, for `cost_analysis()`.
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
        # JAX may have made the program earlier, in another call.
        self._record = handler.table.history.record_of(self._program)
        self._seconds_before = 0.0 if call.trace else self._total_seconds
        self._description = call.description
        self._bound = bound

    @property
    def _total_seconds(self) -> float:
        return 0.0 if self._record is None else self._record.seconds.total

    @property
    def seconds(self) -> float:
        """The seconds of tracing, lowering and compiling; 0 for what was done before."""
        return self._total_seconds - self._seconds_before

    def as_text(self) -> str:
        """Return the program as StableHLO."""
        return self.lowered.as_text()

    def compile(self, compiler_options: dict[str, str | bool] | None = None) -> "Compiled":
        """Compile the program.

        **Arguments:**

        - `compiler_options`: as for `jax.stages.Lowered.compile`.
        """
        # The compiled program is called itself, without the `jax.jit` of the entry.
        traced = self._entry
        entry = Entry(traced.spec, self._handler.function, traced.n_fun)
        entry.jitted = self._compile(compiler_options)
        entry.out, entry.outs = traced.out, traced.outs
        return Compiled(self._handler, entry, self._description, self._bound)

    def _compile(self, options: dict[str, str | bool] | None = None) -> jax.stages.Compiled:
        with events.compiling(self._record, self._entry.name):
            compiled = self.lowered.compile(compiler_options=options)  # type: ignore[arg-type]
        self._program.read(self.lowered)
        return compiled

    def cost(self) -> CompileCost:
        """Compile the program for later calls of the function, and return the cost."""
        compiled = self._compile()
        return CompileCost(self.seconds, compiled)


class Compiled(Dispatcher):
    """A compiled function for one call's structure, shapes and static arguments.

    Call it like the function itself. It is as fast as a warm call.

    - `compiled`: the `jax.stages.Compiled`, with `cost_analysis()` and `memory_analysis()`.

    A call raises

    - a `ValueError`, if the structure or a static argument isn't the one it was lowered with;
    - JAX's error, if an array has another shape or dtype.
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
        """The size of the executable as JAX would store it; `None` if the backend can't tell."""
        return _size_of(self.compiled)


class _CompiledCallHandler(CallHandler):
    """The calls of a program that was compiled ahead of time: its entry is the only one."""

    def __init__(self, handler: CallHandler, entry: Entry, description: Any, wrapper: Any):
        super().__init__(handler.function, handler.fun_arrays, wrapper, [])
        self.entry = entry
        self.description = description

    def take_apart(self, *args: Any, **kwargs: Any) -> Call:
        """Return a call, taken apart; raise for a call of another structure."""
        __tracebackhide__ = True
        call = super().take_apart(*args, **kwargs)
        if call.spec != self.entry.spec:
            found = differences(self.description, call.description)
            static = [str(each) for each in found if each.category not in OF_ARRAYS]
            raise ValueError(
                f"`{self.entry.name}` was lowered for other static arguments: "
                f"{'; '.join(static) or 'the structure differs'}. Lower it again for these."
            )
        return call

    def entry_of(self, spec: Any) -> Entry:
        return self.entry

    def add_fast(self, call: Call) -> None:
        if not self.fasts:
            self.fasts += filter(None, [fast_path(call)])
            link(self.wrapper(), self)
