"""Describes what a call was traced for: each part of its arguments by its path, from its spec.

A description outlives the call: it holds texts, and refers to the user's objects weakly at most.
"""

import collections
import functools
import inspect
import itertools
import re
import types
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.core import Tracer

from .._code.place import CallSite, captured, transformation_of
from .._code.text import array_text, counted, short
from .._compat import ArrayImpl, fields_of, flatten_one_level
from .._core.function import Function
from .._interruptions import unless_it_raises
from .._spec.static import CONSTANTS, ITEMS, PAIRS, Identity, Opaque, freeze
from .._spec.tree import ARRAY, DICT, MODULE, NODE, Spec, Static, children, module_fields

# Larger trees aren't described.
_MAX_PARTS = 50_000

# Longer texts, and larger numbers, are cut short.
_LONG_TEXT = 40
_MAX_BITS = 256

# How many constants that an object holds, or a function captured, are part of its text.
_MAX_CAPTURED = 4


_OTHER_CLASS = " (another class of that name)"


class ArrayPart(NamedTuple):
    """An array, as JAX sees it when it traces.

    - `shape`, `dtype`, `weak_type`: its abstract value.
    - `placement`: the devices or the sharding that it was put on; empty where JAX may choose.
    """

    shape: tuple[Any, ...]
    dtype: str
    weak_type: bool
    placement: str

    @property
    def shape_text(self) -> str:
        return array_text(self.dtype, self.shape)

    def __str__(self) -> str:
        weak = " of weak type" if self.weak_type else ""
        return f"{self.shape_text}{weak}{f' on {self.placement}' if self.placement else ''}"


class PlacedText(NamedTuple):
    """A text that names a line of code, by a path that depends on the working directory."""

    before: str
    site: CallSite
    after: str = ""

    def __str__(self) -> str:
        return f"{self.before}{self.site}{self.after}"


class StaticPart(NamedTuple):
    """A static value.

    - `text`: its text.
    - `key`: equal, if the text is, to that of another value exactly if one may stand for the other.
    - `kind`: its type's name.
    - `is_field`: whether it is in a static field, rather than in the place of an array.
    - `module`: where a function or the type of anything else is defined.
    - `made_at`: where a callable's code is; None for anything else.
    - `maker`: the function in which a callable is defined; empty for anything else.
    - `transformed`: the class of the Module of which it is JAX's transformation, the `maker`.
    - `equals_itself_alone`: whether it is compared by identity.
    - `has_equal_parts`: whether it is a partial of a function and of values that all compare.
    - `is_iterator`: whether to look at its elements takes them, or those of a partial's part.
    """

    text: str | PlacedText
    key: Hashable
    kind: str
    is_field: bool
    module: str = "builtins"
    made_at: CallSite | None = None
    maker: str = ""
    transformed: str = ""
    equals_itself_alone: bool = False
    has_equal_parts: bool = False
    is_iterator: bool = False

    def __str__(self) -> str:
        return str(self.text)


class NodePart(NamedTuple):
    """A node, without its children.

    - `text`: its text.
    - `key`: equal to that of another node exactly if one may stand for the other.
    - `detail`: what else the text could say, where that alone tells two nodes apart.
    - `module`: the module of its class; empty for a container, which may be in anybody's hands.
    - `is_opaque`: whether JAX doesn't look into it: a plain dataclass.
    - `is_field`: whether it is in a static field.
    """

    text: str
    key: Hashable
    detail: str | PlacedText = _OTHER_CLASS
    module: str = ""
    is_opaque: bool = False
    is_field: bool = False

    def __str__(self) -> str:
        return self.text


Part = ArrayPart | StaticPart | NodePart


class Description(NamedTuple):
    """The parts of a call, outside in.

    - `paths`: where each is, such as `model.layers[0].weight`.
    - `parents`: the index of the part that holds it; -1 for an argument.
    - `parts`: the parts themselves.
    """

    paths: tuple[str, ...]
    parents: tuple[int, ...]
    parts: tuple[Part, ...]

    def sharing(self, other: "Description") -> "Description":
        """Return the same, made of the other's objects where equal: most calls are alike."""
        if self.paths != other.paths or self.parents != other.parents:
            return self
        pairs = zip(other.parts, self.parts, strict=True)
        parts = tuple([old if old is new or old == new else new for old, new in pairs])
        return Description(other.paths, other.parents, parts)


