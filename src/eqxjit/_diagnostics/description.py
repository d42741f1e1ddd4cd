"""Describes what a call was traced for: each part of its arguments by its path, from its spec."""

import datetime
import functools
import inspect
import itertools
import pathlib
import random
import re
import types
import uuid
import weakref
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer

from .._compat import ArrayImpl, fields_of, flatten_one_level
from .._places import CallSite, captured, code_of, is_users, is_users_module, transformation_of
from .._spec.static_key import CONSTANTS, ITEMS, PAIRS, Opaque, Static, static_key
from .._spec.tree import ARRAY, NODE, children, is_array, read_node, split
from .._text import counted, short

# Larger trees aren't described.
_MAX_PARTS = 50_000

# Longer texts are cut where they are shown, and those of objects where they are made.
LONG_TEXT = 40
_MAX_TEXT = 1_000
# Larger integers fit no dtype, and Python refuses to write out those of thousands of digits.
_MAX_BITS = 63

# What a callable holds is described so deep, but for containers of more entries; and so many
# constants are a part of its text.
_MAX_DEPTH = 4
_MAX_ENTRIES = 100
_MAX_CONSTANTS = 4

#: Python's types of numbers by their names, without that of truth values.
NUMBERS: dict[str, type] = {"int": int, "float": float, "complex": complex}

# By their types, what remedies tell apart of values that don't equal themselves alone.
_NATURES: dict[tuple[type, ...], str] = {
    (np.random.Generator, np.random.RandomState, np.random.BitGenerator): "iterator",
    (random.Random,): "iterator",
    (Tracer,): "array",
    (datetime.date, datetime.time, pathlib.PurePath, uuid.UUID): "label",
    (slice,): "slice",
}
_NATURES_OF_CONSTANTS = {**dict.fromkeys(NUMBERS, "number"), "str": "label", "bytes": "label"}
_REMADE = ("function", "instance", "iterator", "method", "partial")

_WRAPPED = re.compile(r"^(?:\._fun\w*)+")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def array_text(dtype: Any, shape: Iterable[Any]) -> str:
    """Return the text of an array's type, as `float32[2,3]`."""
    return f"{dtype}[{','.join(map(str, shape))}]"


class ArrayPart(NamedTuple):
    """An array, as JAX sees it when it traces."""

    shape: tuple[Any, ...]
    dtype: str
    weak_type: bool
    # Empty where JAX may choose.
    placement: str

    nature = kind = "traced array"
    key = None
    is_node = False

    def __str__(self) -> str:
        weak = " of weak type" if self.weak_type else ""
        placement = f" on {self.placement}" if self.placement else ""
        return f"{array_text(self.dtype, self.shape)}{weak}{placement}"


class Part(NamedTuple):
    """A static value, or a node without its children; `kind` is the name of its type.

    `key` is equal, if all else is, to that of another exactly if one may stand for the other.
    """

    text: str
    key: Any
    kind: str
    # What remedies depend on: of a node "container", "object" (a dataclass into which JAX doesn't
    # look) or nothing; of what equals itself alone "function", "partial", "method", "instance"; of
    # another value as of `_NATURES`.
    nature: str = ""
    # Of a function, or of the class of anything else; empty for what may be in anybody's hands.
    module: str = ""
    # Where a callable's code is, and the function that defines it, or JAX's transformation.
    made_at: CallSite | None = None
    maker: str = ""
    # The class of the Module that is transformed.
    transformed: str = ""
    # Whether parts of it are described, too.
    is_node: bool = False
    # What else to say, where that alone tells two nodes apart.
    detail: str = " (another class of that name)"

    @property
    def is_transformed(self) -> bool:
        """True for what a transformation of JAX's returns."""
        return self.maker.startswith("jax.")

    @property
    def is_local(self) -> bool:
        """True for a function, or a partial of one, that has no name at module level."""
        # Those are in backquotes.
        return self.made_at is not None and "`" in self.text

    @property
    def equals_itself_alone(self) -> bool:
        return self.nature in _REMADE

    @property
    def is_opaque(self) -> bool:
        """True for a node into which JAX doesn't look."""
        return self.nature not in ("", "container")

    @property
    def site(self) -> str:
        """The user's line where a callable's code is; empty for anything else."""
        return str(self.made_at) if self.made_at and is_users(self.made_at.filename) else ""

    def __str__(self) -> str:
        text = self.text
        if self.is_local and self.site:
            # Not a part of the text, because the working directory may change.
            return f"{text} at {self.site}"
        is_whole = self.is_node or self.made_at or len(text) <= LONG_TEXT
        return text if is_whole else f"{text[:LONG_TEXT]}..."


