"""Describes what a call was traced for: each part of its arguments by its path, from its spec."""

import functools
import inspect
import itertools
import re
import types
import weakref
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.core import Tracer

from .._compat import ArrayImpl, fields_of, flatten_one_level
from .._places import CallSite, captured, code_of, is_users, transformation_of
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
_MAX_CAPTURED = 4

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
    key: Hashable
    kind: str
    # Of a function, or of the type of anything else.
    module: str = "builtins"
    # Where a callable's code is, and the function that defines it, or JAX's transformation.
    made_at: CallSite | None = None
    maker: str = ""
    # The class of the Module that is transformed.
    transformed: str = ""
    equals_itself_alone: bool = False

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
    key: Hashable
    # Of its class; empty for a container, which may be in anybody's hands.
    module: str = ""
    # JAX doesn't look into it: a plain dataclass.
    is_opaque: bool = False
    # What else to say, where that alone tells two nodes apart.
    detail: str = " (another class of that name)"
    # It compares by identity, though it is described by its parts: a "partial", "method" or
    # "instance" below a wrapper.
    opened: str = ""

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


class Description(tuple[Row, ...]):
    """The parts of a call, outside in."""

    #: What tells apart callables that are described by their parts, and compare by identity.
    identity: tuple[Hashable, ...] = ()

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
    return Description(
        [Row(r.path, next(parts), *r[2:]) if type(r.part) is ArrayPart else r for r in rows]
    )


def describe_function(call: Any) -> Description:
    """Describe the function of a call, with what a partial, a method or an instance holds."""
    function = call.function
    # One that holds arrays for good is of its own.
    if function.keeps_arrays:
        return UNKNOWN
    return describe_trees([("", function.spec, function.combine(call.fun_arrays))], opens=True)


def kind_of(function: Description) -> tuple[str, ...]:
    """Return what two functions of one place share if they are wrapped alike."""
    part = function[0].part
    return (part.text,) if isinstance(part, NodePart) else (part.maker, part.transformed)


def describe_trees(named: list[tuple[str, Any, Any]], opens: bool = False) -> Description:
    """Describe trees, each from its name, its spec and itself; `opens` takes callables apart."""
    rows: list[Row] = []
    identity: list[Hashable] = []
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
                else:
                    part, below = _part_of(spec, value, is_field, opens)
                    if opens and isinstance(part, NodePart) and part.opened:
                        identity.append(lasting(spec.key if isinstance(spec, Static) else spec))
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
    description = Description(rows)
    description.identity = tuple(identity)
    return description


def _constant(value: Any, is_field: bool) -> StaticPart | NodePart:
    if value is None and not is_field:
        # JAX takes it for a node without children.
        return NodePart("None", None)
    if type(value) is int and value.bit_length() > _MAX_BITS:
        return _leaf(static_key(value), value)
    return StaticPart(repr(value), None, type(value).__name__)


def _part_of(spec: Any, value: Any, is_field: bool, opens: bool) -> tuple[Any, list[Any]]:
    """Return the part of a value, and what is below it."""
    if type(spec) is tuple and not is_field:
        return _node(spec, value)
    key = spec.key if isinstance(spec, Static) else spec
    below = _parts_of(key, value)
    if below is None:
        return (opens and _opened(value)) or (_leaf(key, value), [])
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
    cls, n = spec[1], len(spec) - 3
    if spec[0] != NODE:
        return _part_of_class(cls, n), children(spec, value)
    suffixes, values, metadata = read_node(value)
    name = cls.__name__
    if cls in WRAPPERS:
        # Around anybody's function.
        part = NodePart(name, hash(static_key(metadata.options)), detail=" with other options")
        return part, [(".__wrapped__", metadata.spec, value.__wrapped__, False)]
    below = [(*each, False) for each in zip(suffixes, spec[3:], values, strict=True)]
    if cls is jax.tree_util.Partial:
        below.append((".func", static_key(metadata), metadata, True))
    elif issubclass(cls, eqx.Module):
        # One with fields that its class doesn't have, such as a wrapper's `__doc__`.
        names = {suffix for suffix, *_ in below}
        rest = [(f".{name}", v) for name, v in fields_of(value).items() if f".{name}" not in names]
        below += [(suffix, static_key(v), v, True) for suffix, v in rest]
    elif not issubclass(cls, dict):
        key = (name, weakref.ref(cls), lasting(static_key(metadata)))
        detail = f" with metadata {short(metadata)}"
        return NodePart(name, key, cls.__module__, detail=detail), below
    return _part_of_class(cls, n), below


