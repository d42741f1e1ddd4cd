"""Writes the fast path of an entry as Python: guards, the jitted call, and the output.

Reads the specs of the arguments and of the output; `native.c` does the same by walking them.
"""

import builtins
import functools
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter
from typing import Any

import equinox as eqx

from .._compat import ArrayImpl, fields_of, flatten_one_level, registered_nodes, unflatten_node
from .._places import trim
from .._spec.static_key import ITEMS, THEMSELVES, Static, same
from .._spec.tree import (
    ARRAY,
    DICT,
    MODULE,
    NODE,
    SEQUENCE,
    Spec,
    as_array,
    is_transformed,
    parts_of,
)
from .signature import Signature, absent
from .source import NAME, NUL, Constants, can_be_written, define, filled, wrapped

#: The slow path serves larger trees, because compiling their source takes too long.
MAX_NODES = 2000

# Of longer static tuples no guard for each item is written.
_MAX_ITEMS = 12

# Between the lines of a guard.
_OR = "\n    or "

# The source of a fast path. In braces stand names, and code that is filled in.
_TEMPLATE = """\
def make_call({parts}):
    def {function}({parameters}):
        try:
            try:
                {matches} = (
                    {guards}
                )
            except {KeyError} as {error}:
                if {error}.__traceback__.tb_next is not None:
                    # Of the user's `==`, or of a signal handler.
                    raise
                # A Module lacks a field.
                {matches} = False
            if not {matches}:
                return {otherwise}({arguments})
            {calls} = {in_flight}.calls
            {n_calls} = {len}({calls})
            {record} = [{entry}, {handler}, ({values})]
            try:
                {calls}.append({record})
                {arrays} = {jitted}({inputs})
                {is_part} = {is_transformed}({arrays})
                if ({entry}.must_wait or {is_part}) and not {entry}.pending:
                    {entry}.wait_for({arrays})
            except {BaseException} as {error}:
                {handler}.failed_fast({error}, {call_of}({record}))
                raise
            finally:
                del {calls}[{n_calls}:]
            if {entry}.pending or {type}({arrays}) is {dict} or (
                {entry}.unclassified and not {is_part}
            ):
                # A program is to be read, or this is the output of another trace than the first.
                return {handler}.finish_fast({arrays}, {call_of}({record}))
            {next}({hits})
            {statements}
            return {output}
        except {BaseException}:
            {trim}()
            raise
    return {function}
"""


class _InFlight(threading.local):
    """The calls in flight of a thread, outside in, where C doesn't keep them.

    - `calls`: of each its entry, its handler, and the values of the parameters; None and its `Call`
        once that is made.
    """

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []


in_flight = _InFlight()


def call_of(record: list[Any]) -> Any:
    """Return the `Call` of a call in flight, which is made once."""
    entry, handler, content = record
    if handler is not None:
        args, kwargs = handler.function.signature.arguments_among(content)
        record[1:] = None, handler.call_of(entry, *args, **kwargs)
    return record[2]


class TooLarge(Exception):
    """A tree for which no source is written."""