class Row(NamedTuple):
    """A part of a call, its path, and the rows of the nodes that hold it, inside out."""

    path: str
    # Of either class, which its reader narrows.
    part: Any
    around: "tuple[Row, ...]" = ()
    # It is in a static field, into which JAX doesn't look.
    is_field: bool = False

    @property
    def name(self) -> str:
        """The path, without Equinox's wrappers around a function."""
        return _WRAPPED.sub("", self.path).lstrip(".")


class Description(tuple[Row, ...]):
    """The parts of a call, outside in."""

    def __str__(self) -> str:
        """Return each argument in a few words: `x: float32[3]`, `model: MLP with 4 arrays`."""
        if self is UNKNOWN:
            return "..."
        texts: list[str] = []
        # What is in an argument comes between it and the next one.
        starts = [index for index, row in enumerate(self) if not row.around]
        for start, stop in itertools.pairwise([*starts, len(self)]):
            path, part = self[start][:2]
            if part.is_node:
                arrays = [row for row in self[start:stop] if isinstance(row.part, ArrayPart)]
                texts.append(f"{path}: {part} with {counted(len(arrays), 'array')}")
            else:
                texts.append(f"{path}{': ' if isinstance(part, ArrayPart) else '='}{part}")
        return ", ".join(texts)


#: The classes of what `filter_jit` returns.
WRAPPERS: set[type] = set()

#: Of a call that defies description. (That of a call without arguments is empty.)
UNKNOWN = Description([Row("...", Part("unknown", None, ""))])


def describe(call: Any) -> Description:
    """Describe the arguments of a call, and its function where copies of it may differ."""
    function = call.function
    # Those of a frozen function are always the same.
    fun_arrays = () if function.keeps_arrays else call.fun_arrays
    # What was lowered has no entry for a call of another structure.
    trace = call.entry.latest_trace if hasattr(call, "entry") else None
    described = _with_arrays(trace, [*call.arrays, *fun_arrays])
    if described is not None:
        return described
    args, specs, keys = call.spec[3][3:], call.spec[4][3:], sorted(call.kwargs)
    names = function.signature.paths(len(args))
    named = [*zip(names, args, call.args, strict=True)]
    named += [(key, spec, call.kwargs[key]) for key, spec in zip(keys, specs, strict=True)]
    if fun_arrays:
        named.append(("fun", function.spec, function.combine(fun_arrays)))
    return describe_trees(named)


def _with_arrays(trace: Any, arrays: list[Any]) -> Description | None:
    """Return the description of a trace of the same entry, but with these arrays; or None."""
    if trace is None or trace._description is UNKNOWN:
        return None
    rows = trace._description
    if sum([type(row.part) is ArrayPart for row in rows]) != len(arrays):
        return None
    parts = map(_array, arrays)
    # Rows are shared, because a function may have many traces of a large tree.
    return Description(
        [
            r
            if type(r.part) is not ArrayPart or (part := next(parts)) == r.part
            else Row(r.path, part, *r[2:])
            for r in rows
        ]
    )


def describe_function(call: Any) -> Description:
    """Describe the function of a call, with what a partial, a method or an instance holds."""
    function = call.function
    # One that holds arrays for good is of its own.
    if function.keeps_arrays:
        return UNKNOWN
    return describe_trees([("", function.spec, function.combine(call.fun_arrays))], _MAX_DEPTH)


