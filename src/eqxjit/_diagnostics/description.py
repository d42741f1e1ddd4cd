"""Describes what a call was traced for: each part of its arguments by its path, from its spec."""

import functools
import inspect
import itertools
import random
import re
import types
import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer

from .._compat import ArrayImpl, fields_of, flatten_one_level, registered_nodes
from .._places import CallSite, captured, code_of, is_users, is_users_module, transformation_of
from .._spec.static_key import CONSTANTS, ITEMS, PAIRS, Opaque, Static, static_key
from .._spec.tree import ARRAY, NODE, children, is_array, read_node
from .._text import counted, short

# Larger trees aren't described.
_MAX_PARTS = 50_000

# Longer texts are cut where they are shown, and those of objects where they are made.
LONG_TEXT = 40
_MAX_TEXT = 1_000
# Larger integers fit no dtype, and Python refuses to write out those of thousands of digits.
_MAX_BITS = 256

# The most constants that are part of a text.
_MAX_CONSTANTS = 4
# What a callable holds is described so deep, and a container in it up to so many entries.
_MAX_DEPTH = 8
_MAX_ENTRIES = 100

#: Python's types of numbers by their names, without that of truth values.
NUMBERS: dict[str, type] = {"int": int, "float": float, "complex": complex}

# What gives other values each time that it is asked.
_DRAWN = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)

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

    def __str__(self) -> str:
        weak = " of weak type" if self.weak_type else ""
        placement = f" on {self.placement}" if self.placement else ""
        return f"{array_text(self.dtype, self.shape)}{weak}{placement}"


class StaticPart(NamedTuple):
    """A static value; `kind` is the name of its type.

    `key` is equal, if the text is, to that of another value exactly if one may stand for the other.
    """

    text: str
    key: Any
    kind: str
    # Of a function, or of the type of anything else.
    module: str = "builtins"
    # Where a callable's code is, and the function that defines it, or JAX's transformation.
    made_at: CallSite | None = None
    maker: str = ""
    # The class of the Module that is transformed.
    transformed: str = ""
    # As of `_nature`.
    nature: str = ""

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
    def site(self) -> str:
        """The user's line where a callable's code is; empty for anything else."""
        return str(self.made_at) if self.made_at and is_users(self.made_at.filename) else ""

    def __str__(self) -> str:
        text = self.text
        if self.is_local and self.site:
            # Not a part of the text, because the working directory may change.
            return f"{text} at {self.site}"
        return text if len(text) <= LONG_TEXT or self.made_at else f"{text[:LONG_TEXT]}..."


class NodePart(NamedTuple):
    """A node without its children, by a key as that of a `StaticPart`."""

    text: str
    key: Any
    # Of its class; empty for what may be in anybody's hands: a container, a partial.
    module: str = ""
    # JAX doesn't look into it: a plain dataclass, or what has a nature.
    is_opaque: bool = False
    # What else to say, where that alone tells two nodes apart.
    detail: str = " (another class of that name)"
    # Of an object that is described by what it holds, though it equals itself alone: as of
    # `_nature`, what tells it from others, and where its code is.
    nature: str = ""
    identity: Hashable = None
    made_at: CallSite | None = None

    # As of a `StaticPart`.
    transformed = maker = site = ""
    is_transformed = False

    @property
    def kind(self) -> str:
        return self.key[0] if self.nature else self.text

    @property
    def is_local(self) -> bool:
        return "`" in self.text

    @property
    def is_container(self) -> bool:
        return not (self.module or self.nature) and isinstance(self.key, (str, tuple))

    @property
    def another(self) -> str:
        if self.nature == "method":
            return f"{self.text} of another `{self.kind}`"
        return f"another {self.text if self.nature == 'partial' else f'`{self.kind}`'}"

    def __str__(self) -> str:
        return self.text


