"""Writes the fast path of an entry as Python source: guards, the jitted call, and the output.

The source follows from the specs of the arguments and of the output. `native.c` walks these specs
in each call instead.
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
from .._signals import comes_from_signal_handler, may_be_dropped
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
from .._text import short
from .signature import Signature, absent

#: With more nodes and leaves than this, calls take the slow path, because compiling the source of a
#: fast path would take too long.
MAX_NODES = 2000

# Generated names keep this many characters from the end of a path, where paths differ most.
_LONGEST_NAME = 22

# The source of a fast path. Each `$` is replaced by the prefix of our names, which consists of
# underscores, and with which no name of the user's begins. The replacement happens before the
# braces are filled, so a `$` in a string of the user's stays.
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
                    # The user's `==` or a signal handler raised it.
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
                $waits = $may_wait = False
                if $others:
                    $n_used = $len($entry.used)
                    [{inputs}], $waits, $may_wait = $passed([{inputs}], $entry.used)
                $calls.append($record)
                $output = $jitted({inputs})
                [($program, $arrays)] = $output.items()
                $is_part = $has_tracers($arrays)
                $is_warm = $record[1] is not None and ($is_part or not $program.unread)
                if $may_wait and $entry.may_use_more($program, $n_used):
                    $waits = True
                if $waits or ($is_warm and ($program.must_wait or $is_part)):
                    $wait_for($arrays)
            except $BaseException as $error:
                $hand_over($error, $handler, $record)
                raise
            finally:
                del $calls[$n_calls:]
            if not $is_warm or $outs[$program.number][0] is not $out:
                # JAX traced, or the program is unread, or its output has a different structure.
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
    """The calls in flight of the current thread, if the native back end isn't in use.

    - `calls`: a record for each call, outermost first. Before the call has a `Call`, its record is
        `[entry, handler, values of the parameters]`, and then `[entry, None, call]`.
    """

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []


in_flight = _InFlight()


def call_of(record: list[Any]) -> Any:
    """Return the `Call` of a call in flight. Create the `Call` if there is none yet."""
    entry, handler, values = record
    if handler is not None:
        args, kwargs = handler.function.signature.arguments_among(values)
        record[1:] = None, handler.make_matched_call(entry, *args, **kwargs)
    return record[2]


def is_for_slow_path(error: BaseException) -> bool:
    """Return whether the slow path makes a call after an error that a guard raised.

    Python raises a `TypeError`, a `ValueError` or a `RecursionError`, and no subclass of these, if
    a value can't be hashed, compared or walked. The slow path then names the argument in its error,
    or it succeeds, because it doesn't need the comparison. Any other error is raised at once,
    because it comes from the user's code or from a signal handler.
    """
    is_of_python = type(error) in (TypeError, ValueError, RecursionError)
    return is_of_python and not comes_from_signal_handler(error)


def hand_over(error: BaseException, handler: Any, record: list[Any]) -> None:
    """Have the handler raise the error of a call in flight, or a clearer error."""
    try:
        call = call_of(record)
    except Exception as later:
        if not may_be_dropped(later):
            raise
        # The arguments can't be bound and split once more. That matters less than the error of the
        # call, which the generated code then raises.
        return
    try:
        handler.failed_fast(error, call)
    finally:
        # The traceback refers to this frame, so these variables would be part of a cycle.
        del error, handler, record, call


# Not `cls.__name__`, because a metaclass may not allow that.
_name_of_class = vars(type)["__name__"].__get__

# Objects to which the source refers by their `__name__`, with the prefix in front.
_NAMED = (
    BaseException,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
    len,
    map,
    tuple,
    type,
    call_of,
    flatten_one_level,
    hand_over,
    has_tracers,
    is_array,
    is_for_slow_path,
    np.ndarray,
    passed,
    same,
    trim,
    unflatten_node,
    wait_for,
)
# All objects to which the source of any entry refers, by their names without the prefix.
_SCOPE = {each.__name__: each for each in _NAMED} | {
    "Array": ArrayImpl,
    "absent": absent,
    "fields_of": fields_of,
    "in_flight": in_flight,
    "iter_tuple": tuple.__iter__,
    "new_object": object.__new__,
    "new_tuple": tuple.__new__,
    "only_str": {str},
    "registered_nodes": registered_nodes,
    "scalars": ARRAY_CLASSES - {ArrayImpl, np.ndarray},
}

_serial = itertools.count()


class TooLarge(Exception):
    """Raised for a tree that is too large, or too deep, for generated Python."""


class Writer:
    """Writes the source of one entry's fast path.

    - `signature`: the signature of the user's function.
    - `entry`: the entry.
    - `prefix`: the beginning of our names. No name of the user's begins with it.
    - `namespace`: the objects to which the source refers, by name.
    - `guards`: the source of the guards, argument by argument, with comments in between.
    - `arrays`: the names of the arrays of the call, in the order in which JAX takes them.
    - `statics`: the names of the static objects of the call, in the order of `Call.all_statics`.
    - `body`: statements that create parts of the output.
    - `out_arrays`: the names of the arrays of the output.
    - `out_statics`: an iterator over the slot and value of each static object of the output.
    """

    def __init__(self, function: Any, entry: Any):
        """**Raises:** `TooLarge` if the trees of the entry have more than `MAX_NODES` nodes."""
        # The source combines the output of the entry's first program. If a later program returns a
        # different structure, `finish_fast` combines its output.
        out = entry.out
        if len(parts_of(entry.spec)) + len(parts_of(out.spec)) > MAX_NODES:
            raise TooLarge
        self.signature: Signature = function.signature
        self.entry = entry
        users_names = [self.signature.name, *[each.name for each in self.signature.parameters]]
        self.prefix = "_"
        while any(name.startswith(self.prefix) for name in users_names):
            self.prefix += "_"
        scope = {**_SCOPE, "entry": entry, "out": out, "outs": entry.outs}
        self.namespace = {f"{self.prefix}{name}": value for name, value in scope.items()}
        # The name of each constant, by the `id` of its object.
        self._constants: dict[int, str] = {}
        self._numbers = itertools.count()
        self.guards: list[str] = []
        self.arrays: list[str] = []
        self.statics = [self.variable("fun_static") for _ in function.statics]
        self.body: list[str] = []
        self.out_arrays: list[str] = []
        self.out_statics = iter(zip(out.slots, out.statics, strict=True))

    def write(self) -> tuple[str, Callable[..., Any]]:
        """Return the source, and the function `make_call` that the source defines.

        `make_call(handler, otherwise, jitted, fast, *fun_statics, *fun_arrays)` returns the fast
        path of one wrapper, as a function with the user's signature.

        **Raises:**

        - `TooLarge`, if the tree is too deep for Python's compiler.
        """
        try:
            source = self._source()
            return source, _define(source, self.signature.qualname, self.namespace)
        except (SyntaxError, RecursionError, MemoryError) as error:
            # Python's compiler raises any of these for source that is nested too deeply.
            raise TooLarge from error

    def _source(self) -> str:
        signature = self.signature
        fun_arrays = [self.variable("fun_array") for _ in range(self.entry.n_fun)]
        bound = [*self.statics, *fun_arrays]
        self._match_arguments()
        # The wrapped function's own arrays always match. They get guards all the same, because
        # these note whether any array has to be copied, like a NumPy array.
        for fun_array in fun_arrays:
            self._match_array(fun_array, fun_array)
        output = self._combine(self.entry.out.spec)
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

    # --- Names --------------------------------------------------------------------------------

    def variable(self, hint: str) -> str:
        """Return a new name that resembles a hint."""
        return f"{self.prefix}{_identifier(hint)}_{next(self._numbers)}"

    def constant(self, hint: str, value: Any) -> str:
        """Return the name of a constant. The same object always has the same name."""
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = self.variable(hint)
            self.namespace[name] = value
        return name

    def class_name(self, cls: type) -> str:
        """Return the name of a constant that is a class."""
        return self.constant(_name_of_class(cls), cls)

    # --- Guards -------------------------------------------------------------------------------

    def _match_arguments(self) -> None:
        """Write the guards of all arguments.

        The guards of static arguments come first, because they tell calls apart fastest.
        """
        args_spec, kwargs_spec = self.entry.spec[3:]
        arg_specs, kwarg_specs = args_spec[3:], kwargs_spec[3:]
        paths = self.signature.paths(len(arg_specs), kwargs_spec[2])
        early = self._guards_of_rest(paths, len(arg_specs), kwargs_spec[2])
        late: list[str] = []
        # In the order of the spec, because arrays and static objects are numbered in this order.
        for path, spec in zip(paths, [*arg_specs, *kwarg_specs], strict=True):
            self.guards = early if type(spec) is Static else late
            self.guards.append(f"# {path}: {self._label(spec)}")
            self._match(path if path.isidentifier() else self.variable(path), path, spec)
        self.guards = early + late

    def _guards_of_rest(self, paths: list[str], n_args: int, keywords: Sequence[str]) -> list[str]:
        """Return the guards of the parameters without an argument of the same name in the spec.

        An optional parameter must be absent. In `*args` there must be as many arguments as in the
        spec, and in `**kwargs` there must be the same keywords.
        """
        p = self.prefix
        guards: list[str] = []
        for i, parameter in enumerate(self.signature.parameters):
            name = parameter.name
            guard = f"{name} is {p}absent"
            if parameter.kind == Parameter.VAR_POSITIONAL:
                guard = f"{p}len({name}) == {max(n_args - i, 0)}"
                name = f"*{name}"
            elif parameter.kind == Parameter.VAR_KEYWORD:
                # A keyword argument with a parameter of its own has the keyword as its path. All
                # other keyword arguments are in this dict.
                keyword_paths = zip(keywords, paths[n_args:], strict=True)
                guard = self._has_keys(name, [key for key, path in keyword_paths if key != path])
                name = f"**{name}"
            if name not in paths:
                guards += [f"# {name}: {guard}", guard]
        return guards

    def _label(self, spec: Spec) -> str:
        """Return a description of an argument, for the comment above its guards."""
        if spec is ARRAY:
            return "array"
        # The name of a class may contain anything, even a line break.
        return _identifier(_name_of_class(spec[1])) if type(spec) is tuple else "static"

    def _match(self, var: str, source: str, spec: Spec) -> None:
        """Write the guards of a value.

        `source` is an expression for the value. It is evaluated once. If the guards need the value
        several times, they assign it to the variable `var`.
        """
        inner = source if source == var else f"{var} := {source}"
        if spec is ARRAY:
            self._match_array(var, inner)
        elif spec is None:
            self.guards.append(f"{source} is None")
        elif type(spec) is Static:
            self._match_static(var, source, spec)
        else:
            self.guards.append(f"{self.prefix}type({inner}) is {self.class_name(spec[1])}")
            parts = self._match_node(var, spec)
            for part, child in zip(parts, spec[3:], strict=True):
                self._match(self.variable(part), part, child)

    def _match_node(self, var: str, spec: Spec) -> list[str]:
        """Write the guards of a node whose class matches; return the source of each child."""
        guards, p = self.guards, self.prefix
        kind, cls, aux, *children = spec
        n = len(children)
        if kind == SEQUENCE:
            if aux is None:
                guards.append(f"{p}len({var}) == {n}")
                return [f"{var}[{i}]" for i in range(n)]
            # The class of a named tuple may have been registered as a node since the trace.
            guards.append(f"{self.class_name(cls)} not in {p}registered_nodes")
            # Not by index, because the class may have a `__getitem__` that returns other values.
            items = self.variable(f"{var}_items")
            guards.append(f"{p}len({items} := [*{p}iter_tuple({var})]) == {n}")
            return [f"{items}[{i}]" for i in range(n)]
        if kind == DICT:
            guards.append(self._has_keys(var, aux))
            return [f"{var}[{key!r}]" for key in aux]
        if kind == MODULE:
            # A Module with as many fields but different names raises a `KeyError` below, which
            # counts as no match.
            fields = self.variable(f"{var}_fields")
            guards.append(f"{p}len({fields} := {p}fields_of({var})) == {n}")
            return [f"{fields}[{name!r}]" for name in aux]
        flat = self.variable(f"{var}_flat")
        found = self.variable(f"{var}_children")
        guards.append(f"({flat} := {p}flatten_one_level({var})) is not None")
        self._match_static(self.variable(f"{var}_metadata"), f"{flat}[1]", aux)
        guards.append(f"{p}len({found} := {p}tuple({flat}[0])) == {n}")
        return [f"{found}[{i}]" for i in range(n)]

    def _has_keys(self, var: str, keys: Sequence[str]) -> str:
        """Return the guard that a dict has exactly these keys, all of type `str`."""
        if not keys:
            return f"not {var}"
        expected = self.constant("keys", frozenset(keys))
        # A key of a subclass of `str` may equal a string, too.
        p = self.prefix
        return f"{var}.keys() == {expected} and {{*{p}map({p}type, {var})}} == {p}only_str"

    def _match_array(self, var: str, source: str) -> None:
        if source == var:
            # Not the parameter's own name, because the template assigns copies to these names. The
            # arrays of the wrapped function are variables of `make_call`. An assignment to such a
            # name would make it a local variable, which has no value yet.
            var = self.variable(f"{var}_array")
            source = f"{var} := {source}"
        self.arrays.append(var)
        p = self.prefix
        is_scalar = f"{p}type({var}) in {p}scalars"
        is_other = f"({p}others := {p}type({var}) is {p}ndarray or {p}is_array({var}))"
        self.guards.append(f"({p}type({source}) is {p}Array or {is_scalar} or {is_other})")

    def _match_static(self, var: str, source: str, spec: Any) -> None:
        p = self.prefix
        self.statics.append(var)
        if source != var:
            source = f"({var} := {source})"
        if spec.ask:
            # The class of the object may have been registered as a node since.
            self.guards.append(f"{p}flatten_one_level({source}) is None")
            source = var
        self._match_key(var, source, spec.key)

    def _match_key(self, var: str, source: str, key: Any) -> None:
        """Write the guards that a static object has a key.

        `source` is an expression for the object, which also assigns it to `var`.
        """
        p = self.prefix
        # A key that is a tuple has the form (reader, class, names or None, part, ...).
        reader, kind, _, *parts = key if type(key) is tuple else (None, type(key), None)
        constant = _constant_of(key)
        if isinstance(key, weakref.ref):
            # The constant is the reference, because the entry must not keep its object alive.
            self.guards.append(f"{source} is {self.constant('ref', key)}() is not None")
        elif constant is not None:
            name = self.constant(f"{kind.__name__}_{short(constant)}", constant)
            is_equal = f"{p}type({var}) is {self.class_name(kind)} and {var} == {name}"
            self.guards.append(f"({source} is {name} or {is_equal})")
        elif key is None or kind is bool:
            expected = None if key is None else parts[0]
            self.guards.append(f"{source} is {expected}")
        elif reader == ITEMS and kind is tuple:
            # Tuples are frequent: the metadata of many nodes, and the sizes of layers.
            self.guards.append(f"{p}type({source}) is {p}tuple")
            self.guards.append(f"{p}len({var}) == {len(parts)}")
            for i, part in enumerate(parts):
                child = self.variable(f"{var}_{i}")
                self._match_key(child, f"({child} := {var}[{i}])", part)
        else:
            self.guards.append(f"{p}same({source}, {self.constant('key', key)})")

    # --- The output ---------------------------------------------------------------------------

    def _combine(self, spec: Spec) -> str:
        """Return an expression for a part of the output. Add statements that it needs to `body`."""
        if spec is ARRAY:
            self.out_arrays.append(self.variable("array"))
            return self.out_arrays[-1]
        if spec is None:
            return "None"
        if type(spec) is Static:
            return self._next_static()
        kind, cls, aux, *below = spec
        # The metadata comes before the static objects of the children, as in `split`.
        metadata = self._next_static() if kind == NODE else ""
        children = [*map(self._combine, below)]
        name = self.variable(f"new_{_name_of_class(cls)}")
        p = self.prefix
        if kind == MODULE:
            fields = self.variable("fields")
            self.body.append(f"{name} = {p}new_object({self.class_name(cls)})")
            self.body.append(f"{fields} = {p}fields_of({name})")
            for field, child in zip(aux, children, strict=True):
                self.body.append(f"{fields}[{field!r}] = {child}")
            return name
        if kind == NODE:
            items = ", ".join(children)
            made = f"{p}unflatten_node({self.class_name(cls)}, {metadata}, [{items}])"
        elif kind == DICT:
            pairs = [f"{key!r}: {child}" for key, child in zip(aux, children, strict=True)]
            made = f"{{{', '.join(pairs)}}}"
        else:
            made = self._make_sequence(cls, aux, children)
        self.body.append(f"{name} = {made}")
        return name

    def _make_sequence(self, cls: type, aux: bool | None, children: list[str]) -> str:
        """Return an expression that creates a list, a tuple or a named tuple."""
        items = ", ".join(children)
        as_tuple = f"({items},)" if children else "()"
        if cls is list:
            return f"[{items}]"
        if aux is None:
            return as_tuple
        if aux:
            # The class has a generated `__new__`, which does what `tuple.__new__` does.
            return f"{self.prefix}new_tuple({self.class_name(cls)}, {as_tuple})"
        return f"{self.class_name(cls)}({items})"

    def _next_static(self) -> str:
        """Return an expression for the next static object of the output."""
        slot, value = next(self.out_statics)
        if slot >= 0:
            # The object came in with the call.
            return self.statics[slot]
        is_literal = value is None or value is True or value is False
        return repr(value) if is_literal else self.constant(_name_of_class(type(value)), value)


def _constant_of(key: Any) -> Any:
    """Return the constant that the guards compare a static object with, by type and `==`.

    `None` if such a comparison isn't enough, or if the key is the key of `None`.
    """
    if type(key) in THEMSELVES:
        return key
    if type(key) is not tuple or key[1] is not float:
        return None
    [number] = struct.unpack("d", key[3])
    # Zeros are equal despite different signs, and NaN doesn't equal itself.
    return number if number and number == number else None


def _identifier(text: str) -> str:
    """Return the end of a string, changed so that it can be a part of a name."""
    return re.sub(r"\W+", "_", text, flags=re.ASCII)[-_LONGEST_NAME:].strip("_")


def _define(source: str, qualname: str, namespace: dict[str, Any]) -> Callable[..., Any]:
    """Return the function `make_call` that a source defines.

    Tracebacks and debuggers can show the source as long as the function lives.
    """
    # A qualified name may contain anything, but Python's compiler rejects a NUL in a file name.
    filename = f"{GENERATED_FOLDER}/{qualname}-{next(_serial)}".replace("\0", "?")
    # Not in `namespace`, which has the globals of the function. The function would then be in a
    # cycle, and live until garbage collection.
    definitions: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), namespace, definitions)
    make_call = definitions["make_call"]
    # Without a modification time, `linecache.checkcache` doesn't drop the source.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(make_call.__code__, linecache.cache.pop, filename, None)
    return make_call
