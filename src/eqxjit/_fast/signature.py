"""Binds a call's arguments to the user's parameters, as `inspect.Signature.bind` does upstream.

The binding itself is CPython's: a generated function has the user's signature, so that keyword
arguments cost nothing and a wrong call is a `TypeError` that names the user's function.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .._code.place import location_of
from .._code.source import Constants, can_be_written, define
from .._interruptions import raise_if_interruption

POSITIONAL_ONLY = inspect.Parameter.POSITIONAL_ONLY
POSITIONAL_OR_KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD
VAR_POSITIONAL = inspect.Parameter.VAR_POSITIONAL
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD


class _Absent:
    """The default of each optional parameter: defaults are the user's function's to fill in."""

    def __repr__(self) -> str:
        return "..."


absent = _Absent()

_ANYTHING = inspect.Signature(
    [
        inspect.Parameter("args", VAR_POSITIONAL),
        inspect.Parameter("kwargs", VAR_KEYWORD),
    ]
)


class Signature:
    """The parameters of a user's function.

    - `name`, `qualname`: what error messages call the function.
    - `called`: what Python's error for a wrong call names, before `()`.
    - `location`: where it is defined; None if it isn't written in Python.
    - `parameters`: the user's parameters, without annotations, all defaults `absent`; where the
        function has no signature that can be read, `*args, **kwargs`.
    """

    __slots__ = ("_make_receiver", "called", "location", "name", "parameters", "qualname")

    def __init__(self, fun: Callable[..., Any], name: str, qualname: str):
        try:
            signature = inspect.signature(fun)
        except ValueError as error:
            # Builtins such as `max` don't tell their signature.
            raise_if_interruption(error, lambda: inspect.signature(fun))
            signature = _ANYTHING
        if not all(map(can_be_written, signature.parameters)):
            signature = _ANYTHING
        self.name = name
        self.qualname = qualname
        # The name of a class alone, of which the function is an instance, reads as its constructor.
        self.called = qualname if inspect.isroutine(fun) else f"filter_jit({self.label})"
        self.location = location_of(fun)
        self.parameters = tuple(map(_bare, signature.parameters.values()))
        self._make_receiver: Any = None

    @property
    def label(self) -> str:
        """The function's name in a list: the qualified one, where that is short."""
        return self.qualname.rpartition("<locals>.")[2]

    def binder(self, receive: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """Return a function of the user's signature that passes on `receive(args, kwargs)`.

        `args` and `kwargs` are those of `inspect.BoundArguments`: what can be positional is, up to
        the first parameter left out, and defaults aren't filled in.
        """
        if self._make_receiver is None:
            self._make_receiver = _define_binder(self.parameters)
        binder = self._make_receiver(receive)
        binder.__name__ = self.name
        binder.__qualname__ = self.called
        return binder

    def arguments_among(
        self, variables: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `(args, kwargs)` of a call, from the variables of a function of this signature."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter in self.parameters:
            value = variables[parameter.name]
            if parameter.kind == VAR_POSITIONAL:
                args.extend(value)
            elif parameter.kind == VAR_KEYWORD:
                kwargs.update(value)
            elif parameter.kind == KEYWORD_ONLY:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return self.binder(lambda args, kwargs: (args, kwargs))(*args, **kwargs)

    def names(self) -> Constants:
        """Return names for generated code: none clashes with a parameter's."""
        return Constants(parameter.name for parameter in self.parameters)

    def header(self, default: str) -> str:
        """Return the user's parameters as source, with a variable's name for each default."""
        return _header(self.parameters, default)

    def forwarded(self) -> str:
        """Return the source of the arguments that pass a call on to another of this signature."""
        forms = {VAR_POSITIONAL: "*{0}", VAR_KEYWORD: "**{0}", KEYWORD_ONLY: "{0}={0}"}
        return ", ".join(
            forms.get(parameter.kind, "{0}").format(parameter.name) for parameter in self.parameters
        )

    def path_names(self, n_args: int) -> list[str]:
        """Return the name of each positional argument of a bound call, for error messages."""
        names: list[str] = []
        for parameter in self.parameters:
            if parameter.kind in (POSITIONAL_ONLY, POSITIONAL_OR_KEYWORD):
                names.append(parameter.name)
            elif parameter.kind == VAR_POSITIONAL:
                names.extend(f"{parameter.name}[{i}]" for i in range(n_args - len(names)))
        return names[:n_args]

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """Return each argument of a bound call with the name that the user gave it."""
        return [*zip(self.path_names(len(args)), args, strict=True), *kwargs.items()]

    def keyword_path(self, name: str) -> str:
        """Return the path by which JAX names an argument that is passed by its name."""
        for parameter in self.parameters:
            if parameter.kind == VAR_KEYWORD:
                return f"{parameter.name}[{name!r}]"
            if parameter.name == name and parameter.kind != POSITIONAL_ONLY:
                break
        return name


def _header(parameters: tuple[inspect.Parameter, ...], default: str) -> str:
    # All defaults are `absent`.
    return str(inspect.Signature(parameters))[1:-1].replace(f"={absent}", f"={default}")


# Many functions have the same parameters, such as `(model, x)`.
@functools.lru_cache(maxsize=256)
def _define_binder(parameters: tuple[inspect.Parameter, ...]) -> Callable[..., Any]:
    """Define what makes the binders of all functions that have these parameters."""
    names = Constants(parameter.name for parameter in parameters)
    receive, bind, missing = (
        names.variable("receive"),
        names.variable("fun"),
        names.constant("absent", absent),
    )
    args, kwargs = names.variable("args"), names.variable("kwargs")
    lines = [
        f"def make_receiver({receive}):",
        f"    def {bind}({_header(parameters, missing)}):",
    ]
    positional = [p for p in parameters if p.kind in (POSITIONAL_ONLY, POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is inspect.Parameter.empty]
    lines.append(f"        {args} = [{', '.join(p.name for p in required)}]")
    lines.append(f"        {kwargs} = {{}}")
    for parameter in positional[len(required) :]:
        name = parameter.name
        lines.append(f"        if {name} is not {missing}:")
        if parameter.kind == POSITIONAL_ONLY or parameter is positional[len(required)]:
            lines.append(f"            {args}.append({name})")
        else:
            # Behind a parameter left out, an argument can only be passed by its name.
            before = positional[positional.index(parameter) - 1].name
            lines.append(f"            if {kwargs} or {before} is {missing}:")
            lines.append(f"                {kwargs}[{name!r}] = {name}")
            lines.append("            else:")
            lines.append(f"                {args}.append({name})")
    for parameter in parameters:
        name = parameter.name
        if parameter.kind == VAR_POSITIONAL:
            lines.append(f"        {args}.extend({name})")
        elif parameter.kind == KEYWORD_ONLY:
            if parameter.default is inspect.Parameter.empty:
                lines.append(f"        {kwargs}[{name!r}] = {name}")
            else:
                lines.append(f"        if {name} is not {missing}:")
                lines.append(f"            {kwargs}[{name!r}] = {name}")
        elif parameter.kind == VAR_KEYWORD:
            lines.append(f"        {kwargs}.update({name})")
    lines.append(f"        return {receive}((*{args},), {kwargs})")
    lines.append(f"    return {bind}")
    source = "\n".join(lines) + "\n"
    return define("make_receiver", "arguments", source, names.namespace)


def _bare(parameter: inspect.Parameter) -> inspect.Parameter:
    optional = parameter.default is not inspect.Parameter.empty
    return inspect.Parameter(
        parameter.name, parameter.kind, default=absent if optional else inspect.Parameter.empty
    )