class Row(NamedTuple):
    """A part of a call, its path, and the rows of the nodes that hold it, inside out."""

    path: str
    # One of the three, which its reader narrows.
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
            if isinstance(part, NodePart):
                arrays = [row for row in self[start:stop] if isinstance(row.part, ArrayPart)]
                texts.append(f"{path}: {part} with {counted(len(arrays), 'array')}")
            else:
                texts.append(f"{path}{': ' if isinstance(part, ArrayPart) else '='}{part}")
        return ", ".join(texts)


#: The classes of what `filter_jit` returns.
WRAPPERS: set[type] = set()

#: Of a call that defies description. (That of a call without arguments is empty.)
UNKNOWN = Description([Row("...", NodePart("unknown", None))])


def describe(call: Any) -> Description:
    """Describe the arguments of a call, and its function where copies of it may differ."""
    function = call.function
    # Those of a frozen function are always the same.
    fun_arrays = () if function.keeps_arrays else call.fun_arrays
    # What was lowered has no entry for a call of another structure.
    trace = call.entry.latest_trace if hasattr(call, "entry") else None
    known = _with_arrays(trace, [*call.arrays, *fun_arrays])
    if known is not None:
        return known
    args, specs, keys = call.spec[3][3:], call.spec[4][3:], sorted(call.kwargs)
    names = function.signature.path_names(len(args))
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
    return Description([_with_array(r, parts) if type(r.part) is ArrayPart else r for r in rows])


def _with_array(row: Row, parts: Iterator[ArrayPart]) -> Row:
    part = next(parts)
    return row if part is row.part else Row(row.path, part, *row[2:])


def describe_function(call: Any) -> Description:
    """Describe the function of a call, with what a partial, a method or an instance holds."""
    function = call.function
    # One that holds arrays for good is of its own.
    if function.keeps_arrays:
        return UNKNOWN
    return describe_trees([("", function.spec, function.combine(call.fun_arrays))], _MAX_DEPTH)


def kind_of(function: Description) -> tuple[str, ...]:
    """Return what two functions of one place share if they are wrapped alike."""
    part = function[0].part
    name = part.kind if isinstance(part, NodePart) else part.maker
    return (name, part.nature, part.transformed)


#: In place of the spec of what wasn't split, as it is held by a callable.
_UNSPLIT = "unsplit"


