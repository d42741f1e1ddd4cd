"""Describes what a call was traced for: each part of its arguments, by its path.

A description outlives the call: it holds texts, and refers to the user's objects weakly at most.
"""

import collections
import dataclasses
import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.tree_util import FlattenedIndexKey, all_leaves, keystr, tree_flatten_with_path

from .._code.call_site import CallSite
from .._code.text import counted, short
from .._compat import ArrayImpl, fields_of, flatten_one_level
from .._interruptions import unless_it_raises
from .._spec.static import CONSTANTS, Opaque, compared_fields, freeze
from .._spec.tree import is_array
from .array_part import ArrayPart, array_part

# Larger trees aren't described, and larger static containers not looked into.
_MAX_PARTS = 50_000
_MAX_ITEMS = 1_000

_LONG_TEXT = 40

# Containers that aren't written out where they are large.
_SIZED = (tuple, list, dict, set, frozenset)

# Types whose values are short, and told apart by their text and `==` (as zeros of a float aren't).
_SIMPLE = (bool, int, str)


class PlacedText(NamedTuple):
    """A text that names a line of code, by a path that depends on the working directory."""

    before: str
    site: CallSite
    after: str = ""

    def __str__(self) -> str:
        return f"{self.before}{self.site}{self.after}"


class StaticPart(NamedTuple):
    """A static value.

    - `text`: what to show of it.
    - `key`: equal to that of another value exactly if one may stand for the other.
    - `kind`: its type's name.
    - `is_field`: whether it is in a static field, rather than in the place of an array.
    - `module`: the module of its type.
    - `made_at`: where a callable's code is; None for anything else.
    - `is_compared_by_identity`: whether it equals itself alone.
    - `is_iterator`: whether to look at its elements takes them.
    """

    text: str | PlacedText
    key: Hashable
    kind: str
    is_field: bool
    module: str = "builtins"
    made_at: CallSite | None = None
    is_compared_by_identity: bool = False
    is_iterator: bool = False

    def __str__(self) -> str:
        return str(self.text)


class NodePart(NamedTuple):
    """A node, without its children.

    - `text`: what it is.
    - `key`: equal to that of another node exactly if one may stand for the other.
    - `detail`: what else the text could say, where that alone tells two nodes apart.
    - `module`: the module of its class; empty for a container, which may be in anybody's hands.
    """

    text: str
    key: Hashable
    detail: str | PlacedText = " (another class of that name)"
    module: str = ""

    def __str__(self) -> str:
        return self.text


Part = ArrayPart | StaticPart | NodePart


class Description(NamedTuple):
    """The parts of a call, outside in.

    - `paths`: where each is, such as `model.layers[0].weight`.
    - `parents`: the index of the part that holds it; -1 for an argument.
    - `parts`: what it is.
    """

    paths: tuple[str, ...]
    parents: tuple[int, ...]
    parts: tuple[Part, ...]

    def sharing(self, other: "Description") -> "Description":
        """Return the same, made of the other's objects where equal: most calls are alike."""
        if self.paths is not other.paths and (
            self.paths != other.paths or self.parents != other.parents
        ):
            return self
        pairs = zip(other.parts, self.parts, strict=True)
        parts = tuple([old if old is new or old == new else new for old, new in pairs])
        return Description(other.paths, other.parents, parts)


#: Of a call that defies description. (That of a call without arguments is empty.)
UNKNOWN = Description(("...",), (-1,), (NodePart("unknown", None),))


def describe(call: Any) -> Description:
    """Describe the arguments of a call, and its function where copies of it may differ.

    **Returns:**

    The description; `UNKNOWN` for trees that are too large, or whose nodes can't be read.
    """

    def read() -> Description:
        named = call.function.signature.named(call.args, call.kwargs)
        if call.function.varies:
            named.append(("fun", call.function.combine(call.fun_arrays)))
        return _description_of(named, call.is_staged)

    # A node of the user's that can't be flattened, or an array of another library's.
    return unless_it_raises(read, UNKNOWN)


def _description_of(named: list[tuple[str, Any]], is_staged: bool) -> Description:
    paths: list[str] = []
    parents: list[int] = []
    parts: list[Part] = []
    pending = [(name, value, -1, False) for name, value in reversed(named)]
    while pending:
        path, value, parent, is_static = pending.pop()
        children: _Children = ()
        part = _leaf_part(value, is_static)
        if part is None and is_staged and not is_static and isinstance(value, jax.ShapeDtypeStruct):
            part = array_part(value)
        if part is None:
            part, children = _static_part(value, True) if is_static else _dynamic_part(value)
        index = len(paths)
        paths.append(path)
        parents.append(parent)
        parts.append(part)
        pending += [
            (path + suffix, child, index, child_is_static or is_static)
            for suffix, child, child_is_static in reversed(children)
        ]
        if len(paths) + len(pending) > _MAX_PARTS:
            return UNKNOWN
    return Description(tuple(paths), tuple(parents), tuple(parts))


