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
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.core import Tracer

from .._code.call_site import CallSite
from .._code.place import captured, transformation_of
from .._code.text import array_text, counted, short
from .._compat import ArrayImpl, fields_of, flatten_one_level
from .._core.function import Function
from .._interruptions import unless_it_raises
from .._spec.static import CONSTANTS, ITEMS, PAIRS, Identity, Opaque, freeze
from .._spec.tree import ARRAY, NODE, Spec, Static, children

# Larger trees aren't described.
_MAX_PARTS = 50_000

_LONG_TEXT = 40

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

# A part that is still to be described: its path, its spec, itself, and whether it is in a static
# field. In a static object the stand-in of a part takes the place of its spec.
_Pending = tuple[str, Spec, Any, bool]


def named_specs(call: Any, spec: Spec) -> list[tuple[str, Spec, Any]]:
    """Return the arguments of a call by their names, each with its part of a spec of all."""
    args, (_, _, keys, *specs) = spec[3][3:], spec[4]
    names = call.function.signature.path_names(len(args))
    keywords = [(key, s, call.kwargs[key]) for key, s in zip(keys, specs, strict=True)]
    return [*zip(names, args, call.args, strict=True), *keywords]


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
    pending = [(name, spec, value, False, -1) for name, spec, value in reversed(named)]
    while pending:
        path, spec, value, is_field, parent = pending.pop()
        below: list[_Pending] = []
        if spec is ARRAY:
            part: Part = _array(value)
        elif spec is None:
            part = _NONE
        elif type(spec) is tuple:
            part, below = _node(spec, value)
        else:
            part, below = _static(spec.frozen, value, is_field)
        index = len(paths)
        paths.append(path)
        parents.append(parent)
        parts.append(part)
        pending += [
            (path + suffix, spec, child, is_field or is_field_itself, index)
            for suffix, spec, child, is_field_itself in reversed(below)
        ]
        if len(paths) + len(pending) > _MAX_PARTS:
            return UNKNOWN
    return Description(tuple(paths), tuple(parents), tuple(parts))


# --- Arrays ---------------------------------------------------------------------------------------


def _array(array: Any) -> ArrayPart:
    """Return the part of an array, or of the structure that stands for one."""
    if isinstance(array, jax.ShapeDtypeStruct):
        aval, sharding = array, array.sharding
    else:
        aval = array.aval if type(array) is ArrayImpl else jax.typeof(array)
        is_put = not isinstance(array, Tracer) and getattr(array, "committed", False)
        sharding = array.sharding if is_put else None
    placement = "" if sharding is None else _sharding_text(sharding)
    return _array_part(aval.shape, aval.dtype, getattr(aval, "weak_type", False), placement)


@functools.lru_cache(maxsize=1024)
def _array_part(shape: tuple[Any, ...], dtype: Any, weak_type: bool, placement: str) -> ArrayPart:
    """Return the part that arrays of one type share."""
    return ArrayPart(shape, str(dtype), weak_type, placement)


def _sharding_text(sharding: Any) -> str:
    if isinstance(sharding, jax.sharding.NamedSharding):
        axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        return f"a mesh of {axes} by {sharding.spec}"
    devices = [f"{device.platform}:{device.id}" for device in sharding.device_set]
    return ", ".join(sorted(devices))


# --- Nodes ----------------------------------------------------------------------------------------


def _node(spec: tuple[Any, ...], value: Any) -> tuple[NodePart, list[_Pending]]:
    kind, cls, _, *specs = spec
    if kind != NODE:
        return _part_of_class(cls, len(specs)), children(spec, value)
    name = cls.__name__
    # The user's flatten, which may refuse.
    metadata, below = unless_it_raises(lambda: _flattened(spec, value), (None, []))
    if isinstance(metadata, Function):
        # A wrapper of ours, around anybody's function.
        part = NodePart(name, (name, hash(metadata.options.key)), " with other options")
        return part, [(".__wrapped__", metadata.spec, value.__wrapped__, False)]
    if issubclass(cls, dict):
        # JAX sorts the keys of most.
        is_default = issubclass(cls, collections.defaultdict)
        factory, keys = metadata if is_default else (None, metadata)
        named = zip(keys, specs, strict=True)
        part = _part_of_class(cls, len(specs))
        if is_default:
            detail = _placed(" of ", _text(factory))
            part = NodePart(name, (name, lasting(freeze(factory))), detail)
        return part, [(f"[{short(key)}]", below, value[key], False) for key, below in named]
    if issubclass(cls, eqx.Module):
        # One with fields that its class doesn't have, such as a wrapper's `__doc__`.
        shown = {suffix for suffix, *_ in below}
        rest = [(f".{name}", v) for name, v in fields_of(value).items() if f".{name}" not in shown]
        below = [*below, *[(suffix, Static(freeze(v)), v, True) for suffix, v in rest]]
        return _part_of_class(cls, len(specs)), below
    if cls is jax.tree_util.Partial:
        return _part_of_class(cls, 0), [(".func", Static(freeze(metadata)), metadata, True), *below]
    detail = f" with metadata {short(metadata)}"
    key = (name, weakref.ref(cls), lasting(freeze(metadata)))
    return NodePart(name, key, detail, cls.__module__), below


