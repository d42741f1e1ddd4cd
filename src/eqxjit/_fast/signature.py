"""Binds the arguments of a call to the user's parameters, like `inspect.Signature.bind`.

CPython does the work, because the generated functions have the user's signature.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from inspect import Parameter
from typing import Any


class _Absent:
    """The class of `absent`."""

    def __repr__(self) -> str:
        return "..."


#: Stands for the default of an optional parameter. The user's function fills in the real value.
absent = _Absent()


class _Source(str):
    """Source code that stands for a default, and is shown without quotes in a signature."""

    __slots__ = ()

    __repr__ = str.__str__


_ANY_SIGNATURE = inspect.signature(lambda *args, **kwargs: None)

# The source that forwards a parameter in a call, by the kind of the parameter.
_FORWARDED = {
    Parameter.POSITIONAL_ONLY: "{0}",
    Parameter.POSITIONAL_OR_KEYWORD: "{0}",
    Parameter.VAR_POSITIONAL: "*{0}",
    Parameter.KEYWORD_ONLY: "{0}={0}",
    Parameter.VAR_KEYWORD: "**{0}",
}


class Signature:
    """The signature of a user's function, and its names.

    - `name`: the name of the function.
    - `qualname`: the qualified name of the function.
    - `label`: the qualified name without the functions that the function is defined in, for tables
        and logs.
    - `called`: what Python's error for a call with wrong arguments names, before the `()`.
    - `inspected`: the signature without annotations, where each default is `absent`. If the
        signature of the function can't be read, it is `*args, **kwargs`.
    - `parameters`: the parameters of `inspected`.
    - `values`: the source of a tuple of the parameters' values, without parentheses.
    """

    def __init__(self, fun: Callable[..., Any], name: str, qualname: str, wrapper: str = ""):
        """`wrapper` is the name of what wraps the function, if that isn't `filter_jit`."""
        try:
            signature = inspect.signature(fun)
        except ValueError:
            # Some builtins, such as `max`, have no signature that can be read.
            signature = _ANY_SIGNATURE
        self.name = name
        self.qualname = qualname
        self.label = qualname.rpartition("<locals>.")[2]
        # If the callable is an object of a class, its names are those of the class. An error that
        # shows only the name of the class would seem to be an error of the constructor.
        if not wrapper and not inspect.isroutine(fun):
            wrapper = "filter_jit"
        self.called = f"{wrapper}({self.label})" if wrapper else qualname
        # Annotations may be any expressions, and the user may change defaults later.
        parameters = [
            p.replace(default=p.empty if p.default is p.empty else absent, annotation=p.empty)
            for p in signature.parameters.values()
        ]
        self.inspected = inspect.Signature(parameters)
        self.parameters = tuple(self.inspected.parameters.values())
        self.values = "".join([f"{parameter.name}, " for parameter in self.parameters])

    @functools.cached_property
    def keywords_by_position(self) -> tuple[str | None, ...]:
        """The names of the parameters that take positional arguments.

        `None` stands for a parameter that can't be passed by keyword.
        """
        positional = [p for p in self.parameters if p.kind <= Parameter.POSITIONAL_OR_KEYWORD]
        return tuple([None if p.kind == p.POSITIONAL_ONLY else p.name for p in positional])

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the `args` and `kwargs` that `inspect.Signature.bind` returns for a call.

        Defaults aren't filled in.

        **Raises:**

        - `TypeError`, with Python's text, if the user's function doesn't take these arguments.
        """
        return self.arguments_among(self._receive(*args, **kwargs))

    def arguments_among(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the bound `args` and `kwargs` of a call from the values of all parameters."""
        given = {
            parameter.name: value
            for parameter, value in zip(self.parameters, values, strict=True)
            if value is not absent and (parameter.kind != Parameter.VAR_POSITIONAL or value)
        }
        bound = inspect.BoundArguments(self.inspected, given)  # type: ignore[arg-type]
        return bound.args, bound.kwargs

    @functools.cached_property
    def _receive(self) -> Callable[..., tuple[Any, ...]]:
        """A function with this signature that returns the values of its parameters."""
        receive = eval(f"lambda {self.header('absent')}: ({self.values})", {"absent": absent})
        # Python's error for a call with wrong arguments shows the qualified name.
        receive.__qualname__ = self.called
        return receive

    def header(self, default: str) -> str:
        """Return the source of the parameters, with the variable `default` for each default."""
        name = _Source(default)
        parameters = [
            p if p.default is p.empty else p.replace(default=name) for p in self.parameters
        ]
        return str(inspect.Signature(parameters))[1:-1]

    def forwarded(self) -> list[str]:
        """Return the source of each argument of a call that forwards all parameters."""
        return [_FORWARDED[p.kind].format(p.name) for p in self.parameters]

    def paths(self, n_args: int, keywords: Iterable[str] = ()) -> list[str]:
        """Return JAX's name for each argument of a bound call.

        The names of the `n_args` positional arguments come first, then the names of the keyword
        arguments.
        """
        positional: list[str] = []
        keyword_names = set[str]()
        var_keyword = ""
        for parameter in self.parameters:
            name, kind = parameter.name, parameter.kind
            if kind <= Parameter.POSITIONAL_OR_KEYWORD:
                positional.append(name)
            elif kind == Parameter.VAR_POSITIONAL:
                positional.extend(f"{name}[{i}]" for i in range(n_args - len(positional)))
            elif kind == Parameter.VAR_KEYWORD:
                var_keyword = name
            if kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
                keyword_names.add(name)
        by_keyword = [k if k in keyword_names else f"{var_keyword}[{k!r}]" for k in keywords]
        return positional[:n_args] + by_keyword

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """Return the arguments of a bound call as pairs of a name and a value.

        Unlike in `paths`, the name of a keyword argument is always its keyword alone.
        """
        return [*zip(self.paths(len(args)), args, strict=True), *kwargs.items()]