#: Of a call that defies description. (That of a call without arguments is empty.)
UNKNOWN = Description(("...",), (-1,), (NodePart("unknown", None),))

_NONE = NodePart("None", None)


def named_specs(call: Any, spec: Spec) -> list[tuple[str, Spec, Any]]:
    """Return the arguments of a call by their names, each with its part of a spec of all."""
    args, (_, _, keys, *specs) = spec[3][3:], spec[4]
    names = call.function.signature.path_names(len(args))
    named = [*zip(names, args, call.args, strict=True)]
    for key, below in zip(keys, specs, strict=True):
        named.append((key, below, call.kwargs[key]))
    return named


def describe(call: Any) -> Description:
    """Describe the arguments of a call, and its function where copies of it may differ.

    **Returns:**

    The description; `UNKNOWN` for trees that are too large.
    """
    named = named_specs(call, call.spec)
    if call.function.varies:
        named.append(("fun", call.function.spec, call.function.combine(call.fun_arrays)))
    paths: list[str] = []
    parents: list[int] = []
    parts: list[Part] = []
    # The parts still to be described, the next one last: a path, a spec, a value, whether it is in
    # a static field, and the index of the node around it.
    pending: list[Any] = []
    for path, spec, value in reversed(named):
        pending.append((path, spec, value, False, -1))
    # Arrays and constants are described here, because a call for each would be most of the time.
    while pending:
        path, spec, value, is_field, parent = pending.pop()
        index = len(paths)
        paths.append(path)
        parents.append(parent)
        kind = type(value)
        if spec is ARRAY:
            if kind is ArrayImpl:
                aval, sharding = value.aval, value.sharding if value.committed else None
                part = _array_part(aval.shape, aval.dtype, aval.weak_type, sharding)
            else:
                part = _other_array(value)
            parts.append(part)
            continue
        if kind in CONSTANTS:
            if spec is None and not is_field:
                parts.append(_NONE)
            elif (kind is int and value.bit_length() > _MAX_BITS) or (
                (kind is str or kind is bytes) and len(value) > _LONG_TEXT
            ):
                parts.append(_long_constant(value, is_field))
            else:
                parts.append(_constant_part(repr(value), kind.__name__, is_field))
            continue
        if type(spec) is tuple and not is_field:
            part, below = _node(spec, value)
        else:
            frozen = spec.frozen if isinstance(spec, Static) else spec
            part, below = _static(frozen, value, is_field)
        parts.append(part)
        suffixes, specs, values, n_leaves = below
        for i in range(len(specs) - 1, -1, -1):
            is_inner_field = is_field or i >= n_leaves
            pending.append((path + suffixes[i], specs[i], values[i], is_inner_field, index))
        if len(paths) + len(pending) > _MAX_PARTS:
            return UNKNOWN
    return Description(tuple(paths), tuple(parents), tuple(parts))


# The children of a node: how their paths end, their specs (or in a static field their stand-ins),
# themselves, and how many of them, the first ones, aren't in a static field.
_Below = tuple[Sequence[str], Sequence[Spec], Sequence[Any], int]
_NOTHING: _Below = (), (), (), 0


# --- Arrays and constants -------------------------------------------------------------------------


def _other_array(array: Any) -> ArrayPart:
    """Return the part of what isn't JAX's own array: a NumPy array, a tracer, a structure."""
    if isinstance(array, jax.ShapeDtypeStruct):
        aval, sharding = array, array.sharding
    else:
        aval = jax.typeof(array)
        is_put = not isinstance(array, Tracer) and getattr(array, "committed", False)
        sharding = array.sharding if is_put else None
    return _array_part(aval.shape, aval.dtype, getattr(aval, "weak_type", False), sharding)


@functools.lru_cache(maxsize=1024)
def _array_part(shape: tuple[Any, ...], dtype: Any, weak_type: bool, sharding: Any) -> ArrayPart:
    """Return the part that arrays of one type and place share."""
    placement = "" if sharding is None else _sharding_text(sharding)
    return ArrayPart(shape, str(dtype), weak_type, placement)