def _flattened(spec: tuple[Any, ...], value: Any) -> tuple[Any, list[_Pending]]:
    """Return a registered node's metadata, and its children."""
    _, metadata = flatten_one_level(value)  # type: ignore[misc]
    if isinstance(metadata, Function) or isinstance(value, dict):
        return metadata, []
    return metadata, [
        # As JAX writes them in its own errors.
        (suffix.replace("<flat index ", "").replace(">]", "]"), child_spec, child, is_field)
        for suffix, child_spec, child, is_field in children(spec, value)
    ]


def _part_of_class(cls: type, n: int, is_opaque: bool = False, is_field: bool = False) -> NodePart:
    """Return the part of a node of `n` children that has no metadata."""
    name = cls.__name__
    if cls in (tuple, list):
        return NodePart(f"{name} of {n}", (name, n))
    if issubclass(cls, dict):
        return NodePart(name, name)
    return NodePart(name, weakref.ref(cls), _OTHER_CLASS, cls.__module__, is_opaque, is_field)


# --- Static values --------------------------------------------------------------------------------


def _static(frozen: Hashable, value: Any, is_field: bool) -> tuple[Part, list[_Pending]]:
    kind = type(value)
    if kind in CONSTANTS:
        return _constant(value, is_field), []
    below = _parts_of(frozen, value)
    if below is None:
        nameless = StaticPart(f"{kind.__name__} object", id(value), kind.__name__, is_field)
        return unless_it_raises(lambda: _leaf(frozen, value, is_field), nameless), []
    is_opaque = not issubclass(kind, (eqx.Module, tuple, list, dict))
    return _part_of_class(kind, len(below), is_opaque, is_field), below


def _constant(value: Any, is_field: bool) -> StaticPart:
    kind = type(value).__name__
    if isinstance(value, (str, bytes)) and len(value) > _LONG_TEXT:
        text = f"{value[:_LONG_TEXT]!r}... ({len(value)} long)"
        return StaticPart(text, hash(value), kind, is_field)
    return StaticPart(repr(value), None, kind, is_field)


def _parts_of(frozen: Hashable, value: Any) -> list[_Pending] | None:
    """Return the parts of a static container or dataclass, by its stand-in; None for a leaf."""
    # Not `strict`: another thread may have changed a list since.
    if type(frozen) is not tuple:
        return None
    reader, kind, names, *parts = frozen
    if reader == ITEMS:
        fields = getattr(kind, "_fields", None)
        suffixes = map(".{}".format if fields else "[{}]".format, fields or range(len(parts)))
        named = [*zip(suffixes, value, strict=False)]
    elif names is not None and not issubclass(kind, slice):
        named = [(f".{name}", getattr(value, name)) for name in names]
    elif reader == PAIRS or issubclass(kind, dict):
        named = [(f"[{short(key)}]", child) for key, child in dict.items(value)]
        # The keys' come first.
        parts = parts[len(parts) // 2 :]
    else:
        return None
    return [(name, Static(p), child, True) for (name, child), p in zip(named, parts, strict=False)]


def _leaf(frozen: Hashable, value: Any, is_field: bool) -> StaticPart:
    kind: Any = type(value)
    name: str = kind.__name__
    is_large = type(frozen) is Opaque and issubclass(kind, _CONTAINERS)
    text = f"{name} of {len(value)}" if is_large else _text_or_class(value)
    is_alone = isinstance(frozen, (weakref.ref, Identity)) or kind is types.MethodType
    made_at = None if isinstance(value, type) else _unwrapped(value)
    transformation, module = "", None
    if isinstance(value, types.FunctionType):
        transformation, module = transformation_of(value)
    key = (weakref.ref(kind), id(value) if is_large else lasting(frozen))
    return StaticPart(
        text,
        key,
        name,
        is_field,
        (value if isinstance(value, types.FunctionType) else kind).__module__ or "",
        made_at and CallSite(made_at.co_filename, made_at.co_firstlineno),
        transformation or (made_at.co_qualname.rpartition(".<locals>.")[0] if made_at else ""),
        type(module).__name__ if transformation else "",
        is_alone and not isinstance(value, type),
        isinstance(value, functools.partial) and not any(map(_is_local, _parts_of_partial(value))),
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
    # By what `collections.abc.Iterator` looks for, which no metaclass has a say in.
    parts = [value]
    if isinstance(value, functools.partial):
        parts += _parts_of_partial(value)
    return any(all(_defines(type(part), name) for name in _OF_ITERATORS) for part in parts)


_OF_ITERATORS = ("__iter__", "__next__")


def _defines(kind: type, name: str) -> bool:
    return any(name in vars(base) for base in kind.__mro__)


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


def _text_or_class(value: Any) -> str | PlacedText:
    """Return the text to show of a static value by itself: `float32` is an array of that dtype."""
    if not issubclass(type(value), type):
        return _text(value)
    owner = "" if value.__module__ == "builtins" else f"{value.__module__}."
    return f"class {owner}{value.__qualname__}"


def _text(value: Any) -> str | PlacedText:
    """Return the text to show of a static value: `repr`, or the name of a callable."""
    kind = type(value)
    if isinstance(value, types.FunctionType):
        transformation, module = transformation_of(value)
        if transformation:
            return f"jax.{transformation} of {type(module).__name__}"
        if "<" not in value.__qualname__:
            return value.__qualname__
        code = value.__code__
        site = CallSite(code.co_filename, code.co_firstlineno)
        return PlacedText(f"`{value.__name__}` at ", site, _holding(_named_values(value)))
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