def _leaf_part(value: Any, is_field: bool) -> Part | None:
    """Return what most parts are; None for what takes longer."""
    kind = type(value)
    if kind is ArrayImpl and not is_field:
        return array_part(value)
    if kind in _SIMPLE and (kind is not str or len(value) < _LONG_TEXT):
        return _simple_part(value, is_field)
    if kind is float:
        # Not from a cache, in which its zeros are equal.
        text = repr(value)
        return StaticPart(text, text, "float", is_field)
    return None


@functools.lru_cache(maxsize=1024, typed=True)
def _simple_part(value: Any, is_field: bool) -> StaticPart:
    text = repr(value)
    return StaticPart(text, text, type(value).__name__, is_field)


# What to append to a node's path for a child, the child, and whether it is in a static field.
_Children = Sequence[tuple[str, Any, bool]]


def _dynamic_part(value: Any) -> tuple[Part, _Children]:
    large = _large_part(value)
    if large is not None:
        return large, ()
    known = _known_node(value, is_static=False)
    if known is not None:
        return known
    if is_array(value):
        # One that is compiled in.
        return array_part(value), ()
    if all_leaves([value]):
        return _static_part(value, is_field=False)
    # A class that was registered as a node.
    keyed, _ = tree_flatten_with_path(value, is_leaf=lambda node: node is not value)
    name = type(value).__name__
    _, metadata = flatten_one_level(value) or ((), None)
    detail = f" with metadata {short(metadata)}"
    key = (name, lasting(type(value)), lasting(freeze(metadata)))
    part = NodePart(name, key, detail, type(value).__module__)
    return part, [(_suffix(path), child, False) for path, child in keyed]


def _large_part(value: Any) -> StaticPart | None:
    """Return a large sequence of nothing but constants: it isn't looked into."""
    name = type(value).__name__
    is_large = type(value) in (tuple, list) and len(value) > _MAX_ITEMS
    if not is_large or not {*map(type, value)} <= CONSTANTS:
        return None
    key = hash(tuple(map(freeze, value)))
    return StaticPart(f"{name} of {len(value)}", key, name, is_field=False)


def _suffix(path: Any) -> str:
    """Return how a path goes on to a child of a registered node."""
    if isinstance(path[-1], FlattenedIndexKey):
        return f"[{path[-1].key}]"
    return keystr(path)


def _known_node(value: Any, is_static: bool) -> tuple[NodePart, _Children] | None:
    kind = type(value)
    if value is None:
        return NodePart("None", None), ()
    name = kind.__name__
    if issubclass(kind, eqx.Module):
        values = fields_of(value)
        part, fields = _part_and_fields(kind)
        return part, [(path, values[f], static) for path, f, static in fields if f in values]
    if kind in (dict, collections.defaultdict, collections.OrderedDict):
        items = [*kind.items(value)]
        if not is_static and kind is not collections.OrderedDict:
            # JAX sorts them.
            items = [(key, value[key]) for key in sorted(value)]
        children = [(f"[{short(key)}]", child, False) for key, child in items]
        if kind is not collections.defaultdict:
            return NodePart(name, name), children
        factory = value.default_factory
        key = (name, lasting(freeze(factory)))
        return NodePart(name, key, _placed(" of ", _text(factory))), children
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        children = [(f".{field}", getattr(value, field), False) for field in value._fields]
        return _part_of_class(kind), children
    if kind is tuple or kind is list:
        children = [(path, child, False) for path, child in _items(value)]
        return NodePart(f"{name} of {len(value)}", (name, len(value))), children
    return None


