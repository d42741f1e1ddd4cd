"""Ahead-of-time compilation: `f.lower(...)` and `f.lower(...).compile()`."""

from typing import TYPE_CHECKING, Any

import jax

from ._entry import Call, wait_for
from ._errors import lowered_for_others

if TYPE_CHECKING:
    from ._site import Site


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Lowered:
    """A function that is traced and lowered for one call's structure, shapes and static arguments.

    - `lowered`: JAX's own `jax.stages.Lowered`.
    """

    def __init__(self, site: "Site", call: Call, lowered: jax.stages.Lowered):
        self.lowered = lowered
        self._site = site
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
        compiled = self.lowered.compile(compiler_options=compiler_options)  # type: ignore[arg-type]
        return Compiled(self._site, self._call, compiled, self._bound)


class Compiled:
    """A compiled function for one call's structure, shapes and static arguments.

    - `compiled`: JAX's own `jax.stages.Compiled`, with `cost_analysis()` and the like.
    """

    def __init__(self, site: "Site", call: Call, compiled: jax.stages.Compiled, bound: Arguments):
        self.compiled = compiled
        self._bound = bound
        self._site = site
        self._call = call

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the compiled function.

        **Raises:**

        - `ValueError`, if the structure or a static argument isn't the one it was lowered with.
        - What JAX raises for arrays of another shape or dtype.
        """
        args_before, keywords = self._bound
        return self._site.receive(self._call_bound, (*args_before, *args), {**keywords, **kwargs})

    def _call_bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        site, call = self._site, self._call
        leaves, static = site.partition(args, kwargs)
        if static.key != call.arguments.key:
            raise lowered_for_others(site.wrapped.binding, call.arguments, (args, kwargs))
        try:
            output = self.compiled(*call.entry.flat(site.fun_leaves, leaves))
            if call.entry.blocks or call.entry.unclassified:
                wait_for(output)
        except Exception:
            site.explain(args, kwargs)
            raise
        return call.entry.rebuild(output)
