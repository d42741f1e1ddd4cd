"""Describes what a call was traced for: each part of its arguments, by its path.

A description outlives the call: it holds texts, and refers to the user's objects weakly at most.
"""

import collections
import functools
import inspect
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np
from jax.tree_util import FlattenedIndexKey, all_leaves, keystr, tree_flatten_with_path

from .._code.call_site import CallSite
from .._code.text import counted, short
from .._compat import fields_of, treedef_rows
from .._plan.signature import Signature
from .._runtime.errors import named_arguments
from .._trees.array_part import ArrayPart, array_part
from .._trees.constants import CONSTANTS, constants_key
from .._trees.garbage import without_collecting
from .._trees.key_cache import KnownKey, static_key, treedef_key
from .._trees.modules import dynamic_fields, is_module_class, static_fields
from .._trees.partition import SORTED_DICTS, StaticTree, is_array_leaf
from .._trees.static_key import (
    ByEquality,
    compared_fields,
    iterated,
    stays,
    weak_reference,
)
from .._trees.structure import is_namedtuple, is_standard_namedtuple

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


class Slot:
    """A placeholder of an array, in a tree that is looked at or written down."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


class Template(NamedTuple):
    """The description of all calls of one static half, without their arrays.

    - `description`: with `_NO_PART` in the place of each array.
    - `places`: for each array, where in the description it is; empty where none is to be filled in.
    """

    description: Description
    places: tuple[int, ...]

    def describe(self, arrays: Sequence[Any]) -> Description:
        """Describe a call with these arrays: those of the arguments, then the function's."""
        return self.filled(_array_parts(arrays))

    def filled(self, array_parts: list[ArrayPart] | None) -> Description:
        """Return the description with these parts of arrays; None for such as aren't known."""
        if not self.places:
            return self.description
        if array_parts is None or len(array_parts) != len(self.places):
            return UNKNOWN
        parts = list(self.description.parts)
        for place, part in zip(self.places, array_parts, strict=True):
            parts[place] = part
        return self.description._replace(parts=tuple(parts))


class Deferred:
    """A description that is made when somebody asks: nothing in the call can change meanwhile."""

    __slots__ = ("_arrays", "_made", "_template")

    def __init__(self, template: "DeferredTemplate", arrays: list[ArrayPart] | None):
        self._template = template
        self._arrays = arrays
        self._made: Description | None = None

    @property
    def n_parts(self) -> int:
        """About how many parts it has."""
        return self._template.n_parts

    def make(self) -> Description:
        """Return the description, which is made once."""
        if self._made is None:
            self._made = self._template.make().filled(self._arrays)
        return self._made

    def n_arrays_unlike(self, other: "Description | Deferred") -> int:
        """Return how many arrays differ, where nothing else can; 0 if something else may."""
        if not isinstance(other, Deferred) or self._template is not other._template:
            return 0
        if self._arrays is None or other._arrays is None:
            return 0
        return sum(map(operator.ne, self._arrays, other._arrays))


def made(description: Description | Deferred) -> Description:
    """Return a description, which may still have to be made."""
    return description.make() if isinstance(description, Deferred) else description


class DeferredTemplate(NamedTuple):
    """A template that is made when somebody asks.

    - `make`: returns it; the same one each time.
    - `n_parts`: about how many parts it has.
    """

    make: Callable[[], Template]
    n_parts: int

    def describe(self, arrays: Sequence[Any]) -> Deferred:
        """Describe a call, as a `Template` does."""
        return Deferred(self, _array_parts(arrays))


AnyTemplate = Template | DeferredTemplate


def _array_parts(arrays: Sequence[Any]) -> list[ArrayPart] | None:
    try:
        return [*map(array_part, arrays)]
    except Exception:
        return None


# Smaller trees are described at once.
_FEW_PARTS = 100

_NO_PART = NodePart("array", None)

# Children of which no node has others are described at once.
_OF_MANY = frozenset({Slot, bool, int, float})


