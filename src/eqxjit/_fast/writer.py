"""Writes the fast path of an entry as Python: guards, the jitted call, and the output.

Reads the specs of the arguments and of the output; `native.c` does the same by walking them.
"""

import itertools
import keyword
import linecache
import re
import struct
import textwrap
import threading
import weakref
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Any

import numpy as np

from .._compat import ArrayImpl, fields_of, flatten_one_level, registered_nodes, unflatten_node
from .._places import GENERATED_FOLDER, trim
from .._spec.arrays import passed, wait_for
from .._spec.static_key import ITEMS, THEMSELVES, Static, same
from .._spec.tree import (
    ARRAY,
    ARRAY_CLASSES,
    DICT,
    MODULE,
    NODE,
    SEQUENCE,
    Spec,
    has_tracers,
    is_array,
    parts_of,
)
from .._text import comes_from_signal_handler, short
from .signature import Signature, absent

#: The slow path serves larger trees, because compiling their source takes too long.
MAX_NODES = 2000

# The end of a path says most.
_LONGEST_NAME = 22

# The source of a fast path. A `$` stands for the prefix of our names, underscores with which no
# name of the user's begins. The prefix is put in before the braces are filled, so that no text of
# the user's is ever searched.
_TEMPLATE = """\
def make_call($handler, $otherwise, $jitted, $fast{bound}):
    def {function}({parameters}):
        try:
            $others = False
            try:
                $matches = (
{guards}
                )
            except ($TypeError, $ValueError, $RecursionError) as $error:
                if not $is_for_slow_path($error):
                    raise
                $matches = None
            except $KeyError as $error:
                if $error.__traceback__.tb_next is not None:
                    # Of the user's `==`, or of a signal handler.
                    raise
                # A Module lacks a field.
                $matches = False
            if not $matches:
                if $matches is None:
                    return $handler.slow_call({arguments})
                return $otherwise({arguments})
            $calls = $in_flight.calls
            $n_calls = $len($calls)
            $record = [$entry, $handler, ({values})]
            try:
                $waits = False
                if $others:
                    [{inputs}], $waits = $passed([{inputs}])
                $calls.append($record)
                $output = $jitted({inputs})
                [($program, $arrays)] = $output.items()
                $is_part = $has_tracers($arrays)
                $is_over = $record[1] is not None and ($is_part or not $program.unread)
                if $waits or ($is_over and ($program.must_wait or $is_part)):
                    $wait_for($arrays)
            except $BaseException as $error:
                $hand_over($error, $handler, $record)
                raise
            finally:
                del $calls[$n_calls:]
            if not $is_over or $outs[$program.number][0] is not $out:
                # A trace was made, a program is to be read, or it returns something else.
                return $handler.finish_fast($output, $call_of($record))
            $fast.hits += 1
            if not $fast.is_first:
                $fast.move_to_front()
{statements}
        except $BaseException:
            $trim()
            raise
    return {function}
"""


class _InFlight(threading.local):
    """The calls in flight of a thread, outside in, where C doesn't keep them."""

    def __init__(self) -> None:
        #: Of each its entry, its handler, and the values of the parameters; None and its `Call`
        #: once that is made.
        self.calls: list[list[Any]] = []


in_flight = _InFlight()


def call_of(record: list[Any]) -> Any:
    """Return the `Call` of a call in flight, which is made once."""
    entry, handler, content = record
    if handler is not None:
        args, kwargs = handler.function.signature.arguments_among(content)
        record[1:] = None, handler.make_matched_call(entry, *args, **kwargs)
    return record[2]


def is_for_slow_path(error: BaseException) -> bool:
    """Return whether the slow path has the last word on what a guard raised.

    A `TypeError`, a `ValueError` or a `RecursionError` (exactly these) is how Python says that a
    value can't be hashed, compared or walked. The slow path names the argument, or finds that the
    call doesn't need the comparison. Any other error is the user's or a signal handler's, and is
    raised at once.
    """
    is_pythons = type(error) in (TypeError, ValueError, RecursionError)
    return is_pythons and not comes_from_signal_handler(error)


def hand_over(error: BaseException, handler: Any, record: list[Any]) -> None:
    """Have the handler raise what a call in flight has raised, or a clearer error."""
    try:
        call = call_of(record)
    except Exception:
        # The arguments can't be taken apart again: what was raised first is the call's error.
        return
    try:
        handler.failed_fast(error, call)
    finally:
        # The traceback has this frame: what it holds would wait for the garbage collector.
        del error, handler, record, call