def _part_of_class(cls: type, n: int, is_opaque: bool = False) -> NodePart:
    """Return the part of a node of `n` children that has no metadata."""
    name = cls.__name__
    if cls in (tuple, list):
        return NodePart(f"{name} of {n}", (name, n))
    if issubclass(cls, dict) and not is_opaque:
        return NodePart(name, name)
    return NodePart(name, weakref.ref(cls), cls.__module__, is_opaque)


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


def _opened(value: Any) -> tuple[NodePart, list[Any]] | None:
    """Return the part of a callable that compares by identity, and what it holds; or None."""
    kind: Any = type(value)
    if isinstance(value, functools.partial):
        text, opened = f"partial of {_text(value.func)}", "partial"
        is_function = type(value.func) is types.FunctionType
        names = value.func.__code__.co_varnames if is_function else ()
        named = itertools.zip_longest(names[: len(value.args)], value.args)
        held = {f".{n}" if n else f"[{i}]": v for i, (n, v) in enumerate(named)}
        held |= {f".{name}": argument for name, argument in sorted(value.keywords.items())}
        if not is_function:
            held[".func"] = value.func
    elif kind is types.MethodType and not isinstance(value.__self__, type):
        kind = type(value.__self__)
        text, opened = f"`{value.__qualname__}` of another `{kind.__name__}`", "method"
        held = {f".{name}": v for name, v in vars(value.__self__).items()}
    elif callable(value) and isinstance(vars(kind).get("__call__"), types.FunctionType):
        text, opened = f"`{kind.__name__}`", "instance"
        held = {f".{name}": v for name, v in vars(value).items()}
    else:
        return None
    part = NodePart(text, (opened, weakref.ref(kind)), kind.__module__, opened=opened)
    keys = [(name, ARRAY if is_array(v) else static_key(v), v, True) for name, v in held.items()]
    return part, keys


def _leaf(key: Hashable, value: Any) -> StaticPart:
    kind: Any = type(value)
    name: str = kind.__name__
    is_function, code = kind is types.FunctionType, code_of(value)
    transformation, target = transformation_of(value) if is_function else ("", None)
    # The function that defines it.
    maker = code.co_qualname.rpartition(".<locals>.")[0] if code else ""
    is_alone = isinstance(key, weakref.ref) or kind is types.MethodType
    is_alone = is_alone or (isinstance(key, Opaque) and kind.__eq__ is object.__eq__)
    return StaticPart(
        _text(value),
        (weakref.ref(kind), lasting(key)),
        name,
        (value if is_function else kind).__module__ or "",
        code and CallSite(code.co_filename, code.co_firstlineno),
        f"jax.{transformation}" if transformation else maker,
        type(target).__name__ if isinstance(target, eqx.Module) else "",
        is_alone and not isinstance(value, type),
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
            return f"`{name}`{_holding(captured(value))}"
        wrapped = inspect.unwrap(value)
        if isinstance(wrapped, types.FunctionType):
            return f"{kind.__name__} of {_text(wrapped)}"
    if kind.__repr__ is object.__repr__:
        return f"{kind.__name__} object{_holding(getattr(value, '__dict__', {}).items())}"
    # Where something is in memory tells nothing.
    return _ADDRESS.sub("", short(value, _MAX_TEXT))


def _holding(named: Iterable[tuple[str, Any]]) -> str:
    """Return the constants among named values as a text: what tells a value from one made alike."""
    constants = [f"{name}={short(v)}" for name, v in [*named] if type(v) in CONSTANTS]
    return f" with {', '.join(constants[:_MAX_CAPTURED])}" if constants else ""
