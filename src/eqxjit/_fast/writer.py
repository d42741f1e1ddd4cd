"""Writes the fast path of an entry as Python: guards, the jitted call, and the output.

Reads the specs of the arguments and of the output; `native.c` does the same by walking them.
"""

import builtins
import itertools
import keyword
import linecache
import re
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter
from typing import Any

from .._compat import ArrayImpl, fields_of, flatten_one_level, registered_nodes, unflatten_node
from .._places import GENERATED_FOLDER, trim
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
from .._text import short
from .signature import Signature, absent

#: The slow path serves larger trees, because compiling their source takes too long.
MAX_NODES = 2000

# A longer list has a line for each item.
_LONGEST_LIST = 60
# The end of a path says most.
_LONGEST_NAME = 22

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


# What generated code refers to by these names.
_functions = as_array, call_of, flatten_one_level, is_transformed, same, trim, unflatten_node
# A metaclass may refuse a class's.
_NAME = vars(type)["__name__"].__get__
_SCOPE = vars(builtins) | {each.__name__: each for each in _functions}
_SCOPE |= {"Array": ArrayImpl, "absent": absent, "fields_of": fields_of, "in_flight": in_flight}
_SCOPE |= {"registered_nodes": registered_nodes, "str_types": {str}}
_SCOPE |= {"new_object": object.__new__, "new_tuple": tuple.__new__}

_serial = itertools.count()


class TooLarge(Exception):
    """A tree for which no source is written."""


class _Names(dict[str, str]):
    """The names in a source, none of them twice; and parts of the template, by name.

    `names["type"]` is the name of that builtin, and `names["calls"]` of a new variable.

    - `namespace`: the constants by name, the globals of the generated function.
    """

    def __init__(self, parameters: Iterable[str]):
        super().__init__()
        self.namespace: dict[str, Any] = {}
        self._by_id: dict[int, str] = {}
        # The last number of each name, because a tree may have thousands of leaves of one name.
        self._numbers = dict.fromkeys(parameters, 1)

    def __missing__(self, hint: str) -> str:
        # A parameter may have the same name.
        is_constant = hint in _SCOPE
        name = self.constant(hint, _SCOPE[hint]) if is_constant else self.variable(hint)
        return self.setdefault(hint, name)

    def variable(self, hint: str) -> str:
        """Return a name like the hint, made an identifier, and numbered where it is taken."""
        base = re.sub(r"\W+", "_", hint, flags=re.ASCII)[-_LONGEST_NAME:].strip("_") or "value"
        if base[0].isdigit() or keyword.iskeyword(base):
            base = f"_{base}"
        name = base
        while name in self._numbers:
            self._numbers[base] += 1
            name = f"{base}_{self._numbers[base]}"
        self._numbers[name] = 1
        return name

    def constant(self, hint: str, value: Any) -> str:
        """Return the name of a constant; the same one for the same object."""
        name = self._by_id.get(id(value))
        if name is None:
            name = self._by_id[id(value)] = self.variable(hint)
            self.namespace[name] = value
        return name

    def of_class(self, cls: type) -> str:
        return self.constant(_NAME(cls), cls)

    def filled(self, template: str) -> str:
        """Return a template with names and parts filled in; those may have several lines."""
        lines: list[str] = []
        for line in template.splitlines():
            code = line.lstrip()
            indent = line[: -len(code)]
            lines += [indent + each for each in code.format_map(self).splitlines()]
        return "\n".join(lines) + "\n"