def _items(value: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the items of a tuple or list, each with its index; very many constants as one slice."""
    if len(value) <= _MAX_ITEMS:
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
        return
    start = 0
    for is_constant, group in itertools.groupby(value, lambda item: type(item) in CONSTANTS):
        items = [*group]
        stop = start + len(items)
        if is_constant and len(items) > _MAX_ITEMS:
            yield f"[{start}:{stop}]", tuple(items) if type(value) is tuple else items
        else:
            yield from ((f"[{i}]", item) for i, item in enumerate(items, start))
        start = stop


@functools.lru_cache(maxsize=256)
def _part_and_fields(kind: type) -> tuple[NodePart, list[tuple[str, str, bool]]]:
    """Return the part of a Module, and its fields: path suffix, name, and whether it is static."""
    fields = [
        (f".{field.name}", field.name, field.metadata.get("static", False))
        for field in dataclasses.fields(kind)
    ]
    return _part_of_class(kind), sorted(fields, key=lambda field: field[2])


def _part_of_class(kind: type) -> NodePart:
    return NodePart(kind.__name__, lasting(kind), module=kind.__module__)


def _static_part(value: Any, is_field: bool) -> tuple[Part, _Children]:
    kind = type(value)
    if (kind is str or kind is bytes) and len(value) > _MAX_ITEMS:
        text = f"{value[:_LONG_TEXT]!r}... ({len(value)} long)"
        return StaticPart(text, hash(value), kind.__name__, is_field), ()
    if kind in _SIZED and len(value) > _MAX_ITEMS:
        text = f"{kind.__name__} of {len(value)}"
        # Compared by identity, if it has too many parts.
        frozen = freeze(value)
        key = id(value) if type(frozen) is Opaque else hash(frozen)
        return StaticPart(text, key, kind.__name__, is_field), ()
    if value is not None:
        known = _known_node(value, is_static=True)
        if known is not None:
            return known
        fields = compared_fields(kind)
        if fields is not None:
            children: _Children = [(f".{name}", getattr(value, name), True) for name in fields]
            return _part_of_class(kind), children

    def key_of() -> Hashable:
        key = lasting(freeze(value))
        return (weakref.ref(kind), key) if kind.__eq__ is object.__eq__ else key

    # A metaclass of the user's.
    key = unless_it_raises(key_of, id(value))
    part = StaticPart(
        _text_or_class(value),
        key,
        kind.__name__,
        is_field,
        kind.__module__,
        made_at(value),
        is_compared_by_identity=kind.__eq__ is object.__eq__,
        is_iterator=is_iterator(kind),
    )
    return part, ()


def is_iterator(kind: type) -> bool:
    """Return whether a class is one of iterators, without asking its values."""
    # A metaclass of the user's.
    return unless_it_raises(lambda: issubclass(kind, Iterator), False)


def lasting(key: Hashable) -> Hashable:
    """Return a stand-in for a typed static key that keeps no object of the user's alive."""
    if isinstance(key, tuple):
        return tuple([lasting(part) for part in key])
    if isinstance(key, frozenset):
        return frozenset([lasting(part) for part in key])
    if isinstance(key, type):
        return weakref.ref(key)
    if isinstance(key, (str, bytes)):
        return key if len(key) <= _LONG_TEXT else hash(key)
    if key is None or isinstance(key, (bool, int, float, weakref.ref, np.dtype)):
        return key
    if isinstance(key, Opaque) and key.hash is None:
        return _content(key.value)
    return hash(key)


def _content(value: Any) -> Hashable:
    """Return what tells an unhashable object from others of its class, as far as possible."""
    return unless_it_raises(lambda: lasting(freeze(vars(value))), None)


def _text_or_class(value: Any) -> str | PlacedText:
    """Return the text to show of a static value by itself: `float32` is an array of that dtype."""
    if not issubclass(type(value), type):
        return _text(value)
    owner = "" if value.__module__ == "builtins" else f"{value.__module__}."
    return f"class {owner}{value.__qualname__}"


def _text(value: Any) -> str | PlacedText:
    """Return the text to show of a static value: `repr`, or the name of a callable."""
    if isinstance(value, types.FunctionType):
        if "<" not in value.__qualname__:
            return value.__qualname__
        return PlacedText(f"`{value.__name__}` at ", _code_of(value))
    if isinstance(value, functools.partial):
        given = f" with {short((*value.args, value.keywords))}"
        return _placed("partial of ", _text(value.func), given)
    if isinstance(value, types.MethodType):
        return _placed(f"method {value.__qualname__} of ", _text(value.__self__))
    # What `jax.jit` and the like make has a name, too.
    name = unless_it_raises(lambda: value.__qualname__ if callable(value) else "<", "<")
    if isinstance(name, str) and "<" not in name:
        return name
    wrapped = unless_it_raises(lambda: inspect.unwrap(value), None)
    if isinstance(wrapped, types.FunctionType):
        return _placed(f"{type(value).__name__} of ", _text(wrapped))
    if type(value).__repr__ is object.__repr__:
        return f"{type(value).__name__} object"
    return short(value)


def _placed(before: str, text: str | PlacedText, after: str = "") -> str | PlacedText:
    if isinstance(text, str):
        return f"{before}{text}{after}"
    return PlacedText(before + text.before, text.site, text.after + after)


def made_at(value: Any) -> CallSite | None:
    """Return where the code of a callable is, whatever it was wrapped in; None without code."""
    if isinstance(value, types.FunctionType):
        return _code_of(value)
    if isinstance(value, functools.partial):
        return made_at(value.func)
    if isinstance(value, types.MethodType):
        return made_at(value.__func__)
    wrapped = unless_it_raises(lambda: inspect.unwrap(value) if callable(value) else None, None)
    return _code_of(wrapped) if isinstance(wrapped, types.FunctionType) else None


def _code_of(function: types.FunctionType) -> CallSite:
    return CallSite(function.__code__.co_filename, function.__code__.co_firstlineno)


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