def describe_trees(named: list[tuple[str, Any, Any]], depth: int = 0) -> Description:
    """Describe trees, each from its name, its spec and itself.

    Of what an object that equals itself alone holds constants are described, and all else up to a
    depth.
    """
    rows: list[Row] = []
    # What is left of each node under way, outside in; its path, the rows of the nodes that hold
    # what is left, and whether that is in a static field. Children are as of `children`; in a
    # static field, with keys in place of specs.
    levels: list[Any] = [(iter([(*each, False) for each in named]), "", (), False)]
    while levels:
        rest, prefix, around, is_in_field = levels[-1]
        for suffix, spec, value, is_field in rest:
            path, is_field, below = prefix + suffix, is_field or is_in_field, ()
            try:
                if spec is ARRAY:
                    part: Any = _array(value)
                elif type(value) in CONSTANTS:
                    part = _constant(value, is_field)
                elif type(spec) is tuple and not is_field:
                    part, below = _node(spec, value)
                else:
                    key = spec.key if isinstance(spec, Static) else spec
                    part, below = _static(key, value, len(levels) <= depth)
            except Exception:
                # The user's class may refuse to be asked: for its name, its fields, its flatten, a
                # `repr`. It is described for us, not for the call, which goes on.
                part, below = Part("object", None, "object"), ()
            row = Row(path, part, around, is_field)
            rows.append(row)
            if len(rows) + len(below) > _MAX_PARTS:
                return UNKNOWN
            if below:
                # What such an object holds has specs.
                is_field = is_field and not part.equals_itself_alone
                levels.append((iter(below), path, (row, *around), is_field))
                break
        else:
            levels.pop()
    return Description(rows)


def _constant(value: Any, is_field: bool) -> Part:
    if value is None and not is_field:
        # JAX takes it for a node without children.
        return Part("None", None, "None", is_node=True)
    name = type(value).__name__
    if type(value) is int and value.bit_length() > _MAX_BITS:
        return Part(short(value, _MAX_TEXT), hash(value), name)
    return Part(repr(value), None, name, _NATURES_OF_CONSTANTS.get(name, ""))


def _array(array: Any) -> ArrayPart:
    """Return the part of an array: JAX's, NumPy's, a tracer or a structure."""
    if type(array) is ArrayImpl:
        aval, is_put = array.aval, array.committed
    else:
        try:
            aval: Any = jax.typeof(array)
        except (TypeError, ValueError):
            # NumPy's, of a dtype that JAX refuses.
            aval = array
        # A tracer has no place that it could tell.
        is_put = not isinstance(array, Tracer) and getattr(array, "committed", True)
    # JAX puts the others where it likes.
    sharding = getattr(array, "sharding", None) if is_put else None
    return _array_part(aval.shape, aval.dtype, getattr(aval, "weak_type", False), sharding)


# A model has many alike, and each text takes microseconds.
@functools.lru_cache(maxsize=1024)
def _array_part(shape: tuple[Any, ...], dtype: Any, weak_type: bool, sharding: Any) -> ArrayPart:
    placement = ""
    if isinstance(sharding, jax.sharding.NamedSharding):
        axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        placement = f"a mesh of {axes} by {sharding.spec}"
    elif sharding is not None:
        placement = ", ".join(sorted(f"{d.platform}:{d.id}" for d in sharding.device_set))
    return ArrayPart(shape, str(dtype), weak_type, placement)


def _node(spec: tuple[Any, ...], value: Any) -> tuple[Part, list[Any]]:
    cls, name, n = spec[1], spec[1].__name__, len(spec) - 3
    if spec[0] != NODE:
        return _part_of_class(cls, n), children(spec, value)
    suffixes, values, metadata = read_node(value)
    if cls in WRAPPERS:
        # Around anybody's function.
        key, detail = hash(static_key(metadata.options)), " with other options"
        below = [(".__wrapped__", metadata.spec, value.__wrapped__, False)]
        return Part(name, key, name, is_node=True, detail=detail), below
    is_partial = cls is jax.tree_util.Partial
    names = [".args", ".keywords"] if is_partial else suffixes
    below: list[Any] = [(*each, False) for each in zip(names, spec[3:], values, strict=True)]
    if is_partial:
        below.append((".func", static_key(metadata), metadata, True))
    elif issubclass(cls, eqx.Module):
        # One with fields that its class doesn't have, such as a wrapper's `__doc__`.
        rest = [(f".{name}", v) for name, v in fields_of(value).items() if f".{name}" not in names]
        below += [(suffix, static_key(v), v, True) for suffix, v in rest]
    elif not issubclass(cls, dict):
        key = (name, weakref.ref(cls), lasting(static_key(metadata)))
        detail = f" with metadata {short(metadata)}"
        return Part(name, key, name, "", cls.__module__, is_node=True, detail=detail), below
    return _part_of_class(cls, n), below