def describe_trees(named: list[tuple[str, Any, Any]], depth: int = 0) -> Description:
    """Describe trees, each from its name, its spec and itself.

    Of objects that equal themselves alone constants are described, and all else up to a depth.
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
                if spec is _UNSPLIT:
                    spec = _spec_of(value)
                if spec is ARRAY:
                    part: Any = _array(value)
                elif type(value) in CONSTANTS:
                    part = _constant(value, is_field)
                else:
                    part, below = _part_of(spec, value, is_field, len(levels) <= depth)
            except Exception:
                # The user's class may refuse to be asked: for its name, its fields, its flatten, a
                # `repr`. It is described for us, not for the call, which goes on.
                part, below = StaticPart("object", id(value), "object"), ()
            row = Row(path, part, around, is_field)
            rows.append(row)
            if len(rows) + len(below) > _MAX_PARTS:
                return UNKNOWN
            if below:
                levels.append((iter(below), path, (row, *around), is_field))
                break
        else:
            levels.pop()
    return Description(rows)


def _spec_of(value: Any) -> Any:
    """Return the spec of a value, without those of what is below it."""
    if is_array(value):
        return ARRAY
    if value is None or type(value) in registered_nodes:
        return (NODE, type(value), None)
    return Static(static_key(value))


def _constant(value: Any, is_field: bool) -> StaticPart | NodePart:
    if value is None and not is_field:
        # JAX takes it for a node without children.
        return NodePart("None", None)
    if type(value) is int and value.bit_length() > _MAX_BITS:
        return _leaf(static_key(value), value)
    name = type(value).__name__
    return StaticPart(repr(value), None, name, nature="number" if name in NUMBERS else "")


def _part_of(spec: Any, value: Any, is_field: bool, is_deep: bool) -> tuple[Any, list[Any]]:
    """Return the part of a value, and what is below it."""
    if type(spec) is tuple and not is_field:
        return _node(spec, value)
    key = spec.key if isinstance(spec, Static) else spec
    nature = _nature(key, value)
    if nature in ("partial", "method", "instance"):
        opened = _opened(key, value, nature)
        if opened is not None:
            below = []
            for name, content in _contents(value).items():
                # The call's description has no arrays but the call's.
                is_short = nature == "partial" or type(content) in CONSTANTS
                spec = _spec_of(content) if is_short and not is_deep else _UNSPLIT
                if is_deep or isinstance(spec, Static):
                    below.append((name, spec, content, False))
            return opened, below
    below = _parts_of(key, value)
    if below is None:
        return _leaf(key, value, nature), []
    # JAX may look into a container of another kind, but not into a plain dataclass.
    is_node = flatten_one_level(value) is not None
    return _part_of_class(type(value), len(below), not is_node), below


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


def _node(spec: tuple[Any, ...], value: Any) -> tuple[NodePart, list[Any]]:
    cls, name = spec[1], spec[1].__name__
    if spec[0] != NODE:
        return _part_of_class(cls, len(spec) - 3), children(spec, value)
    suffixes, values, metadata = read_node(value)
    if cls in WRAPPERS:
        # Around anybody's function.
        part = NodePart(name, hash(static_key(metadata.options)), detail=" with other options")
        return part, [(".__wrapped__", metadata.spec, value.__wrapped__, False)]
    specs = spec[3:] or [_UNSPLIT] * (len(values) if len(values) <= _MAX_ENTRIES else 0)
    if cls is jax.tree_util.Partial:
        suffixes = [".args", ".keywords"]
    zipped = zip(suffixes, specs, values, strict=False)
    below: list[Any] = [(*each, False) for each in zipped]
    if cls is jax.tree_util.Partial:
        below.append((".func", static_key(metadata), metadata, True))
    elif issubclass(cls, eqx.Module):
        # One with fields that its class doesn't have, such as a wrapper's `__doc__`.
        names = {suffix for suffix, *_ in below}
        rest = [(f".{name}", v) for name, v in fields_of(value).items() if f".{name}" not in names]
        below += [(suffix, static_key(v), v, True) for suffix, v in rest]
    elif metadata is not None and metadata is not cls and not issubclass(cls, dict):
        key = (name, weakref.ref(cls), lasting(static_key(metadata)))
        detail = f" with metadata {short(metadata)}"
        return NodePart(name, key, cls.__module__, detail=detail), below
    return _part_of_class(cls, len(values)), below


def _part_of_class(cls: type, n: int, is_opaque: bool = False) -> NodePart:
    """Return the part of a node of `n` children that has no metadata."""
    name = cls.__name__
    if cls in (tuple, list):
        return NodePart(f"{name} of {n}", (name, n))
    if issubclass(cls, dict) and not is_opaque:
        return NodePart(name, name)
    module = "" if issubclass(cls, (eqx.Partial, jax.tree_util.Partial)) else cls.__module__
    return NodePart(name, weakref.ref(cls), module, is_opaque)


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


def _opened(key: Hashable, value: Any, nature: str) -> NodePart | None:
    """Return the part of an object that equals itself alone, if it is a node; or None."""
    kind, code, text = type(value), None, f"{type(value).__name__} object"
    if nature == "partial":
        text, code = f"partial of {_text(value.func)}", code_of(value)
    elif nature == "method":
        kind, text = type(value.__self__), f"`{value.__qualname__}`"
    if nature != "partial" and not is_users_module(kind.__module__):
        return None
    return NodePart(
        text,
        (kind.__name__, weakref.ref(kind)),
        "" if nature == "partial" else kind.__module__,
        is_opaque=True,
        nature=nature,
        identity=lasting(key),
        made_at=code and CallSite(code.co_filename, code.co_firstlineno),
    )


def _contents(value: Any) -> dict[str, Any]:
    """Return what a callable, or an instance of a class, holds, by what follows its path."""
    kind = type(value)
    if isinstance(value, type):
        return {}
    if kind is types.FunctionType:
        return {f".{name}": content for name, content in captured(value)}
    if kind is types.MethodType:
        return _contents(value.__self__)
    if isinstance(value, functools.partial):
        is_function = type(value.func) is types.FunctionType
        names = value.func.__code__.co_varnames if is_function else ()
        named = itertools.zip_longest(names[: len(value.args)], value.args)
        held = {f".{name or f'args[{i}]'}": v for i, (name, v) in enumerate(named)}
        held |= {f".{name}": content for name, content in sorted(value.keywords.items())}
        return held if is_function else held | {".func": value.func}
    slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for some in slots for name in ([some] if isinstance(some, str) else some)]
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    found |= getattr(value, "__dict__", {})
    return {f".{name}": content for name, content in found.items() if name[:2] != "__"}


def _nature(key: Hashable, value: Any) -> str:
    """Return what a static value is, as far as remedies tell that apart.

    An "array", an "iterator", a "slice", a "method"; of what equals itself alone also a "partial",
    a "function" or an "instance"; else nothing. (A "number" is a constant.)
    """
    kind = type(value)
    if isinstance(value, type):
        return ""
    if hasattr(kind, "__next__") or isinstance(value, _DRAWN):
        return "iterator"
    if isinstance(value, Tracer) or is_array(value):
        return "array"
    if kind is slice:
        return "slice"
    if kind is types.MethodType:
        return "method"
    if type(key) is tuple or kind.__eq__ is not object.__eq__:
        return ""
    if isinstance(value, functools.partial):
        return "partial"
    if kind is types.FunctionType or code_of(value):
        return "function"
    # Unlike a member of an enumeration.
    return "instance" if kind.__hash__ is object.__hash__ else ""


def _leaf(key: Hashable, value: Any, nature: str = "") -> StaticPart:
    kind: Any = type(value)
    name: str = kind.__name__
    is_function, code = kind is types.FunctionType, code_of(value)
    transformation, target = transformation_of(value) if is_function else ("", None)
    own = value.__code__ if is_function else code
    # The function that defines it.
    maker = own.co_qualname.rpartition(".<locals>.")[0] if own else ""
    return StaticPart(
        _text(value),
        (weakref.ref(kind), lasting(key)),
        name,
        (value if is_function else kind).__module__ or "",
        code and CallSite(code.co_filename, code.co_firstlineno),
        f"jax.{transformation}" if transformation else maker,
        type(target).__name__ if isinstance(target, eqx.Module) else "",
        nature,
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
        keywords = [f"{name}={_text(argument)}" for name, argument in value.keywords.items()]
        arguments = ", ".join([*map(_text, value.args), *keywords])
        return f"partial of {_text(value.func)}{f' with {arguments}' if arguments else ''}"
    if kind is types.MethodType:
        return f"method {value.__qualname__} of {_text(value.__self__)}"
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
            return f"`{name}`{_holding(value)}"
        wrapped = inspect.unwrap(value)
        if isinstance(wrapped, types.FunctionType):
            return f"{kind.__name__} of {_text(wrapped)}"
    if kind.__repr__ is object.__repr__:
        return f"{kind.__name__} object{_holding(value)}"
    # Where something is in memory tells nothing.
    return _ADDRESS.sub("", short(value, _MAX_TEXT))


def _holding(value: Any) -> str:
    """Return the constants that a value holds as a text: what tells it from one made alike."""
    held = _contents(value).items()
    constants = [f"{path[1:]}={short(v)}" for path, v in held if type(v) in CONSTANTS]
    return f" with {', '.join(constants[:_MAX_CONSTANTS])}" if constants else ""