def template_of(signature: Signature, fun: StaticTree | None, arguments: StaticTree) -> AnyTemplate:
    """Describe the static half of a call; `fun` is None if the function is always the same."""
    try:
        n_nodes = arguments.treedef.num_nodes
        if fun is None and n_nodes >= _FEW_PARTS and _stays_as_it_is(arguments):
            static = StaticTree(arguments.treedef, arguments.leaves)
            make = functools.cache(lambda: _template(signature, None, static))
            return DeferredTemplate(make, n_nodes)
        return _template(signature, fun, arguments)
    except Exception:
        return Template(UNKNOWN, ())


def _template(signature: Signature, fun: StaticTree | None, arguments: StaticTree) -> Template:
    try:
        n_nodes = arguments.treedef.num_nodes
        return without_collecting(lambda: _whole_template(signature, fun, arguments), n_nodes)
    except Exception:
        # Say, a node of the user's that can't be made without its arrays.
        return Template(UNKNOWN, ())


def _whole_template(
    signature: Signature, fun: StaticTree | None, arguments: StaticTree
) -> Template:
    n_arrays = arguments.n_arrays
    args, kwargs = arguments.combine(map(Slot, range(n_arrays)))
    named = named_arguments(signature, args, kwargs)
    if fun is not None:
        n_before, n_arrays = n_arrays, n_arrays + fun.n_arrays
        named.append(("fun", fun.combine(map(Slot, range(n_before, n_arrays)))))
    return _template_of(named, n_arrays)


def _stays_as_it_is(arguments: StaticTree) -> bool:
    """Return whether a tree holds nothing that can change, in nodes that run no code of the user's.

    Beside constants that is what lives with a library's module: nothing else may be kept alive
    until it is described.
    """
    *_, classes = arguments.columns
    return arguments.holds_only(_is_a_librarys) and all(
        cls is None or is_module_class(cls) for cls in {*classes}
    )


def _is_a_librarys(value: Any) -> bool:
    # The metadata of a named tuple is its class, whose methods may do anything.
    is_plain = not issubclass(type(value), type) or not is_namedtuple(value)
    return stays(value) and (is_plain or is_standard_namedtuple(value))


def _template_of(named: list[tuple[str, Any]], n_arrays: int) -> Template:
    paths: list[str] = []
    parents: list[int] = []
    parts: list[Part] = []
    places = [0] * n_arrays
    pending = [(name, value, -1, False) for name, value in reversed(named)]
    while pending:
        path, value, parent, is_static = pending.pop()
        children: _Children = ()
        if type(value) is Slot:
            places[value.index] = len(parts)
        part = _leaf_part(value, is_static)
        if part is None:
            part, children = _static_part(value, True) if is_static else _dynamic_part(value)
        paths.append(path)
        parents.append(parent)
        parts.append(part)
        if children and {type(child) for _, child, _ in children} <= _OF_MANY:
            start = len(paths)
            paths += [path + suffix for suffix, _, _ in children]
            parents += [start - 1] * len(children)
            for place, (_, child, child_is_static) in enumerate(children, start):
                if type(child) is Slot:
                    places[child.index] = place
                part = _leaf_part(child, child_is_static or is_static)
                assert part is not None
                parts.append(part)
        elif children:
            index = len(paths) - 1
            pending += [
                (path + suffix, child, index, child_is_static or is_static)
                for suffix, child, child_is_static in reversed(children)
            ]
        if len(paths) + len(pending) > _MAX_PARTS:
            return Template(UNKNOWN, ())
    return Template(Description(tuple(paths), tuple(parents), tuple(parts)), tuple(places))


def _leaf_part(value: Any, is_field: bool) -> Part | None:
    """Return what most parts are; None for what takes longer."""
    kind = type(value)
    if kind is Slot:
        return _NO_PART
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
    known = _known_node(value)
    if known is not None:
        return known
    if is_array_leaf(value):
        # One that is compiled in.
        return array_part(value), ()
    if all_leaves([value]):
        return _static_part(value, is_field=False)
    # A class that was registered as a node.
    keyed, treedef = tree_flatten_with_path(value, is_leaf=lambda node: node is not value)
    name = type(value).__name__
    *_, (_, _, metadata, _) = treedef_rows(treedef)
    detail = f" with metadata {short(metadata)}"
    part = NodePart(name, lasting(treedef_key(treedef)), detail, type(value).__module__)
    return part, [(_suffix(path), child, False) for path, child in keyed]