class Writer:
    """A writer of the fast path of one entry; making one raises `TooLarge` beyond the bounds."""

    def __init__(self, function: Any, entry: Any):
        # The first of its traces' outputs; `finish_fast` makes others.
        out = entry.out
        if len(parts_of(entry.spec)) + len(parts_of(out.spec)) > MAX_NODES:
            raise TooLarge
        self.signature: Signature = function.signature
        self.n_fun_statics = len(function.statics)
        self.out = out
        self.entry = entry
        self.names = self.signature.names()
        #: Guards of one argument after the other, the arrays, and the source of each static object.
        self.guards: list[str] = []
        self.arrays: list[str] = []
        self.statics: list[str] = []
        #: Statements that make parts of the output.
        self.body: list[str] = []

    def write(self) -> tuple[str, Callable[..., Any]]:
        """Return the source, and the function `make_call` that it defines.

        This returns the fast path of one wrapper, for `(handler, otherwise, jitted, hits,
        *fun_arrays, *fun_statics)`; `next(hits)` counts a call.
        """
        names, signature, entry = self.names, self.signature, self.entry
        fun_arrays = [names.variable(f"fun_array_{i}") for i in range(entry.n_fun)]
        fun_statics = [names.variable(f"fun_static_{i}") for i in range(self.n_fun_statics)]
        self._match_arguments()
        # The function's may be NumPy's, too.
        for fun_array in fun_arrays:
            self._match_array(fun_array, fun_array)
        self.statics = [*fun_statics, *self.statics]
        out_arrays: list[str] = []
        statics = iter(zip(self.out.slots, self.out.statics, strict=True))
        output = self._make("out", self.out.spec, out_arrays, statics)
        parts = _Parts(
            names,
            entry=entry,
            in_flight=in_flight,
            call_of=call_of,
            trim=trim,
            is_transformed=is_transformed,
        )
        parts.update(
            parts=[parts["handler"], parts["otherwise"], parts["jitted"], parts["hits"]],
            function=names.variable(signature.name),
            parameters=signature.header(names.constant("absent", absent)),
            guards=self._joined_guards(),
            arguments=signature.forwarded(),
            values="".join([f"{parameter.name}, " for parameter in signature.parameters]),
            inputs=self.arrays,
            statements=[*self._unpacked(out_arrays, parts["arrays"]), *self.body],
            output=output,
        )
        parts["parts"] += [*fun_arrays, *fun_statics]
        source = filled(_TEMPLATE, parts)
        return source, define("make_call", signature.qualname, source, names.namespace)

    def _unpacked(self, names: list[str], arrays: str) -> list[str]:
        if len(names) == 1:
            # The only one comes as it is.
            return [f"{names[0]} = {arrays}"]
        return wrapped("(", names, f") = {arrays}") if names else []

    def _joined_guards(self) -> list[str]:
        lines: list[str] = []
        lead = ""
        for guard in self.guards:
            if guard.startswith("#"):
                lines.append(guard)
            else:
                lines += f"{lead}{guard}".split("\n")
                lead = "and "
        return lines if lead else [*lines, "True"]

    def _match_arguments(self) -> None:
        """Write the guards of each argument, those of static ones first: they fail fastest."""
        early: list[str] = []
        late: list[str] = []
        for name, source, var, spec, guard in self._arguments(*self.entry.spec[3:]):
            self.guards = early if type(spec) is Static or guard else late
            # A class may have any name, as of several lines, and a metaclass that refuses it.
            name_of_class = NAME.__get__(spec[1]) if type(spec) is tuple else "static"
            kind = " ".join(name_of_class.replace(NUL, " ").split())
            self.guards.append(f"# {name}: {guard or ('array' if spec is ARRAY else kind)}")
            if guard:
                self.guards.append(guard)
            else:
                self._match(var, source, spec)
        # Comments among them go along with the guards that follow.
        self.guards = early + late

    def _arguments(self, args: Spec, kwargs: Spec) -> Iterator[tuple[str, str, str, Spec, str]]:
        """Yield each argument: its name, its source, a variable for it, its spec; or a guard."""
        names = self.names
        by_name = dict(zip(kwargs[2], kwargs[3:], strict=True))
        missing, count = names.constant("absent", absent), names.named(len)
        positional = list(args[3:])
        others: dict[str, tuple[str, str]] = {}
        for parameter in self.signature.parameters:
            name = parameter.name
            if parameter.kind == Parameter.VAR_POSITIONAL:
                yield f"*{name}", "", "", None, f"{count}({name}) == {len(positional)}"
                for i, spec in enumerate(positional):
                    item = f"{name}[{i}]"
                    yield item, item, names.variable(f"{name}_{i}"), spec, ""
            elif parameter.kind == Parameter.VAR_KEYWORD:
                found = [key for key in by_name if key not in others]
                yield f"**{name}", "", "", None, self._has_keys(name, found)
                for key in found:
                    others[key] = f"{name}[{key!r}]", names.variable(f"{name}_{key}")
            elif parameter.kind != Parameter.KEYWORD_ONLY and positional:
                yield name, name, name, positional.pop(0), ""
            elif name in by_name and parameter.kind != Parameter.POSITIONAL_ONLY:
                others[name] = name, name
            else:
                yield name, "", "", None, f"{name} is {missing}"
        # In the order of the spec, which that of arrays and static objects follows.
        for key in kwargs[2]:
            source, var = others[key]
            yield source, source, var, by_name[key], ""

    def _match(self, var: str, source: str, spec: Spec) -> None:
        """Write the guards of a value; `source` is evaluated once, and bound to `var` if needed."""
        names, guards = self.names, self.guards
        inner = source if source == var else f"{var} := {source}"
        if spec is ARRAY:
            self._match_array(var, inner)
        elif spec is None:
            guards.append(f"{source} is None")
        elif type(spec) is Static:
            self._match_static(var, source, spec)
        else:
            kind, cls, aux, *below = spec
            guards.append(f"{names.named(type)}({inner}) is {names.named(cls)}")
            if kind == SEQUENCE:
                if aux is not None:
                    # Its class may have been registered as another node since.
                    nodes = names.constant("registered_nodes", registered_nodes)
                    guards.append(f"{names.named(cls)} not in {nodes}")
                guards.append(f"{names.named(len)}({var}) == {len(below)}")
                parts = [f"{var}[{i}]" for i in range(len(below))]
            elif kind == DICT:
                guards.append(self._has_keys(var, aux))
                parts = [f"{var}[{key!r}]" for key in aux]
            elif kind == MODULE:
                # Where another one is in the place of a field, reading it raises a `KeyError`.
                fields = names.variable(f"{var}_fields")
                read = f"{names.constant('fields_of', fields_of)}({var})"
                guards.append(f"{names.named(len)}({fields} := {read}) == {len(aux)}")
                parts = [f"{fields}[{name!r}]" for name in aux]
            else:
                parts = self._match_node(var, aux, len(below))
            for label, part, child in zip(_labels(spec), parts, below, strict=True):
                self._match(names.variable(f"{var}_{label}"), part, child)

    def _has_keys(self, var: str, keys: Sequence[str]) -> str:
        """Return the guard of a dict's keys: a key that is missing must not raise later."""
        names = self.names
        if not keys:
            return f"not {var}"
        # A key of a class derived from `str` equals a text, too.
        types = f"{{*{names.named(map)}({names.named(type)}, {var})}}"
        str_types = names.constant("str_types", _STR_TYPES)
        return (
            f"{var}.keys() == {names.constant('keys', frozenset(keys))} and {types} == {str_types}"
        )

    def _match_node(self, var: str, metadata: Any, n: int) -> list[str]:
        names = self.names
        flat, below = names.variable(f"{var}_flat"), names.variable(f"{var}_children")
        flatten = names.constant("flatten", flatten_one_level)
        self.guards.append(f"({flat} := {flatten}({var})) is not None")
        self._match_static(names.variable(f"{var}_metadata"), f"{flat}[1]", metadata)
        children = f"{names.named(tuple)}({flat}[0])"
        self.guards.append(f"{names.named(len)}({below} := {children}) == {n}")
        return [f"{below}[{i}]" for i in range(n)]

    def _match_array(self, var: str, source: str) -> None:
        names = self.names
        if source == var:
            # A parameter isn't assigned to: the slow path gets it where a guard fails.
            var = names.variable(f"{var}_array")
            source = f"{var} := {source}"
        self.arrays.append(var)
        array = names.constant("Array", ArrayImpl)
        refused = names.constant("NotImplemented", NotImplemented)
        other = f"({var} := {names.named(as_array)}({var})) is not {refused}"
        self.guards.append(f"({names.named(type)}({source}) is {array}{_OR}{other})")

    def _match_static(self, var: str, source: str, spec: Any) -> None:
        self.statics.append(var)
        if source != var:
            source = f"({var} := {source})"
        if spec.ask:
            # Its class may have been registered as a node since.
            flatten = self.names.constant("flatten", flatten_one_level)
            self.guards.append(f"{flatten}({source}) is None")
            source = var
        self._match_key(var, source, spec.key)

    def _match_key(self, var: str, bound: str, key: Any) -> None:
        names = self.names
        plain = key if type(key) in THEMSELVES else None
        if type(key) is tuple and key[1] is float:
            [number] = struct.unpack("d", key[3])
            # Zeros have two signs, and NaN equals nothing.
            plain = number if number and number == number else None
        if isinstance(key, weakref.ref):
            # Not as a constant: the entry goes with the object.
            self.guards.append(f"{bound} is {names.constant(f'ref_{var}', key)}() is not None")
        elif plain is not None:
            # Python refuses to write out integers of thousands of digits.
            is_large = type(plain) is int and plain.bit_length() > 64
            text = "large" if is_large else f"{plain!s:.20}"
            constant = names.constant(f"{type(plain).__name__}_{text}", plain)
            kind = names.named(type(plain))
            self.guards.append(
                f"({bound} is {constant}{_OR}{names.named(type)}({var}) is {kind}"
                f" and {var} == {constant})"
            )
        elif key is None or (type(key) is tuple and key[1] is bool):
            self.guards.append(f"{bound} is {key and key[3]}")
        elif type(key) is tuple and key[:2] == (ITEMS, tuple) and len(key) <= _MAX_ITEMS:
            # As the metadata of many nodes: tuples of tuples.
            self.guards.append(f"{names.named(type)}({bound}) is {names.named(tuple)}")
            self.guards.append(f"{names.named(len)}({var}) == {len(key) - 3}")
            for i, part in enumerate(key[3:]):
                child = names.variable(f"{var}_{i}")
                self._match_key(child, f"({child} := {var}[{i}])", part)
        else:
            self.guards.append(
                f"{names.constant('same', same)}({bound}, {names.constant('key', key)})"
            )

    def _make(self, hint: str, spec: Spec, arrays: list[str], statics: Iterator[Any]) -> str:
        """Return the expression of a part of the output, which statements may make before."""
        names = self.names
        if spec is ARRAY:
            arrays.append(names.variable(hint))
            return arrays[-1]
        if spec is None:
            return "None"
        if type(spec) is Static:
            return self._static(hint, *next(statics))
        kind, cls, aux, *below = spec
        # Before those below, as `split` has them.
        metadata = self._static(hint, *next(statics)) if kind == NODE else ""
        parts = [
            self._make(f"{hint}_{label}", child, arrays, statics)
            for label, child in zip(_labels(spec), below, strict=True)
        ]
        if kind == MODULE:
            return self._module(names.variable(hint), cls, list(zip(aux, parts, strict=True)))
        if metadata:
            unflatten = names.constant("unflatten", unflatten_node)
            return self._expression(
                hint, f"{unflatten}({names.named(cls)}, {metadata}, [", parts, "])"
            )
        if kind == DICT:
            items = [f"{key!r}: {part}" for key, part in zip(aux, parts, strict=True)]
            return self._expression(hint, "{", items, "}")
        if cls is list:
            return self._expression(hint, "[", parts, "]")
        if aux is None:
            return self._expression(hint, "(", parts, ")")
        if aux:
            new = names.constant("new_tuple", tuple.__new__)
            return self._expression(hint, f"{new}({names.named(cls)}, (", parts, "))")
        return self._expression(hint, f"{names.named(cls)}(", parts, ")")

    def _expression(self, hint: str, head: str, items: list[str], tail: str) -> str:
        name = self.names.variable(hint)
        self.body += wrapped(f"{name} = {head}", items, tail)
        return name

    def _module(self, name: str, cls: type, values: list[tuple[str, str]]) -> str:
        names = self.names
        plain = _plain_class(cls, tuple([field for field, _ in values]))
        if plain is not None:
            self.body.append(f"{name} = {names.constant('Fields', plain)}()")
            self.body += [f"{name}.{field} = {value}" for field, value in values]
            self.body.append(f"{name}.__class__ = {names.named(cls)}")
            return name
        fields = names.variable(f"{name}_fields")
        self.body.append(
            f"{name} = {names.constant('new_object', object.__new__)}({names.named(cls)})"
        )
        self.body.append(f"{fields} = {names.constant('fields_of', fields_of)}({name})")
        self.body += [f"{fields}[{field!r}] = {value}" for field, value in values]
        return name

    def _static(self, hint: str, slot: int, value: Any) -> str:
        if slot >= 0:
            return self.statics[slot]
        is_literal = value is None or value is True or value is False
        return repr(value) if is_literal else self.names.constant(hint, value)