def _part_of_class(cls: type, n: int, is_opaque: bool = False) -> Part:
    """Return the part of a node of `n` children that has no metadata."""
    name = cls.__name__
    if cls in (tuple, list):
        return Part(f"{name} of {n}", n, name, "container", is_node=True)
    if issubclass(cls, dict) and not is_opaque:
        return Part(name, None, name, "container", is_node=True)
    module = "" if issubclass(cls, (eqx.Partial, jax.tree_util.Partial)) else cls.__module__
    return Part(name, weakref.ref(cls), name, "object" * is_opaque, module, is_node=True)


def _static(key: Hashable, value: Any, is_deep: bool) -> tuple[Part, list[Any]]:
    """Return the part of a static value, and what is below it."""
    below = _parts_of(key, value)
    if below is not None:
        # JAX may look into a container of another kind, but not into a plain dataclass.
        is_node = flatten_one_level(value) is not None
        return _part_of_class(type(value), len(below), not is_node), below
    part, below = _leaf(key, value), []
    for name, content in _contents(value).items() if part.is_node else ():
        is_large = isinstance(content, (tuple, list, dict)) and len(content) > _MAX_ENTRIES
        is_read = is_deep or part.nature == "partial"
        if type(content) in CONSTANTS or (is_read and not is_large):
            spec = split(content, is_input=False)[0]
            # The call's description has no arrays but the call's.
            if is_deep or isinstance(spec, Static):
                below.append((name, spec, content, False))
    return part, below