def _sharding_text(sharding: Any) -> str:
    if isinstance(sharding, jax.sharding.NamedSharding):
        axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        return f"a mesh of {axes} by {sharding.spec}"
    devices = [f"{device.platform}:{device.id}" for device in sharding.device_set]
    return ", ".join(sorted(devices))


@functools.lru_cache(maxsize=1024)
def _constant_part(text: str, kind: str, is_field: bool) -> StaticPart:
    """Return the part that equal constants share."""
    return StaticPart(text, None, kind, is_field)


def _long_constant(value: Any, is_field: bool) -> StaticPart:
    if type(value) is int:
        # Python refuses to write out one of thousands of digits.
        text = f"int of {value.bit_length():,} bits"
    else:
        text = f"{value[:_LONG_TEXT]!r}... ({len(value)} long)"
    return StaticPart(text, hash(value), type(value).__name__, is_field)


# --- Nodes ----------------------------------------------------------------------------------------


def _node(spec: tuple[Any, ...], value: Any) -> tuple[NodePart, _Below]:
    kind, cls, aux = spec[:3]
    specs = spec[3:]
    n = len(specs)
    if kind == NODE:
        return _registered(cls, specs, spec, value)
    part = _part_of_class(cls, n)
    if kind == MODULE:
        plan = module_fields(cls)
        assert plan is not None
        return part, ([*map(".{}".format, aux)], specs, plan.read(fields_of(value)), plan.n_dynamic)
    if kind == DICT:
        return part, ([f"[{short(key)}]" for key in aux], specs, [*map(value.get, aux)], n)
    return part, (_suffixes(cls, n), specs, tuple(value), n)


def _suffixes(cls: Any, n: int) -> list[str]:
    """Return how the paths of a sequence's elements end."""
    fields = getattr(cls, "_fields", ())
    return [*(map(".{}".format, fields) if len(fields) == n > 0 else map("[{}]".format, range(n)))]


def _registered(
    cls: Any, specs: tuple[Spec, ...], spec: Spec, value: Any
) -> tuple[NodePart, _Below]:
    """Return the part of a node that JAX's registry has, and its children."""
    name, n = cls.__name__, len(specs)
    # The user's flatten, which may refuse.
    metadata: Any = unless_it_raises(lambda: flatten_one_level(value)[1], None)  # type: ignore[index]
    if isinstance(metadata, Function):
        # A wrapper of ours, around anybody's function.
        part = NodePart(name, (name, hash(metadata.options.key)), " with other options")
        return part, ([".__wrapped__"], [metadata.spec], [value.__wrapped__], 1)
    if issubclass(cls, dict):
        # JAX sorts the keys of most.
        part = _part_of_class(cls, n)
        keys = metadata
        if issubclass(cls, collections.defaultdict):
            factory, keys = metadata
            detail = _placed(" of ", _text(factory))
            part = NodePart(name, (name, lasting(freeze(factory))), detail)
        return part, ([f"[{short(key)}]" for key in keys], specs, [value[key] for key in keys], n)
    suffixes, values = unless_it_raises(lambda: _flattened(spec, value), ([], []))
    specs = specs if values else ()
    if cls is jax.tree_util.Partial:
        part = _part_of_class(cls, 0)
        return part, ([*suffixes, ".func"], [*specs, freeze(metadata)], [*values, metadata], n)
    if issubclass(cls, eqx.Module):
        # One with fields that its class doesn't have, such as a wrapper's `__doc__`.
        rest = {f".{key}": v for key, v in fields_of(value).items() if f".{key}" not in suffixes}
        specs = (*specs, *map(freeze, rest.values()))
        return _part_of_class(cls, n), ([*suffixes, *rest], specs, [*values, *rest.values()], n)
    detail = f" with metadata {short(metadata)}"
    key = (name, weakref.ref(cls), lasting(freeze(metadata)))
    return NodePart(name, key, detail, cls.__module__), (suffixes, specs, values, n)


def _flattened(spec: tuple[Any, ...], value: Any) -> tuple[list[str], list[Any]]:
    """Return how the paths of a registered node's children end, as JAX's errors do, and these."""
    below = children(spec, value)
    names = [name.replace("<flat index ", "").replace(">]", "]") for name, *_ in below]
    return names, [child for _, _, child, _ in below]