def _large_part(value: Any) -> StaticPart | None:
    """Return a large sequence of nothing but constants: it isn't looked into."""
    name = type(value).__name__
    if type(value) in (tuple, list) and len(value) > _MAX_ITEMS:
        key = constants_key(tuple(value))
        if key is not None:
            return StaticPart(f"{name} of {len(value)}", hash(key), name, is_field=False)
    return None


def _suffix(path: Any) -> str:
    """Return how a path goes on to a child of a registered node."""
    if isinstance(path[-1], FlattenedIndexKey):
        return f"[{path[-1].key}]"
    return keystr(path)


def _known_node(value: Any) -> tuple[NodePart, _Children] | None:
    kind = type(value)
    if value is None:
        return NodePart("None", None), ()
    name = kind.__name__
    if issubclass(kind, eqx.Module):
        values = fields_of(value)
        part, fields = _part_and_fields(kind)
        return part, [(path, values[f], static) for path, f, static in fields if f in values]
    if kind in SORTED_DICTS or kind is collections.OrderedDict:
        children = [(f"[{short(key)}]", child, False) for key, child in iterated(kind.items, value)]
        if kind is not collections.defaultdict:
            return NodePart(name, name), children
        factory = value.default_factory
        key = (name, lasting(static_key(factory)))
        return NodePart(name, key, _placed(" of ", _text(factory))), children
    if is_namedtuple(kind):
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
    dynamic = [(f".{name}", name, False) for name in dynamic_fields(kind)]
    static = [(f".{name}", name, True) for name in static_fields(kind)]
    return _part_of_class(kind), dynamic + static


def _part_of_class(kind: type) -> NodePart:
    return NodePart(kind.__name__, lasting(kind), module=kind.__module__)


def _static_part(value: Any, is_field: bool) -> tuple[Part, _Children]:
    kind = type(value)
    if (kind is str or kind is bytes) and len(value) > _MAX_ITEMS:
        text = f"{value[:_LONG_TEXT]!r}... ({len(value)} long)"
        return StaticPart(text, hash(value), kind.__name__, is_field), ()
    if kind in _SIZED and len(value) > _MAX_ITEMS:
        text = f"{kind.__name__} of {len(value)}"
        return StaticPart(text, hash(static_key(value)), kind.__name__, is_field), ()
    if value is not None:
        known = _known_node(value)
        if known is not None:
            return known
        fields = compared_fields(kind)
        if fields is not None:
            children: _Children = [(f".{name}", getattr(value, name), True) for name in fields]
            return _part_of_class(kind), children
    try:
        key = lasting(static_key(value))
    except Exception:
        key = id(value)
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
    try:
        return issubclass(kind, Iterator)
    except Exception:
        # A metaclass of the user's.
        return False


def lasting(key: Hashable) -> Hashable:
    """Return a stand-in for a typed static key that keeps no object of the user's alive."""
    if isinstance(key, tuple):
        return tuple([lasting(part) for part in key])
    if isinstance(key, frozenset):
        return frozenset([lasting(part) for part in key])
    if isinstance(key, type):
        return weak_reference(key)
    if isinstance(key, (str, bytes)):
        return key if len(key) <= _LONG_TEXT else hash(key)
    if key is None or isinstance(key, (bool, int, float, weakref.ref, np.dtype)):
        return key
    if isinstance(key, KnownKey):
        return lasting(key.typed)
    if isinstance(key, ByEquality) and key.hash is None:
        return _content(key.value)
    return hash(key)


def _content(value: Any) -> Hashable:
    """Return what tells an unhashable object from others of its class, as far as possible."""
    if isinstance(value, np.dtype):
        return hash(value)
    try:
        return lasting(static_key(vars(value)))
    except Exception:
        return None


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
    try:
        # What `jax.jit` and the like make has a name, too.
        if callable(value) and "<" not in value.__qualname__:
            return value.__qualname__
    except Exception:
        pass
    try:
        wrapped = inspect.unwrap(value)
        if isinstance(wrapped, types.FunctionType):
            return _placed(f"{type(value).__name__} of ", _text(wrapped))
    except Exception:
        pass
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
    try:
        wrapped = inspect.unwrap(value) if callable(value) else None
    except Exception:
        return None
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