_STR_TYPES = {str}


class _Parts(dict[str, Any]):
    """Parts of the template; other names are those of builtins, or of new variables."""

    def __init__(self, names: Constants, **constants: Any):
        super().__init__({hint: names.constant(hint, value) for hint, value in constants.items()})
        self._names = names

    def __missing__(self, hint: str) -> str:
        # A parameter may be called as a builtin.
        known = vars(builtins).get(hint)
        name = self._names.variable(hint) if known is None else self._names.named(known)
        return self.setdefault(hint, name)


def _labels(spec: Any) -> Sequence[Any]:
    """Return what tells the children of a node apart, for names of variables."""
    kind, cls, aux = spec[:3]
    n = len(spec) - 3
    if kind in (DICT, MODULE):
        return aux
    fields = cls._fields if kind == SEQUENCE and aux is not None else ()
    return fields if len(fields) == n else range(n)


def _plain_class(kind: type, fields: tuple[str, ...]) -> type | None:
    """Return a class whose objects get these fields, and then this class; None if they can't."""
    # Storing the attributes of a plain object costs next to nothing; a Module's `__setattr__` is a
    # Python function, and refuses.
    if not all(map(can_be_written, fields)):
        return None
    plain = _plain_class_of(fields)
    trial = plain()
    try:
        trial.__class__ = kind
    except TypeError:
        # Slots, for instance, make for another layout.
        return None
    # Or it would be finalized as one of the user's.
    object.__setattr__(trial, "__class__", plain)
    return plain


@functools.lru_cache(maxsize=1024)
def _plain_class_of(_fields: tuple[str, ...]) -> type:
    # One for each set of fields: Python lays out the objects of a class by what they get.
    base: type = eqx.Module
    while base.__dictoffset__ and base.__base__:
        # Both classes must have got their `__dict__` on top of the same base.
        base = base.__base__
    return type("Fields", (base,), {"__hash__": object.__hash__})