class Writer:
    """A writer of the fast path of one entry; making one raises `TooLarge` beyond the bound."""

    def __init__(self, function: Any, entry: Any):
        # The first of its traces' outputs; `finish_fast` makes others.
        out = entry.out
        if len(parts_of(entry.spec)) + len(parts_of(out.spec)) > MAX_NODES:
            raise TooLarge
        self.signature: Signature = function.signature
        self.entry = entry
        self.names = names = _Names(parameter.name for parameter in self.signature.parameters)
        #: Guards of one argument after the other, the arrays, and the source of each static object.
        self.guards: list[str] = []
        self.arrays: list[str] = []
        self.statics = [names.variable(f"fun_static_{i}") for i in range(len(function.statics))]
        #: Statements that make parts of the output, its arrays, and its other static objects.
        self.body: list[str] = []
        self.out_arrays: list[str] = []
        self.out_statics = iter(zip(out.slots, out.statics, strict=True))

    def write(self) -> tuple[str, Callable[..., Any]]:
        """Return the source, and the function `make_call` that it defines.

        This returns the fast path of one wrapper, for `(handler, otherwise, jitted, hits,
        *fun_statics, *fun_arrays)`; `next(hits)` counts a call.

        **Raises:**

        - `TooLarge`, if Python can't compile it.
        """
        try:
            self._fill_parts()
            source = self.names.filled(_TEMPLATE)
            return source, _define(source, self.signature.qualname, self.names.namespace)
        except (SyntaxError, RecursionError, MemoryError) as error:
            # Python's compiler raises each of them for source that is nested too deeply.
            raise TooLarge from error

    def _fill_parts(self) -> None:
        names, signature, entry = self.names, self.signature, self.entry
        bound = [*map(names.__getitem__, ("handler", "otherwise", "jitted", "hits")), *self.statics]
        fun_arrays = [names.variable(f"fun_array_{i}") for i in range(entry.n_fun)]
        self._match_arguments()
        # The function's may be NumPy's, too.
        for fun_array in fun_arrays:
            self._match_array(fun_array, fun_array)
        output = self._make("out", entry.out.spec)
        if self.out_arrays:
            # The only one comes as it is.
            is_only = len(self.out_arrays) == 1
            targets = self.out_arrays[0] if is_only else _tuple_of(self.out_arrays)
            self.body.insert(0, f"{targets} = {names['arrays']}")
        guards = [each if each.startswith("#") else f"{each} and" for each in self.guards]
        names.update(
            entry=names.constant("entry", entry),
            parts=_listed([*bound, *fun_arrays]),
            function=names.variable(signature.name),
            parameters=signature.header(names["absent"]),
            guards="\n".join(guards).removesuffix(" and") or "True",
            arguments=_listed(signature.forwarded()),
            values=signature.values,
            inputs=_listed(self.arrays),
            statements="\n".join(self.body),
            output=output,
        )

    def _match_arguments(self) -> None:
        """Write the guards of all arguments, those of static ones first: they fail fastest."""
        args, kwargs = self.entry.spec[3:]
        names, n, keys = self.names, len(args) - 3, kwargs[2]
        paths = [*self.signature.path_names(n), *map(self.signature.keyword_path, keys)]
        early: list[str] = []
        late: list[str] = []
        for i, parameter in enumerate(self.signature.parameters):
            name = parameter.name
            guard = f"{name} is {names['absent']}"
            if parameter.kind == Parameter.VAR_POSITIONAL:
                name, guard = f"*{name}", f"{names['len']}({name}) == {max(n - i, 0)}"
            elif parameter.kind == Parameter.VAR_KEYWORD:
                others = [key for key, path in zip(keys, paths[n:], strict=True) if key != path]
                name, guard = f"**{name}", self._has_keys(name, others)
            if name not in paths:
                early += [f"# {name}: {guard}", guard]
        # In the order of the spec, which that of arrays and static objects follows.
        for path, spec in zip(paths, [*args[3:], *kwargs[3:]], strict=True):
            self.guards = early if type(spec) is Static else late
            kind = _NAME(spec[1]) if type(spec) is tuple else "static"
            self.guards.append(f"# {path}: {'array' if spec is ARRAY else kind}")
            self._match(path if path.isidentifier() else names.variable(path), path, spec)
        self.guards = early + late

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
            guards.append(f"{names['type']}({inner}) is {names.of_class(cls)}")
            if kind == SEQUENCE:
                if aux is not None:
                    # Its class may have been registered as another node since.
                    guards.append(f"{names.of_class(cls)} not in {names['registered_nodes']}")
                guards.append(f"{names['len']}({var}) == {len(below)}")
                parts = [f"{var}[{i}]" for i in range(len(below))]
            elif kind == DICT:
                guards.append(self._has_keys(var, aux))
                parts = [f"{var}[{key!r}]" for key in aux]
            elif kind == MODULE:
                # Where another one is in the place of a field, reading it raises a `KeyError`.
                fields = names.variable(f"{var}_fields")
                read = f"{fields} := {names['fields_of']}({var})"
                guards.append(f"{names['len']}({read}) == {len(aux)}")
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
        expected = names.constant("keys", frozenset(keys))
        # A key of a class derived from `str` equals a text, too.
        types = f"{{*{names['map']}({names['type']}, {var})}}"
        return f"{var}.keys() == {expected} and {types} == {names['str_types']}"

    def _match_node(self, var: str, metadata: Any, n: int) -> list[str]:
        names = self.names
        flat, below = names.variable(f"{var}_flat"), names.variable(f"{var}_children")
        self.guards.append(f"({flat} := {names['flatten_one_level']}({var})) is not None")
        self._match_static(names.variable(f"{var}_metadata"), f"{flat}[1]", metadata)
        children = f"{names['tuple']}({flat}[0])"
        self.guards.append(f"{names['len']}({below} := {children}) == {n}")
        return [f"{below}[{i}]" for i in range(n)]

    def _match_array(self, var: str, source: str) -> None:
        names = self.names
        if source == var:
            # A parameter isn't assigned to: the slow path gets it where a guard fails.
            var = names.variable(f"{var}_array")
            source = f"{var} := {source}"
        self.arrays.append(var)
        other = f"({var} := {names['as_array']}({var})) is not {names['NotImplemented']}"
        self.guards.append(f"({names['type']}({source}) is {names['Array']}{_OR}{other})")

    def _match_static(self, var: str, source: str, spec: Any) -> None:
        self.statics.append(var)
        if source != var:
            source = f"({var} := {source})"
        if spec.ask:
            # Its class may have been registered as a node since.
            self.guards.append(f"{self.names['flatten_one_level']}({source}) is None")
            source = var
        self._match_key(var, source, spec.key)

    def _match_key(self, var: str, bound: str, key: Any) -> None:
        names = self.names
        # The rest of a key in this form are its parts.
        reader, kind, _, *parts = key if type(key) is tuple else (None, type(key), None)
        plain = key if kind in THEMSELVES else None
        if kind is float:
            [number] = struct.unpack("d", parts[0])
            # Zeros have two signs, and NaN equals nothing.
            plain = number if number and number == number else None
        if isinstance(key, weakref.ref):
            # Not as a constant: the entry goes with the object.
            self.guards.append(f"{bound} is {names.constant(f'ref_{var}', key)}() is not None")
        elif plain is not None:
            constant = names.constant(f"{kind.__name__}_{short(plain, _LONGEST_NAME)}", plain)
            is_kind = f"{names['type']}({var}) is {names.of_class(kind)}"
            self.guards.append(f"({bound} is {constant}{_OR}{is_kind} and {var} == {constant})")
        elif key is None or kind is bool:
            self.guards.append(f"{bound} is {key and parts[0]}")
        elif reader == ITEMS and kind is tuple:
            # As the metadata of many nodes, and the sizes of layers.
            self.guards.append(f"{names['type']}({bound}) is {names['tuple']}")
            self.guards.append(f"{names['len']}({var}) == {len(parts)}")
            for i, part in enumerate(parts):
                child = names.variable(f"{var}_{i}")
                self._match_key(child, f"({child} := {var}[{i}])", part)
        else:
            self.guards.append(f"{names['same']}({bound}, {names.constant('key', key)})")

    def _make(self, hint: str, spec: Spec) -> str:
        """Return the expression of a part of the output, which statements may make before."""
        names = self.names
        if spec is ARRAY:
            self.out_arrays.append(names.variable(hint))
            return self.out_arrays[-1]
        if spec is None:
            return "None"
        if type(spec) is Static:
            return self._static(hint)
        kind, cls, aux, *below = spec
        # Before those below, as `split` has them.
        metadata = self._static(hint) if kind == NODE else ""
        labels = zip(_labels(spec), below, strict=True)
        parts = [self._make(f"{hint}_{label}", child) for label, child in labels]
        name = names.variable(hint)
        if kind == MODULE:
            fields = names.variable(f"{name}_fields")
            self.body.append(f"{name} = {names['new_object']}({names.of_class(cls)})")
            self.body.append(f"{fields} = {names['fields_of']}({name})")
            self.body += [f"{fields}[{f!r}] = {v}" for f, v in zip(aux, parts, strict=True)]
            return name
        if kind == NODE:
            made = (
                f"{names['unflatten_node']}({names.of_class(cls)}, {metadata}, [{_listed(parts)}])"
            )
        elif kind == DICT:
            items = [f"{key!r}: {part}" for key, part in zip(aux, parts, strict=True)]
            made = f"{{{_listed(items)}}}"
        elif cls is list:
            made = f"[{_listed(parts)}]"
        elif aux is None:
            made = _tuple_of(parts)
        elif aux:
            made = f"{names['new_tuple']}({names.of_class(cls)}, {_tuple_of(parts)})"
        else:
            made = f"{names.of_class(cls)}({_listed(parts)})"
        self.body.append(f"{name} = {made}")
        return name

    def _static(self, hint: str) -> str:
        slot, value = next(self.out_statics)
        if slot >= 0:
            return self.statics[slot]
        is_literal = value is None or value is True or value is False
        return repr(value) if is_literal else self.names.constant(hint, value)


def _labels(spec: Any) -> Sequence[Any]:
    """Return what tells the children of a node apart, for names of variables."""
    return spec[2] if spec[0] in (DICT, MODULE) else range(len(spec) - 3)


def _listed(items: list[str]) -> str:
    """Return what stands within brackets: items on one line, or each on its own."""
    line = ", ".join(items)
    if len(line) <= _LONGEST_LIST:
        return line
    return "\n" + "".join([f"    {item},\n" for item in items])


def _tuple_of(items: list[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({_listed(items)})"


def _define(source: str, qualname: str, namespace: dict[str, Any]) -> Callable[..., Any]:
    """Return the function `make_call` of a source, which tracebacks and debuggers show."""
    # A name may hold anything, but Python's compiler takes no NUL.
    filename = f"{GENERATED_FOLDER}/{qualname}-{next(_serial)}".replace("\0", "?")
    # Not into the function's globals, because the circle would keep it until garbage collection.
    definitions: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), namespace, definitions)
    make_call = definitions["make_call"]
    # No modification time: `linecache.checkcache` then leaves the entry alone.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(make_call.__code__, linecache.cache.pop, filename, None)
    return make_call
