"""Ahead-of-time compilation: `f.lower(...)` and `f.lower(...).compile()`."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .._compat import call_directly
from .._diagnostics.description import made, summary, template_of
from .._diagnostics.differences import OF_ARRAYS, differences
from .._plan.budget import TooLong
from .._runtime.dispatch import Dispatcher
from .._runtime.entry import wait_for
from .._runtime.request import Call
from .._runtime.specialize import Specializer
from .slot import CallableBySlot

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# What is called once pays nothing.
_CALLS_BEFORE_SPECIALIZING = 2

# How much of the arguments is shown.
_LONGEST = 100


class CompiledProgram(NamedTuple):
    """The cost of compiling a function ahead of time.

    - `seconds`: tracing, lowering and compiling; 0 where that was done before.
    - `executable_bytes`: the size of the executable as JAX would store it, constants included;
        `None` where the backend can't tell.
    """

    seconds: float
    executable_bytes: int | None


class Lowered:
    """A function that is traced and lowered for one call's structure, shapes and static arguments.

    - `lowered`: JAX's own `jax.stages.Lowered`.
    """

    def __init__(self, dispatcher: Dispatcher, call: Call, lowered: jax.stages.Lowered):
        self.lowered = lowered
        self._dispatcher = dispatcher
        self._call = call
        self._bound: Arguments = (), {}

    def __repr__(self) -> str:
        return f"<Lowered {_shown(self._call)}>"

    def bind(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> "Lowered":
        """Return the same, with arguments (a method's instance) that a call then leaves out."""
        self._bound = args, keywords
        return self

    def as_text(self) -> str:
        """Return the program as StableHLO."""
        return self.lowered.as_text()

    def cost_analysis(self) -> Any:
        """Estimate what the program costs before XLA optimises it.

        **Returns:**

        As `Compiled.cost_analysis`. Fusion lowers the bytes, and may change the operations.
        """
        return self.lowered.cost_analysis()

    def compile(self, compiler_options: dict[str, str | bool] | None = None) -> "Compiled":
        """Compile the program.

        **Arguments:**

        - `compiler_options`: as for `jax.stages.Lowered.compile`.
        """
        # What is compiled here belongs to the trace that was made for it.
        __eqxjit_call__ = self._call  # noqa: F841
        compiled = self.lowered.compile(compiler_options=compiler_options)  # type: ignore[arg-type]
        return Compiled(self._dispatcher, self._call, compiled, self._bound)


@call_directly
class Compiled(CallableBySlot):
    """A compiled function for one call's structure, shapes and static arguments.

    Called as the function is, and as fast as a warm call of that.

    - `compiled`: JAX's own `jax.stages.Compiled`.

    A call raises

    - a `ValueError`, if the structure or a static argument isn't the one it was lowered with;
    - what JAX raises for arrays of another shape or dtype.
    """

    __slots__ = (
        "__weakref__",
        "_bound",
        "_call",
        "_dispatcher",
        "_n_calls",
        "compiled",
    )

    def __init__(
        self, dispatcher: Dispatcher, call: Call, compiled: jax.stages.Compiled, bound: Arguments
    ):
        self.compiled = compiled
        self._dispatcher = dispatcher
        self._call = call
        self._bound = bound
        #: How many calls have come through the generic path.
        self._n_calls = 0
        self._fill_slot(call.signature.binder(self._call_generic))

    def __copy__(self) -> "Compiled":
        return type(self)(self._dispatcher, self._call, self.compiled, self._bound)

    def __repr__(self) -> str:
        return f"<Compiled {_shown(self._call)}>"

    @property
    def executable_bytes(self) -> int | None:
        """The size of the executable as JAX would store it; `None` where the backend can't tell."""
        try:
            return len(self.compiled.runtime_executable().serialize())  # type: ignore[union-attr]
        except Exception:
            return None

    def cost_analysis(self) -> Any:
        """Estimate what one call costs, as XLA does from the optimised program; nothing is run.

        **Returns:**

        JAX's own answer (`jax.stages.Compiled.cost_analysis`): a dict of floats, among them

        - `"flops"`: floating-point operations, additions and multiplications counted singly;
        - `"transcendentals"`: calls of `exp`, `tanh` and the like, which aren't among those;
        - `"bytes accessed"`: bytes read and written by all operations; `"bytes accessed0{}"` and
            so on are those of one operand, `"bytes accessedout{}"` those of the output.

        Which keys there are is up to the backend. The body of a loop whose number of steps XLA
        doesn't know counts once. `None` where the backend has no analysis.

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

        JAX's own answer (`jax.stages.Compiled.memory_analysis`), with these attributes in bytes:

        - `argument_size_in_bytes`, `output_size_in_bytes`: the arrays passed and returned;
        - `alias_size_in_bytes`: how much of the output reuses donated arguments;
        - `temp_size_in_bytes`: intermediate results, at their peak;
        - `generated_code_size_in_bytes`: the program itself, 0 on backends that don't tell.

        `None` where the backend has no analysis.

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

    def _fill_slot(self, fun: Callable[..., Any]) -> None:
        args, keywords = self._bound
        self.target = functools.partial(fun, *args, **keywords) if args or keywords else fun

    def _call_generic(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        dispatcher, entry = self._dispatcher, self._call.entry
        bound = dispatcher.partition(args, kwargs)
        if bound.static.key != self._call.arguments.key:
            raise self._lowered_for_others(dispatcher.request(entry, bound))
        for is_unmodified, verb in (
            (dispatcher.wrapped.is_unmodified, "holds"),
            (entry.is_unmodified, "returns"),
        ):
            if not is_unmodified():
                raise ValueError(
                    f"A static object that `{entry.name}` {verb} was changed in place since it was "
                    "lowered. Lower it again."
                )
        flat = entry.flat(dispatcher.fun_leaves, bound.leaves)
        try:
            output = entry.execute(self.compiled, flat)
            if entry.unclassified:
                entry.end_classifying(entry.classify(flat))
            if entry.blocks or entry.unclassified:
                wait_for(output)
        except Exception:
            dispatcher.explain(args, kwargs)
            raise
        self._n_calls += 1
        if self._n_calls == _CALLS_BEFORE_SPECIALIZING:
            call = None
            with contextlib.suppress(TooLong):
                call = Specializer(dispatcher, entry, bound, output).framed_call()
            if call is not None:
                generic = dispatcher.wrapped.signature.binder(self._call_generic)
                self._fill_slot(call.instantiate(dispatcher, generic, self.compiled))
        return entry.rebuild(output, dispatcher.wrapped.given(bound.static))

    def _lowered_for_others(self, other: Call) -> ValueError:
        """Return the error for a call that isn't of the static half that this is compiled for."""
        described = self._call.description
        static: list[str] = []
        if described is not None:
            # Not by way of the entry, with which its own template is kept.
            fun = other.fun if other.fun_varies else None
            arrays = [*other.leaves, *other.fun_leaves] if fun is not None else other.leaves
            called_with = made(template_of(other.signature, fun, other.arguments).describe(arrays))
            found = differences(described, called_with)
            static = [str(d) for d in found if d.category not in OF_ARRAYS]
        return ValueError(
            f"`{self._call.entry.name}` was lowered for other static arguments: "
            f"{'; '.join(static) or 'the structure differs'}. Lower it again for these."
        )


def _shown(call: Call) -> str:
    """Return the function and its arguments, on one line."""
    arguments = "..." if call.description is None else ", ".join(summary(call.description))
    if len(arguments) > _LONGEST:
        arguments = f"{arguments[: _LONGEST - 3]}..."
    return f"{call.signature.label}({arguments})"