def _part_of_class(cls: type, n: int, is_opaque: bool = False, is_field: bool = False) -> NodePart:
    """Return the part of a node of `n` children that has no metadata."""
    name = cls.__name__
    if cls in (tuple, list):
        return NodePart(f"{name} of {n}", (name, n))
    if issubclass(cls, dict):
        return NodePart(name, name)
    return NodePart(name, weakref.ref(cls), _OTHER_CLASS, cls.__module__, is_opaque, is_field)


# --- Static values --------------------------------------------------------------------------------


def _static(frozen: Hashable, value: Any, is_field: bool) -> tuple[Part, _Below]:
    kind = type(value)
    # A class of the user's may refuse to be walked.
    below = unless_it_raises(lambda: _parts_of(frozen, value), None)
    if below is None:
        nameless = StaticPart(f"{kind.__name__} object", id(value), kind.__name__, is_field)
        return unless_it_raises(lambda: _leaf(frozen, value, is_field), nameless), _NOTHING
    is_opaque = not issubclass(kind, (eqx.Module, tuple, list, dict))
    return _part_of_class(kind, len(below[1]), is_opaque, is_field), below


def _parts_of(frozen: Hashable, value: Any) -> _Below | None:
    """Return the parts of a static container or dataclass, by its stand-in; None for a leaf."""
    if type(frozen) is not tuple:
        return None
    reader, kind, names, *parts = frozen
    if reader == ITEMS:
        suffixes, values = _suffixes(kind, len(parts)), [*value]
    elif names is not None and not issubclass(kind, slice):
        suffixes, values = [f".{name}" for name in names], [getattr(value, name) for name in names]
    elif reader == PAIRS or issubclass(kind, dict):
        suffixes = [f"[{short(key)}]" for key in dict.keys(value)]
        # The keys' come first.
        parts, values = parts[len(parts) // 2 :], [*dict.values(value)]
    else:
        return None
    # Another thread may have changed a list since.
    n = min(len(suffixes), len(parts), len(values))
    return suffixes[:n], parts[:n], values[:n], 0


def _leaf(frozen: Hashable, value: Any, is_field: bool) -> StaticPart:
    kind: Any = type(value)
    name: str = kind.__name__
    is_function = kind is types.FunctionType
    transformation, module = transformation_of(value) if is_function else ("", None)
    is_large = type(frozen) is Opaque and issubclass(kind, _CONTAINERS)
    if is_large:
        text: str | PlacedText = f"{name} of {len(value)}"
    elif issubclass(kind, type):
        # The text of `float32` by itself is that of an array of that dtype.
        owner = "" if value.__module__ == "builtins" else f"{value.__module__}."
        text = f"class {owner}{value.__qualname__}"
    else:
        text = _function_text(value, transformation, module) if is_function else _text(value)
    code = None if isinstance(value, type) else _unwrapped(value)
    is_alone = isinstance(frozen, (weakref.ref, Identity)) or kind is types.MethodType
    is_partial = isinstance(value, functools.partial)
    return StaticPart(
        text,
        (weakref.ref(kind), id(value) if is_large else lasting(frozen)),
        name,
        is_field,
        (value if is_function else kind).__module__ or "",
        code and CallSite(code.co_filename, code.co_firstlineno),
        transformation or (code.co_qualname.rpartition(".<locals>.")[0] if code else ""),
        type(module).__name__ if transformation else "",
        is_alone and not isinstance(value, type),
        is_partial and not any(map(_is_local, _parts_of_partial(value))),
        holds_iterator(value),
    )


# Those that are compared as in Equinox where they are large.
_CONTAINERS = (tuple, list, dict, set, frozenset)


def _parts_of_partial(value: functools.partial[Any]) -> tuple[Any, ...]:
    return value.func, *value.args, *value.keywords.values()


def _is_local(value: Any) -> bool:
    """Return whether a value equals itself alone, and isn't defined at module level."""
    is_alone = isinstance(freeze(value), (weakref.ref, Identity))
    return is_alone and "<" in getattr(value, "__qualname__", "<")


def holds_iterator(value: Any) -> bool:
    """Return whether a static value, or a part of a partial, is an iterator."""
    parts = (value, *_parts_of_partial(value)) if isinstance(value, functools.partial) else (value,)
    for part in parts:
        # As `collections.abc.Iterator` looks for these, and no metaclass has a say.
        names: set[str] = set().union(*map(vars, type(part).__mro__))
        if "__iter__" in names and "__next__" in names:
            return True
    return False


def lasting(key: Hashable) -> Hashable:
    """Return what tells a stand-in from others, and keeps no object of the user's alive."""
    if isinstance(key, tuple):
        return tuple([lasting(part) for part in key])
    if isinstance(key, type):
        return weakref.ref(key)
    if isinstance(key, Opaque) and key.hash is None:
        # An unhashable object, by its attributes.
        return lasting(freeze(getattr(key.value, "__dict__", None)))
    return key if isinstance(key, weakref.ref) else hash(key)


# --- Texts ----------------------------------------------------------------------------------------


def _text(value: Any) -> str | PlacedText:
    """Return the text to show of a static value: `repr`, or the name of a callable."""
    kind = type(value)
    if isinstance(value, types.FunctionType):
        return _function_text(value, *transformation_of(value))
    if isinstance(value, functools.partial):
        arguments = [
            *[str(_text(argument)) for argument in value.args],
            *[f"{name}={_text(argument)}" for name, argument in value.keywords.items()],
        ]
        after = f" with {', '.join(arguments)}" if arguments else ""
        return _placed("partial of ", _text(value.func), after)
    if isinstance(value, types.MethodType):
        return _placed(f"method {value.__qualname__} of ", _text(value.__self__))
    if callable(value):
        # What `jax.jit` and the like make has a name, too.
        name = getattr(value, "__qualname__", "<")
        if "<" not in name:
            return name
        wrapped = inspect.unwrap(value)
        if isinstance(wrapped, types.FunctionType):
            return _placed(f"{kind.__name__} of ", _text(wrapped))
    if kind.__repr__ is object.__repr__:
        return f"{kind.__name__} object{_holding(getattr(value, '__dict__', {}).items())}"
    # Where something is in memory tells nothing.
    return _ADDRESS.sub("", short(value))


def _function_text(fun: Any, transformation: str, module: Any) -> str | PlacedText:
    if transformation:
        return f"jax.{transformation} of {type(module).__name__}"
    if "<" not in fun.__qualname__:
        return fun.__qualname__
    code = fun.__code__
    site = CallSite(code.co_filename, code.co_firstlineno)
    return PlacedText(f"`{fun.__name__}` at ", site, _holding(_named_values(fun)))


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def _placed(before: str, text: str | PlacedText, after: str = "") -> str | PlacedText:
    if isinstance(text, str):
        return f"{before}{text}{after}"
    return PlacedText(before + text.before, text.site, text.after + after)


def _named_values(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function captured, and its defaults, by their names."""
    yield from captured(function)
    code = function.__code__
    defaults = function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _holding(named: Any) -> str:
    """Return the constants among named values as a text: what tells a value from one made alike."""
    constants = [f"{name}={short(v)}" for name, v in list(named) if type(v) in CONSTANTS]
    return f" with {', '.join(constants[:_MAX_CAPTURED])}" if constants else ""


def _unwrapped(value: Any) -> types.CodeType | None:
    """Return the code of a callable, whatever it was wrapped in; None without code."""
    while isinstance(value, (functools.partial, types.MethodType)):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    wrapped = inspect.unwrap(value) if callable(value) else None
    return wrapped.__code__ if isinstance(wrapped, types.FunctionType) else None


def summary(description: Description) -> Iterator[str]:
    """Yield each argument in a few words: `x: float32[3]`, `model: MLP of 4 arrays`, `n=3`."""
    if description == UNKNOWN:
        yield "..."
        return
    paths, parents, parts = description
    starts = [index for index, parent in enumerate(parents) if parent < 0]
    # What is in an argument comes between it and the next one.
    for start, stop in itertools.pairwise([*starts, len(parts)]):
        path, part = paths[start], parts[start]
        if isinstance(part, StaticPart):
            yield f"{path}={part}"
        elif isinstance(part, ArrayPart):
            yield f"{path}: {part}"
        else:
            n_arrays = sum(isinstance(inner, ArrayPart) for inner in parts[start:stop])
            yield f"{path}: {part} with {counted(n_arrays, 'array')}"
