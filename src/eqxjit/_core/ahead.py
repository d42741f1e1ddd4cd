"""Ahead-of-time compilation: `f.lower(...)` and `f.lower(...).compile()`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .._compat import call_directly, may_raise
from .._fast.make import fast_path, link
from .._interruptions import unless_it_raises
from .calls import Call, make
from .entry import Entry, Output, wait_for
from .errors import raise_for_shapes
from .events import OpenTrace, reopened
from .numpy_inputs import owned
from .slot import CallableBySlot
from .slow import HAS_FAST_PATHS, HELPERS, Caller

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# How much of the arguments is shown.
_LONGEST = 100


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

    - `lowered`: the `jax.stages.Lowered`.
    """

    def __init__(
        self, caller: Caller, call: Call, lowered: jax.stages.Lowered, trace: OpenTrace | None
    ):
        self.lowered = lowered
        self._caller = caller
        self._call = call
        self._trace = trace
        self._description = caller.table.counter.hook.describe(call)
        # Arrays would live as long as this.
        call.arrays, call.args, call.kwargs = [], (), {}
        self._bound: Arguments = (), {}

    def __repr__(self) -> str:
        return f"<Lowered {_shown(self._caller, self._description)}>"

    def bind(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> "Lowered":
        """Return the same, with arguments (a method's instance) that a call then leaves out."""
        self._bound = args, keywords
        return self

    def as_text(self) -> str:
        """Return the program as StableHLO."""
        return self.lowered.as_text()

    def cost_analysis(self) -> Any:
        """Estimate the cost of the program before XLA optimises it.

        **Returns:**

        The same as `Compiled.cost_analysis`. Fusion lowers the bytes, and may change the
        operations.
        """
        return self.lowered.cost_analysis()

    def compile(self, compiler_options: dict[str, str | bool] | None = None) -> "Compiled":
        """Compile the program.

        **Arguments:**

        - `compiler_options`: as for `jax.stages.Lowered.compile`.
        """
        # What is compiled here belongs to the trace that was made for it.
        with reopened(self._trace):
            compiled = self.lowered.compile(compiler_options=compiler_options)  # type: ignore[arg-type]
        blocks = self._call.entry.blocks or may_raise(self.lowered.compiler_ir("stablehlo"))
        return Compiled(self._caller, self._call, compiled, self._bound, self._description, blocks)


@call_directly
class Compiled(CallableBySlot):
    """A compiled function for one call's structure, shapes and static arguments.

    Call it like the function itself. It is as fast as a warm call.

    - `compiled`: the `jax.stages.Compiled`.

    A call raises

    - a `ValueError`, if the structure or a static argument isn't the one it was lowered with;
    - JAX's error, if an array has another shape or dtype.
    """

    __slots__ = ("__weakref__", "_caller", "bound", "compiled")

    def __init__(
        self,
        caller: Caller,
        call: Call,
        compiled: jax.stages.Compiled,
        bound: Arguments,
        description: Any,
        blocks: bool,
    ):
        self.compiled = compiled
        self.bound = bound
        self._caller = _CompiledCaller(caller, call, compiled, description, blocks, self)
        self._caller.unlink()

    def __copy__(self) -> "Compiled":
        mine = self._caller
        call, blocks = mine.lowered_for, mine.entry.blocks
        return type(self)(mine, call, self.compiled, self.bound, mine.description, blocks)

    def __repr__(self) -> str:
        return f"<Compiled {_shown(self._caller, self._caller.description)}>"

    @property
    def executable_bytes(self) -> int | None:
        """The size of the executable as JAX would store it; `None` if the backend can't tell."""

        def size() -> int:
            return len(self.compiled.runtime_executable().serialize())  # type: ignore[union-attr]

        # Some backends can't serialise their programs.
        return unless_it_raises(size, None)

    def cost_analysis(self) -> Any:
        """Estimate the cost of one call, as XLA does from the optimised program; nothing is run.

        **Returns:**

        JAX's answer (`jax.stages.Compiled.cost_analysis`): a dict of floats, among them

        - `"flops"`: floating-point operations, additions and multiplications counted singly;
        - `"transcendentals"`: calls of `exp`, `tanh` and the like, which aren't among those;
        - `"bytes accessed"`: bytes read and written by all operations; `"bytes accessed0{}"` and
            so on are those of one operand, `"bytes accessedout{}"` those of the output.

        The keys depend on the backend. The body of a loop counts once if XLA doesn't know its
        number of steps. `None` if the backend has no analysis.

        !!! example

            ```python
            >>> import jax.numpy as jnp
            >>> from eqxjit import filter_jit
            >>> matmul = filter_jit(lambda a, b: a @ b)
            >>> compiled = matmul.lower(jnp.ones((8, 16)), jnp.ones((16, 4))).compile()
            >>> compiled.cost_analysis()["flops"] == 2 * 8 * 16 * 4
            True

            ```
        """
        return self.compiled.cost_analysis()

    def memory_analysis(self) -> Any:
        """Return how much memory one call needs on a device, as XLA has planned it.

        **Returns:**

        JAX's answer (`jax.stages.Compiled.memory_analysis`), with these attributes in bytes:

        - `argument_size_in_bytes`, `output_size_in_bytes`: the arrays passed and returned;
        - `alias_size_in_bytes`: how much of the output reuses donated arguments;
        - `temp_size_in_bytes`: intermediate results, at their peak;
        - `generated_code_size_in_bytes`: the program itself, 0 if the backend can't tell.

        `None` if the backend has no analysis.

        !!! example

            ```python
            >>> import jax.numpy as jnp
            >>> from eqxjit import filter_jit
            >>> compiled = filter_jit(lambda x: x + 1).lower(jnp.ones(256)).compile()
            >>> compiled.memory_analysis().argument_size_in_bytes == 256 * 4
            True

            ```
        """
        return self.compiled.memory_analysis()


class _CompiledCaller(Caller):
    """The calls of a program that was compiled ahead of time: nothing is traced in them.

    - `lowered_for`: the call that it was lowered for, without its arrays.
    - `description`: the hook's, of that call.
    - `entry`: that of the call, with this program.
    """

    __slots__ = ("compiled", "description", "entry", "fasts", "lowered_for")

    def __init__(
        self,
        caller: Caller,
        call: Call,
        compiled: jax.stages.Compiled,
        description: Any,
        blocks: bool,
        wrapper: Compiled,
    ):
        super().__init__(caller.function, caller.fun_arrays, wrapper)
        self.lowered_for = call
        self.compiled = compiled
        self.description = description
        self.entry: Entry = call.entry.with_program(compiled, blocks)
        self.fasts: list[Any] = []

    def link(self) -> Any:
        """Have the wrapper try the fast path, if there is one."""
        return self._fill(link(self, self.fasts) if HAS_FAST_PATHS else self.slow_call)

    def unlink(self) -> None:
        """Have the next call link the wrapper."""
        self._fill(self.first_call)

    def _fill(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        wrapper = self.wrapper()
        if wrapper is not None:
            args, keywords = wrapper.bound
            wrapper.target = functools.partial(fun, *args, **keywords) if args or keywords else fun
        return fun

    def call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        interruption: BaseException | None = None,
    ) -> Any:
        """Make a call whose arguments are bound, by the program."""
        __tracebackhide__ = True
        call = self.split(args, kwargs)
        if interruption is not None:
            raise interruption
        if call.spec != self.lowered_for.spec:
            call.entry = self.entry
            raise self._lowered_for_others(call)
        call.entry = self.entry
        arrays, waits = owned(call.flat, None)
        try:
            output = make(call, self.compiled, arrays)
            if waits or self.entry.blocks:
                wait_for(output)
        except Exception as error:
            self.explain(error, args, kwargs, user_raised=False)
            raise
        result = self.combine(output, call)
        if HAS_FAST_PATHS and not self.fasts:
            fast = fast_path(self, call, output, result, HELPERS)
            if fast is not None:
                self.fasts.append(fast)
                self.unlink()
        return result

    def settle(self, output: Output, call: Call) -> Any:
        """Return the result of a call, in which nothing can have been traced."""
        return self.combine(output, call)

    def _lowered_for_others(self, other: Call) -> ValueError:
        """Return the error for a call that isn't of the structure that this is compiled for."""
        hook = self.table.counter.hook
        static = hook.static_differences(self.description, hook.describe(other))
        return ValueError(
            f"`{self.entry.name}` was lowered for other static arguments: "
            f"{'; '.join(static) or 'the structure differs'}. Lower it again for these."
        )


def lower(caller: Caller, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
    """Trace and lower what a call would run."""
    __tracebackhide__ = True

    args, kwargs = caller.bind(args, kwargs)
    try:
        call, lowered, trace = caller.stage(lambda jitted: jitted.lower, args, kwargs)
    except Exception as error:
        # The user's or JAX's, which may come of a shape that was passed for an array.
        raise_for_shapes(error, caller.function.signature.named(args, kwargs))
        raise
    return Lowered(caller, call, lowered, trace)


def _shown(caller: Caller, description: Any) -> str:
    """Return the function and its arguments, on one line."""
    arguments = caller.table.counter.hook.summary(description)
    if len(arguments) > _LONGEST:
        arguments = f"{arguments[: _LONGEST - 3]}..."
    return f"{caller.function.signature.label}({arguments})"
