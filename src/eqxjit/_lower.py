"""Ahead-of-time compilation: `f.lower(...)` and `f.lower(...).compile()`."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from ._description import Description
from ._differences import OF_ARRAYS, differences
from ._entry import Call, wait_for
from ._specialize import specialized_call

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# What is called once pays nothing.
_CALLS_BEFORE_SPECIALIZING = 2


class Lowered:
    """A function that is traced and lowered for one call's structure, shapes and static arguments.

    - `lowered`: JAX's own `jax.stages.Lowered`.
    """

    def __init__(self, call: Call, lowered: jax.stages.Lowered):
        self.lowered = lowered
        self._call = call
        self._bound: Arguments = (), {}

    def bind(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> "Lowered":
        """The same, with arguments (a method's instance) that a call then leaves out."""
        self._bound = args, keywords
        return self

    def as_text(self) -> str:
        """The program as StableHLO."""
        return self.lowered.as_text()

    def compile(self, compiler_options: dict[str, str | bool] | None = None) -> "Compiled":
        """Compiles the program.

        **Arguments:**

        - `compiler_options`: as for `jax.stages.Lowered.compile`.
        """
        # What is compiled here belongs to the trace that was made for it.
        __eqxjit_call__ = self._call  # noqa: F841
        compiled = self.lowered.compile(compiler_options=compiler_options)  # type: ignore[arg-type]
        return Compiled(self._call, compiled, self._bound)


class Compiled:
    """A compiled function for one call's structure, shapes and static arguments.

    Called as the function is, and as fast as a warm call of that.

    - `compiled`: JAX's own `jax.stages.Compiled`, with `cost_analysis()` and the like.

    A call raises

    - a `ValueError`, if the structure or a static argument isn't the one it was lowered with;
    - what JAX raises for arrays of another shape or dtype.
    """

    # As of a wrapper: CPython calls what the slot holds, with no frame of ours in between.
    __slots__ = ("__call__", "__weakref__", "_bound", "_call", "_n_calls", "compiled")

    def __init__(self, call: Call, compiled: jax.stages.Compiled, bound: Arguments):
        self.compiled = compiled
        self._call = call
        self._bound = bound
        #: How many calls have come through the generic path.
        self._n_calls = 0
        self._fill_slot(call.site.wrapped.binding.receiver(self._call_generic))

    def _fill_slot(self, fun: Callable[..., Any]) -> None:
        args, keywords = self._bound
        self.__call__ = functools.partial(fun, *args, **keywords) if args or keywords else fun

    def _call_generic(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        site, entry = self._call.site, self._call.entry
        leaves, static = site.partition(args, kwargs)
        if static.key != self._call.arguments.key:
            raise self._lowered_for_others(site.describe(static, leaves))
        for is_intact, verb in ((site.wrapped.is_intact, "holds"), (entry.is_intact, "returns")):
            if not is_intact():
                raise ValueError(
                    f"A static object that `{entry.name}` {verb} was changed in place since it was "
                    "lowered. Lower it again."
                )
        flat = entry.inputs(site.fun_leaves, leaves)
        try:
            output = self.compiled(*flat)
            if entry.unclassified:
                entry.classify(flat)
            if entry.blocks or entry.unclassified:
                wait_for(output)
        except Exception:
            site.explain(args, kwargs)
            raise
        self._n_calls += 1
        if self._n_calls == _CALLS_BEFORE_SPECIALIZING:
            call = specialized_call(site, entry, args, kwargs, static, leaves, output)
            if call is not None:
                generic = site.wrapped.binding.receiver(self._call_generic)
                self._fill_slot(call.instantiate(site, generic, self.compiled))
        return entry.rebuild(output)

    def _lowered_for_others(self, called_with: Description) -> ValueError:
        """The error for a call whose static half isn't the one that this was compiled for."""
        assert self._call.description is not None
        found = differences(self._call.description, called_with)
        static = tuple(d for d in found if d.category not in OF_ARRAYS)
        return ValueError(
            f"`{self._call.entry.name}` was lowered for other static arguments: "
            f"{'; '.join(map(str, static)) or 'the structure differs'}. Lower it again for these."
        )
