"""Ahead-of-time compilation: `f.lower(...)` and `f.lower(...).compile()`."""

from typing import Any

import jax

from ._description import Description
from ._differences import OF_ARRAYS, differences
from ._entry import Call, wait_for

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Lowered:
    """A function that is traced and lowered for one call's structure, shapes and static arguments.

    - `lowered`: JAX's own `jax.stages.Lowered`.
    """

    def __init__(self, call: Call, description: Description, lowered: jax.stages.Lowered):
        self.lowered = lowered
        self._call = call
        self._description = description
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
        return Compiled(self._call, self._description, compiled, self._bound)


class Compiled:
    """A compiled function for one call's structure, shapes and static arguments.

    - `compiled`: JAX's own `jax.stages.Compiled`, with `cost_analysis()` and the like.
    """

    def __init__(
        self,
        call: Call,
        description: Description,
        compiled: jax.stages.Compiled,
        bound: Arguments,
    ):
        self.compiled = compiled
        self._call = call
        self._description = description
        self._bound = bound

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the compiled function.

        **Raises:**

        - `ValueError`, if the structure or a static argument isn't the one it was lowered with.
        - What JAX raises for arrays of another shape or dtype.
        """
        args_before, keywords = self._bound
        return self._call.site.receive(
            self._call_bound, (*args_before, *args), {**keywords, **kwargs}
        )

    def _call_bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        call, site = self._call, self._call.site
        leaves, static = site.partition(args, kwargs)
        if static.key != call.arguments.key:
            raise self._lowered_for_others(site.describe(static, leaves))
        try:
            output = self.compiled(*call.entry.flat(site.fun_leaves, leaves))
            if call.entry.blocks or call.entry.unclassified:
                wait_for(output)
        except Exception:
            site.explain(args, kwargs)
            raise
        return call.entry.rebuild(output)

    def _lowered_for_others(self, called_with: Description) -> ValueError:
        """The error for a call whose static half isn't the one that this was compiled for."""
        found = differences(self._description, called_with)
        static = tuple(d for d in found if d.category not in OF_ARRAYS)
        return ValueError(
            f"`{self._call.entry.name}` was lowered for other static arguments: "
            f"{'; '.join(map(str, static)) or 'the structure differs'}. Lower it again for these."
        )
