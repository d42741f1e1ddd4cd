"""Binds a call's arguments to the user's parameters, as `inspect.Signature.bind` does upstream.

CPython does it: what is generated has the user's signature.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from inspect import Parameter
from typing import Any


class _Absent:
    """The default of each optional parameter: defaults are the user's function's to fill in."""

    def __repr__(self) -> str:
        return "..."


absent = _Absent()


class _Source(str):
    """Source that stands for a default in the text of a signature."""

    __slots__ = ()

    __repr__ = str.__str__


_ANYTHING = inspect.signature(lambda *args, **kwargs: None)

# How a call passes a parameter of each kind on.
_FORWARDED = "{0}", "{0}", "*{0}", "{0}={0}", "**{0}"


class Signature:
    """The parameters of a user's function.

    - `name`, `qualname`: what error messages call the function; `label`: what a list calls it.
    - `called`: what Python's error for a wrong call names, before `()`.
    - `inspected`: the signature, without annotations, all defaults `absent`; where the function has
        none that can be read, `*args, **kwargs`.
    - `parameters`: the parameters in it.
    - `values`: source of a tuple of their values.
    """

    def __init__(self, fun: Callable[..., Any], name: str, qualname: str, wrapper: str = ""):
        """`wrapper` names what wraps the function; where it is `filter_jit`, it may be left out."""
        try:
            signature = inspect.signature(fun)
        except ValueError:
            # Builtins such as `max` don't tell their signature.
            signature = _ANYTHING
        self.name = name
        self.qualname = qualname
        self.label = qualname.rpartition("<locals>.")[2]
        # The name of a class alone, of which the function is an instance, reads as its constructor.
        wrapper = wrapper or ("" if inspect.isroutine(fun) else "filter_jit")
        self.called = f"{wrapper}({self.label})" if wrapper else qualname
        # Without annotations, which may be any expression, and defaults, which may change later.
        parameters = [
            p.replace(default=p.empty if p.default is p.empty else absent, annotation=p.empty)
            for p in signature.parameters.values()
        ]
        self.inspected = inspect.Signature(parameters)
        self.parameters = tuple(self.inspected.parameters.values())
        self.values = "".join([f"{parameter.name}, " for parameter in self.parameters])

    @functools.cached_property
    def keywords_by_position(self) -> tuple[str | None, ...]:
        """The name of each parameter that takes a positional argument; None for a nameless one."""
        taking = [p for p in self.parameters if p.kind <= Parameter.POSITIONAL_OR_KEYWORD]
        return tuple([None if p.kind == p.POSITIONAL_ONLY else p.name for p in taking])

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the `args` and `kwargs` of a call's `inspect.BoundArguments`, without defaults.

        **Raises:**

        - `TypeError`, Python's for the user's function, if that doesn't take these arguments.
        """
        return self.arguments_among(self._receive(*args, **kwargs))

    def arguments_among(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `(args, kwargs)` of a call from the values of the parameters."""
        given = {
            parameter.name: value
            for parameter, value in zip(self.parameters, values, strict=True)
            if value is not absent and (parameter.kind != Parameter.VAR_POSITIONAL or value)
        }
        bound = inspect.BoundArguments(self.inspected, given)  # type: ignore[arg-type]
        return bound.args, bound.kwargs

    @functools.cached_property
    def _receive(self) -> Callable[..., tuple[Any, ...]]:
        """A function of this signature, which returns its parameters."""
        receive = eval(f"lambda {self.header('absent')}: ({self.values})", {"absent": absent})
        # As Python's error for a wrong call names it.
        receive.__qualname__ = self.called
        return receive

    def header(self, default: str) -> str:
        """Return the user's parameters as source, with a variable's name for each default."""
        name = _Source(default)
        parameters = [
            p if p.default is p.empty else p.replace(default=name) for p in self.parameters
        ]
        return str(inspect.Signature(parameters))[1:-1]

    def forwarded(self) -> list[str]:
        """Return the source of the arguments that pass a call on to another of this signature."""
        return [_FORWARDED[p.kind].format(p.name) for p in self.parameters]

    def paths(self, n_args: int, keywords: Iterable[str] = ()) -> list[str]:
        """Return how JAX names each argument of a bound call: positional ones, then keywords."""
        names: list[str] = []
        others, by_name = "", set[str]()
        for parameter in self.parameters:
            name, kind = parameter.name, parameter.kind
            if kind <= Parameter.POSITIONAL_OR_KEYWORD:
                names.append(name)
            elif kind == Parameter.VAR_POSITIONAL:
                names.extend(f"{name}[{i}]" for i in range(n_args - len(names)))
            elif kind == Parameter.VAR_KEYWORD:
                others = name
            if kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
                by_name.add(name)
        return names[:n_args] + [k if k in by_name else f"{others}[{k!r}]" for k in keywords]

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """Return each argument of a bound call with the name that the user gave it."""
        return [*zip(self.paths(len(args)), args, strict=True), *kwargs.items()]
