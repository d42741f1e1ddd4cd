"""Ahead-of-time compilation: `f.lower(...)` and `f.lower(...).compile()`."""

import functools
from typing import Any, NamedTuple

import jax

from .._compat import Dispatcher, connect
from .._diagnostics import events
from .._diagnostics.differences import OF_ARRAYS, differences
from .._fast.make import fast_path, link
from .entry import Call, Entry
from .slow import HAS_FAST_PATHS, CallHandler, read


class CompileCost(NamedTuple):
    """The cost of compiling a function ahead of time.

    - `seconds`: the time of tracing, lowering and compiling; 0 if that was done before.
    - `executable_bytes`: the size of the executable as JAX would store it, constants included;
        `None` if the backend can't tell.
    """

    seconds: float
    executable_bytes: int | None


class Lowered:
    """A function that is traced and lowered for one call's structure, shapes and static arguments.

    - `lowered`: the `jax.stages.Lowered`, for example, for `cost_analysis()`.
    """

    def __init__(self, handler: CallHandler, staged: tuple[Call, Any, Any], bound: tuple[Any, ...]):
        call, lowered, trace = staged
        self.lowered: jax.stages.Lowered = lowered
        self._handler = handler
        self._entry = call.entry
        # The one that it was made of, maybe earlier.
        self._trace: Any = trace or call.entry.latest_trace
        self._seconds_before = 0.0 if trace else self._trace.seconds.total
        self._description = call.description
        self._bound = bound

    @property
    def seconds(self) -> float:
        """The seconds of tracing, lowering and compiling; 0 for what was done before."""
        return self._trace.seconds.total - self._seconds_before

    def as_text(self) -> str:
        """Return the program as StableHLO."""
        return self.lowered.as_text()

    def compile(self, compiler_options: dict[str, str | bool] | None = None) -> "Compiled":
        """Compile the program.

        **Arguments:**

        - `compiler_options`: as for `jax.stages.Lowered.compile`.
        """
        # The trace was made for a program that JAX compiles only here.
        with events.compiling(self._entry, self._trace):
            compiled = self.lowered.compile(compiler_options=compiler_options)  # type: ignore[arg-type]
        [program] = jax.tree.unflatten(
            self.lowered.out_tree, [0] * self.lowered.out_tree.num_leaves
        )
        read(program, self.lowered)
        traced = self._entry
        entry = Entry(traced.spec, self._handler.function, traced.n_fun)
        entry.jitted, entry.out, entry.outs = compiled, traced.out, traced.outs
        return Compiled(self._handler, entry, self._description, self._bound)


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
        executable: Any = self.compiled.runtime_executable()
        try:
            return len(executable.serialize())
        except (AttributeError, NotImplementedError, RuntimeError):
            # Some backends can't.
            return None


class _CompiledCallHandler(CallHandler):
    """The calls of a program that was compiled ahead of time: its entry is the only one."""

    def __init__(self, handler: CallHandler, entry: Entry, description: Any, wrapper: Any):
        super().__init__(handler.function, handler.fun_arrays, wrapper, [])
        self.entry = entry
        self.description = description

    def call(self, call: Call) -> Any:
        """Make a call; raise for one of another structure."""
        __tracebackhide__ = True
        if call.spec != self.entry.spec:
            found = differences(self.description, call.description)
            static = [str(each) for each in found if each.category not in OF_ARRAYS]
            raise ValueError(
                f"`{self.entry.name}` was lowered for other static arguments: "
                f"{'; '.join(static) or 'the structure differs'}. Lower it again for these."
            )
        call.entry = self.entry
        result = self.attempt(call, self.run, call)
        if HAS_FAST_PATHS and not self.fasts:
            self.fasts += filter(None, [fast_path(call)])
            link(self.wrapper(), self)
        return result