# A metaclass may refuse a class's.
_NAME = vars(type)["__name__"].__get__

# What the source refers to by these names, with its prefix.
_NAMED = (
    *(BaseException, KeyError, RecursionError, TypeError, ValueError, len, map, tuple, type),
    is_for_slow_path,
    *(call_of, flatten_one_level, hand_over, has_tracers, is_array, np.ndarray, passed, same),
    *(trim, unflatten_node, wait_for),
)
_SCOPE = {each.__name__: each for each in _NAMED} | {
    "Array": ArrayImpl,
    "absent": absent,
    "fields_of": fields_of,
    "in_flight": in_flight,
    "new_object": object.__new__,
    "new_tuple": tuple.__new__,
    "only_str": {str},
    "registered_nodes": registered_nodes,
    "scalars": ARRAY_CLASSES - {ArrayImpl, np.ndarray},
}

_serial = itertools.count()


class TooLarge(Exception):
    """A tree for which no source is written."""


class Writer:
    """A writer of the fast path of one entry; making one raises `TooLarge` beyond the bound."""

    def __init__(self, function: Any, entry: Any):
        # The first of its traces' outputs; `finish_fast` makes others.
        out = entry.out
        if len(parts_of(entry.spec)) + len(parts_of(out.spec)) > MAX_NODES:
            raise TooLarge
        self.signature: Signature = function.signature
        self.entry = entry
        users = [self.signature.name, *[each.name for each in self.signature.parameters]]
        #: How our names begin, and no name of the user's.
        self.prefix = "_"
        while any(name.startswith(self.prefix) for name in users):
            self.prefix += "_"
        #: What the source refers to, by name; and the name of each constant, by its `id`.
        scope = {**_SCOPE, "entry": entry, "out": out, "outs": entry.outs}
        self.namespace = {f"{self.prefix}{name}": value for name, value in scope.items()}
        self._constants: dict[int, str] = {}
        self._numbers = itertools.count()
        #: Guards of one argument after the other, the arrays, and the source of each static object.
        self.guards: list[str] = []
        self.arrays: list[str] = []
        self.statics = [self.variable("fun_static") for _ in function.statics]
        #: Statements that make parts of the output, its arrays, and its other static objects.
        self.body: list[str] = []
        self.out_arrays: list[str] = []
        self.out_statics = iter(zip(out.slots, out.statics, strict=True))

    def write(self) -> tuple[str, Callable[..., Any]]:
        """Return the source, and the function `make_call` that it defines.

        This returns the fast path of one wrapper, for `(handler, otherwise, jitted, fast,
        *fun_statics, *fun_arrays)`; `fast.hits` counts calls.

        **Raises:**

        - `TooLarge`, if Python can't compile it.
        """
        try:
            source = self._source()
            return source, _define(source, self.signature.qualname, self.namespace)
        except (SyntaxError, RecursionError, MemoryError) as error:
            # Python's compiler raises each of them for source that is nested too deeply.
            raise TooLarge from error

    def _source(self) -> str:
        signature = self.signature
        fun_arrays = [self.variable("fun_array") for _ in range(self.entry.n_fun)]
        bound = [*self.statics, *fun_arrays]
        self._match_arguments()
        # The function's may be NumPy's, too.
        for fun_array in fun_arrays:
            self._match_array(fun_array, fun_array)
        output = self._make(self.entry.out.spec)
        if self.out_arrays:
            self.body.insert(0, f"[{', '.join(self.out_arrays)}] = {self.prefix}arrays")
        statements = [*self.body, f"return {output}"]
        guards = [each if each.startswith("#") else f"{each} and" for each in self.guards]
        guard = "\n".join(guards).removesuffix(" and") or "True"
        function = _identifier(signature.name)
        if keyword.iskeyword(function) or not function.isidentifier():
            function = f"of_{function}"
        return _TEMPLATE.replace("$", self.prefix).format(
            bound="".join([f", {name}" for name in bound]),
            function=function,
            parameters=signature.header(f"{self.prefix}absent"),
            guards=textwrap.indent(guard, " " * 20),
            arguments=", ".join(signature.forwarded()),
            values=signature.values,
            inputs=", ".join(self.arrays),
            statements=textwrap.indent("\n".join(statements), " " * 12),
        )

    def variable(self, hint: str) -> str:
        """Return a new name like a hint."""
        return f"{self.prefix}{_identifier(hint)}_{next(self._numbers)}"

    def constant(self, hint: str, value: Any) -> str:
        """Return the name of a constant; the same one for the same object."""
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = self.variable(hint)
            self.namespace[name] = value
        return name

    def of_class(self, cls: type) -> str:
        return self.constant(_NAME(cls), cls)

    def _match_arguments(self) -> None:
        """Write the guards of all arguments, those of static ones first: they fail fastest."""
        args, kwargs = self.entry.spec[3:]
        n, keys = len(args) - 3, kwargs[2]
        paths = self.signature.paths(n, keys)
        early: list[str] = []
        late: list[str] = []
        p = self.prefix
        for i, parameter in enumerate(self.signature.parameters):
            name = parameter.name
            guard = f"{name} is {p}absent"
            if parameter.kind == Parameter.VAR_POSITIONAL:
                name, guard = f"*{name}", f"{p}len({name}) == {max(n - i, 0)}"
            elif parameter.kind == Parameter.VAR_KEYWORD:
                others = [key for key, path in zip(keys, paths[n:], strict=True) if key != path]
                name, guard = f"**{name}", self._has_keys(name, others)
            if name not in paths:
                early += [f"# {name}: {guard}", guard]
        # In the order of the spec, which that of arrays and static objects follows.
        for path, spec in zip(paths, [*args[3:], *kwargs[3:]], strict=True):
            self.guards = early if type(spec) is Static else late
            # The name of a class may hold anything, a line break included.
            kind = _identifier(_NAME(spec[1])) if type(spec) is tuple else "static"
            self.guards.append(f"# {path}: {'array' if spec is ARRAY else kind}")
            self._match(path if path.isidentifier() else self.variable(path), path, spec)
        self.guards = early + late

    def _match(self, var: str, source: str, spec: Spec) -> None:
        """Write the guards of a value; `source` is evaluated once, and bound to `var` if needed."""
        guards, p = self.guards, self.prefix
        inner = source if source == var else f"{var} := {source}"
        if spec is ARRAY:
            self._match_array(var, inner)
        elif spec is None:
            guards.append(f"{source} is None")
        elif type(spec) is Static:
            self._match_static(var, source, spec)
        else:
            kind, cls, aux, *below = spec
            guards.append(f"{p}type({inner}) is {self.of_class(cls)}")
            if kind == SEQUENCE:
                if aux is not None:
                    # Its class may have been registered as another node since.
                    guards.append(f"{self.of_class(cls)} not in {p}registered_nodes")
                guards.append(f"{p}len({var}) == {len(below)}")
                parts = [f"{var}[{i}]" for i in range(len(below))]
            elif kind == DICT:
                guards.append(self._has_keys(var, aux))
                parts = [f"{var}[{key!r}]" for key in aux]
            elif kind == MODULE:
                # Where another one is in the place of a field, reading it raises a `KeyError`.
                fields = self.variable(f"{var}_fields")
                guards.append(f"{p}len({fields} := {p}fields_of({var})) == {len(aux)}")
                parts = [f"{fields}[{name!r}]" for name in aux]
            else:
                flat, children = self.variable(f"{var}_flat"), self.variable(f"{var}_children")
                guards.append(f"({flat} := {p}flatten_one_level({var})) is not None")
                self._match_static(self.variable(f"{var}_metadata"), f"{flat}[1]", aux)
                guards.append(f"{p}len({children} := {p}tuple({flat}[0])) == {len(below)}")
                parts = [f"{children}[{i}]" for i in range(len(below))]
            for part, child in zip(parts, below, strict=True):
                self._match(self.variable(part), part, child)

    def _has_keys(self, var: str, keys: Sequence[str]) -> str:
        """Return the guard of a dict's keys: a key that is missing must not raise later."""
        if not keys:
            return f"not {var}"
        expected = self.constant("keys", frozenset(keys))
        # A key of a class derived from `str` equals a text, too.
        p = self.prefix
        return f"{var}.keys() == {expected} and {{*{p}map({p}type, {var})}} == {p}only_str"

    def _match_array(self, var: str, source: str) -> None:
        if source == var:
            # A parameter isn't assigned to: the slow path gets it where a guard fails.
            var = self.variable(f"{var}_array")
            source = f"{var} := {source}"
        self.arrays.append(var)
        p = self.prefix
        scalar = f"{p}type({var}) in {p}scalars"
        other = f"({p}others := {p}type({var}) is {p}ndarray or {p}is_array({var}))"
        self.guards.append(f"({p}type({source}) is {p}Array or {scalar} or {other})")

    def _match_static(self, var: str, source: str, spec: Any) -> None:
        p = self.prefix
        self.statics.append(var)
        if source != var:
            source = f"({var} := {source})"
        if spec.ask:
            # Its class may have been registered as a node since.
            self.guards.append(f"{p}flatten_one_level({source}) is None")
            source = var
        self._match_key(var, source, spec.key)

    def _match_key(self, var: str, bound: str, key: Any) -> None:
        p = self.prefix
        # The rest of a key in this form are its parts.
        reader, kind, _, *parts = key if type(key) is tuple else (None, type(key), None)
        plain = key if kind in THEMSELVES else None
        if kind is float:
            [number] = struct.unpack("d", parts[0])
            # Zeros have two signs, and NaN equals nothing.
            plain = number if number and number == number else None
        if isinstance(key, weakref.ref):
            # Not as a constant: the entry goes with the object.
            self.guards.append(f"{bound} is {self.constant('ref', key)}() is not None")
        elif plain is not None:
            constant = self.constant(f"{kind.__name__}_{short(plain)}", plain)
            is_equal = f"{p}type({var}) is {self.of_class(kind)} and {var} == {constant}"
            self.guards.append(f"({bound} is {constant} or {is_equal})")
        elif key is None or kind is bool:
            self.guards.append(f"{bound} is {key and parts[0]}")
        elif reader == ITEMS and kind is tuple:
            # As the metadata of many nodes, and the sizes of layers.
            self.guards.append(f"{p}type({bound}) is {p}tuple")
            self.guards.append(f"{p}len({var}) == {len(parts)}")
            for i, part in enumerate(parts):
                child = self.variable(f"{var}_{i}")
                self._match_key(child, f"({child} := {var}[{i}])", part)
        else:
            self.guards.append(f"{p}same({bound}, {self.constant('key', key)})")

    def _make(self, spec: Spec) -> str:
        """Return the expression of a part of the output, which statements may make before."""
        if spec is ARRAY:
            self.out_arrays.append(self.variable("array"))
            return self.out_arrays[-1]
        if spec is None:
            return "None"
        if type(spec) is Static:
            return self._static()
        p = self.prefix
        kind, cls, aux, *below = spec
        # Before those below, as `split` has them.
        metadata = self._static() if kind == NODE else ""
        parts = [*map(self._make, below)]
        items, name = ", ".join(parts), self.variable(f"new_{_NAME(cls)}")
        as_tuple = f"({items},)" if parts else "()"
        if kind == MODULE:
            fields = self.variable("fields")
            self.body.append(f"{name} = {p}new_object({self.of_class(cls)})")
            self.body.append(f"{fields} = {p}fields_of({name})")
            self.body += [f"{fields}[{f!r}] = {v}" for f, v in zip(aux, parts, strict=True)]
            return name
        if kind == NODE:
            made = f"{p}unflatten_node({self.of_class(cls)}, {metadata}, [{items}])"
        elif kind == DICT:
            pairs = [f"{key!r}: {part}" for key, part in zip(aux, parts, strict=True)]
            made = f"{{{', '.join(pairs)}}}"
        elif cls is list:
            made = f"[{items}]"
        elif aux is None:
            made = as_tuple
        elif aux:
            made = f"{p}new_tuple({self.of_class(cls)}, {as_tuple})"
        else:
            made = f"{self.of_class(cls)}({items})"
        self.body.append(f"{name} = {made}")
        return name

    def _static(self) -> str:
        slot, value = next(self.out_statics)
        if slot >= 0:
            return self.statics[slot]
        is_literal = value is None or value is True or value is False
        return repr(value) if is_literal else self.constant(_NAME(type(value)), value)


def _identifier(text: str) -> str:
    """Return the end of a text as a part of a name."""
    return re.sub(r"\W+", "_", text, flags=re.ASCII)[-_LONGEST_NAME:].strip("_")


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