def _parts_of(key: Hashable, value: Any) -> list[Any] | None:
    """Return the parts of a static container or dataclass, by its key; None for a leaf."""
    if type(key) is not tuple:
        return None
    reader, kind, names, *parts = key
    if reader == ITEMS:
        fields = getattr(kind, "_fields", None)
        suffixes = [f".{f}" for f in fields] if fields else [f"[{i}]" for i in range(len(parts))]
        values = [*value]
    elif names is not None and not issubclass(kind, slice):
        suffixes, values = [f".{name}" for name in names], [getattr(value, name) for name in names]
    elif reader == PAIRS or issubclass(kind, dict):
        suffixes = [f"[{short(key)}]" for key in dict.keys(value)]
        # The keys' come first.
        parts, values = parts[len(parts) // 2 :], [*dict.values(value)]
    else:
        return None
    # Not strict, because another thread may have changed a list since.
    return [(*each, True) for each in zip(suffixes, parts, values, strict=False)]


def _contents(value: Any) -> dict[str, Any]:
    """Return what a partial, an instance, or that of a method holds, by what follows its path."""
    if isinstance(value, functools.partial):
        is_function = type(value.func) is types.FunctionType
        names = value.func.__code__.co_varnames if is_function else ()
        named = itertools.zip_longest(names[: len(value.args)], value.args)
        found = {name or f"args[{i}]": v for i, (name, v) in enumerate(named)}
        found |= sorted(value.keywords.items())
        found |= {} if is_function else {"func": value.func}
        return {f".{name}": content for name, content in found.items()}
    if isinstance(value, types.MethodType):
        value = value.__self__
    slots = [vars(base).get("__slots__", ()) for base in type(value).__mro__]
    names = [name for some in slots for name in ([some] if isinstance(some, str) else some)]
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    found |= getattr(value, "__dict__", {})
    return {f".{name}": content for name, content in found.items() if name[:2] != "__"}


def _nature(key: Hashable, value: Any) -> str:
    kind = type(value)
    for kinds, nature in _NATURES.items():
        if issubclass(kind, kinds):
            return nature
    if hasattr(kind, "__next__"):
        return "iterator"
    if is_array(value):
        return "array"
    if kind is types.MethodType and not isinstance(value.__self__, type):
        return "method"
    if type(key) is tuple or kind.__eq__ is not object.__eq__ or isinstance(value, type):
        return ""
    if isinstance(value, functools.partial):
        return "partial"
    if kind is types.FunctionType or code_of(value):
        return "function"
    # Unlike a member of an enumeration.
    return "instance" if kind.__hash__ is object.__hash__ else ""


def _leaf(key: Hashable, value: Any) -> Part:
    nature, kind = _nature(key, value), type(value)
    is_function, code = kind is types.FunctionType, code_of(value)
    transformation, target = transformation_of(value) if is_function else ("", None)
    # The function that defines it, not what it wraps.
    inner = value.__code__ if is_function else code
    maker = inner.co_qualname.rpartition(".<locals>.")[0] if inner else ""
    of: Any = value if is_function else type(value.__self__) if nature == "method" else kind
    is_node = nature == "partial" or (
        nature in ("method", "instance") and is_users_module(of.__module__)
    )
    name = (kind if is_function else of).__name__
    return Part(
        f"{name} object" if nature == "instance" and is_node else _text(value),
        (weakref.ref(kind), lasting(key)),
        name,
        nature,
        "" if nature == "partial" else of.__module__ or "",
        code and CallSite(code.co_filename, code.co_firstlineno),
        f"jax.{transformation}" if transformation else maker,
        type(target).__name__ if isinstance(target, eqx.Module) else "",
        is_node,
    )


def lasting(key: Hashable) -> Hashable:
    """Return what tells a key from others."""
    # A description outlives the call, and keeps no object of the user's alive.
    if isinstance(key, tuple):
        return tuple([lasting(part) for part in key])
    if isinstance(key, type):
        return weakref.ref(key)
    if isinstance(key, Opaque) and key.hash is None:
        # An unhashable object, by its attributes; a large container by its address.
        return lasting(static_key(getattr(key.value, "__dict__", id(key.value))))
    return key if isinstance(key, weakref.ref) else hash(key)


def _text(value: Any) -> str:
    """Return the text to show of a static value: `repr`, or the name of a callable."""
    kind = type(value)
    if kind is types.FunctionType:
        transformation, target = transformation_of(value)
        if transformation:
            of = type(target).__name__ if isinstance(target, eqx.Module) else _text(target)
            return f"jax.{transformation} of {of}"
    if isinstance(value, functools.partial):
        return f"partial of {_text(value.func)}"
    if kind is types.MethodType:
        return f"`{value.__qualname__}`"
    if isinstance(value, type):
        # The text of `float32` by itself is that of an array of that dtype.
        return f"class {value.__module__}.{value.__qualname__}".replace(" builtins.", " ")
    if callable(value):
        # What `jax.jit` and the like make has a name, too.
        name = getattr(value, "__qualname__", "<")
        if "<" not in name:
            return name
        if kind is types.FunctionType:
            # A line of a library's is no help, but where in the library.
            is_ours = is_users(value.__code__.co_filename)
            name = value.__name__ if is_ours else name.replace(".<locals>", "")
            return f"`{name}`{_with_constants(captured(value))}"
        wrapped = inspect.unwrap(value)
        if isinstance(wrapped, types.FunctionType):
            return f"{kind.__name__} of {_text(wrapped)}"
    if kind.__repr__ is object.__repr__:
        inside = [(path[1:], content) for path, content in _contents(value).items()]
        return f"{kind.__name__} object{_with_constants(inside)}"
    if isinstance(value, eqx.Module):
        return kind.__name__
    # Where something is in memory tells nothing.
    return _ADDRESS.sub("", short(value, _MAX_TEXT))


def _with_constants(named: list[tuple[str, Any]]) -> str:
    """Return the text of what tells a value from one made alike: the constants that it holds."""
    constants = [f"{name}={short(v)}" for name, v in named if type(v) in CONSTANTS]
    return f" with {', '.join(constants[:_MAX_CONSTANTS])}" if constants else ""
