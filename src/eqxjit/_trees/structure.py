"""The static half of a call as a tree of nodes, for the code generators to walk."""

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from .._compat import MISSING, PyTreeDef
from .given import Position, object_key
from .key_cache import metadata_key, static_key
from .modules import dynamic_fields, keeps_fields_plainly, static_fields
from .partition import DYNAMIC

# From this many equal items on, generated code loops over them.
SHORTEST_RUN = 4

# Deeper structures are left to the generic path, which recurses in C++. (So does Python leave those
# of some 100 levels, in generated source.)
MAX_DEPTH = 200


class TooDeep(Exception):
    """A structure that generated code would not be generated for."""


#: The class of what stands for a field that isn't set.
MISSING_KIND = type(MISSING)

# Static values that are compared a whole run at once.
_NUMBERS_AND_TEXTS = frozenset({int, float, bool, str, bytes})


class Leaf:
    """A leaf: `value` is a static value, or `DYNAMIC` for an array."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    @property
    def is_dynamic(self) -> bool:
        return self.value is DYNAMIC

    @property
    def is_number_or_text(self) -> bool:
        return type(self.value) in _NUMBERS_AND_TEXTS


# One for all of them: there are very many.
_ARRAY = Leaf(DYNAMIC)
_NOTHING_GIVEN: Mapping[int, Position] = {}


class Node:
    """An inner node: what JAX's registry splits an object of class `kind` into.

    - `kind`: the class of the object; `NoneType` for `None`.
    - `data`: the metadata of the node, as JAX's registry has it.
    - `children`: the nodes and leaves below.
    - `treedef`: the treedef of the node with all that is below it.
    - `given`: the parts of an output's metadata that come in with each call, and where.
    - `signature`: that of an input, or of an output, once somebody has asked for it.
    """

    __slots__ = ("children", "data", "given", "kind", "signature", "treedef")

    def __init__(self, treedef: PyTreeDef, children: list["Node | Leaf"]):
        self.kind, self.data = treedef.node_data()
        self.children = children
        self.treedef = treedef
        self.given: Mapping[int, Position] = _NOTHING_GIVEN
        self.signature: Hashable = None


def structure_of(
    treedef: PyTreeDef, leaves: tuple[Any, ...], tick: Callable[[], None]
) -> Node | Leaf:
    """Return the nodes of a treedef, with these leaves; `tick` is called for each.

    **Raises:**

    - `TooDeep`, beyond `MAX_DEPTH`.
    """
    return _structure_of(treedef, iter(leaves), tick, 0)


def _structure_of(
    treedef: PyTreeDef, leaves: Iterator[Any], tick: Callable[[], None], depth: int
) -> Node | Leaf:
    tick()
    n_leaves = treedef.num_leaves
    if treedef.num_nodes == n_leaves:
        return _leaf(next(leaves))
    if depth > MAX_DEPTH:
        raise TooDeep
    if treedef.num_nodes == n_leaves + 1:
        # Leaves alone, as at the bottom of most trees.
        return Node(treedef, [*map(_leaf, itertools.islice(leaves, n_leaves))])
    children = [_structure_of(child, leaves, tick, depth + 1) for child in treedef.children()]
    return Node(treedef, children)


def _leaf(value: Any) -> Leaf:
    return _ARRAY if value is DYNAMIC else Leaf(value)


def input_signature(node: Node | Leaf) -> Hashable:
    """Return a key, equal for structures whose typed static keys are equal."""
    if isinstance(node, Leaf):
        return DYNAMIC if node.is_dynamic else static_key(node.value)
    if node.signature is None:
        children = tuple([input_signature(child) for child in node.children])
        node.signature = (node.kind, metadata_key(node.data), children)
    return node.signature


def output_signature(node: Node | Leaf) -> Hashable:
    """Return a key, equal for structures that hold the same static objects, or equal strings."""
    if isinstance(node, Leaf):
        if type(node.value) is Position:
            # What is written for it can't be moved into a loop.
            return id(node)
        return DYNAMIC if node.is_dynamic else object_key(node.value)
    if node.signature is None:
        children = tuple([output_signature(child) for child in node.children])
        node.signature = (node.kind, _metadata_mark(node), children)
    return node.signature


def _metadata_mark(node: Node) -> Hashable:
    if node.given:
        # Each item has its own, from its place in the input.
        return id(node)
    layout = module_layout(node)
    if layout is not None:
        return tuple([object_key(value) for _, value in layout.static])
    return metadata_key(node.data) if node.kind is dict else object_key(node.data)


def n_arrays(node: Node | Leaf) -> int:
    """Return the number of arrays below a node."""
    if isinstance(node, Leaf):
        return int(node.is_dynamic)
    return sum(n_arrays(child) for child in node.children)


def runs(
    children: list[Node | Leaf], signature: Callable[[Node | Leaf], Hashable]
) -> Iterator[list[Node | Leaf]]:
    """Split the items of a sequence where their signatures differ.

    Static numbers and texts are one run, whatever their values.

    Short runs come item by item: only from `SHORTEST_RUN` items on a loop is worth its while.
    """
    if len(children) < SHORTEST_RUN:
        yield from ([child] for child in children)
        return

    def kind(child: Node | Leaf) -> Hashable:
        is_simple = isinstance(child, Leaf) and child.is_number_or_text
        return _NUMBERS_AND_TEXTS if is_simple else signature(child)

    for key, group in itertools.groupby(children, kind):
        run = list(group)
        if len(run) >= SHORTEST_RUN and (key is _NUMBERS_AND_TEXTS or n_arrays(run[0])):
            yield run
        else:
            yield from ([child] for child in run)


class ModuleLayout:
    """The fields in which an `equinox.Module` keeps what its registered flatten hands out.

    - `dynamic`: the names of its fields, in the order of the node's children.
    - `static`: the names of its static fields, each with its value.
    """

    __slots__ = ("dynamic", "static")

    def __init__(self, dynamic: list[str], static: tuple[tuple[str, Any], ...]):
        self.dynamic = dynamic
        self.static = static


def module_layout(node: Node) -> ModuleLayout | None:
    """Return the layout of a Module that has its fields, no others, and keeps them as Equinox does.

    None for all other nodes: those go through JAX's registry.
    """
    cls = node.kind
    if not keeps_fields_plainly(cls):
        return None
    static_names, dynamic_names = static_fields(cls), dynamic_fields(cls)
    if not isinstance(node.data, tuple) or len(node.data) != 1 + len(static_names):
        return None
    wrapper_fields, *static_values = node.data
    if wrapper_fields is not MISSING or any(value is MISSING for value in static_values):
        return None
    if len(node.children) != len(dynamic_names):
        return None
    if any(isinstance(child, Node) and child.kind is MISSING_KIND for child in node.children):
        return None
    return ModuleLayout(dynamic_names, tuple(zip(static_names, static_values, strict=True)))


def is_namedtuple(kind: type) -> bool:
    """Return whether a class is one of named tuples."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def is_plain_namedtuple(kind: type) -> bool:
    """Return whether the items of a named tuple are those that Python's `tuple` has."""
    return (
        is_namedtuple(kind)
        and kind.__getitem__ is tuple.__getitem__
        and kind.__len__ is tuple.__len__
    )


def is_standard_namedtuple(kind: type) -> bool:
    """Return whether calling a named tuple's class does no more than make the tuple."""
    new = vars(kind).get("__new__")
    return (
        type(kind) is type
        and kind.__bases__ == (tuple,)
        and kind.__init__ is object.__init__
        and isinstance(new, staticmethod)
        # The function that `collections.namedtuple` generates calls this, and nothing else.
        and getattr(new.__func__, "__globals__", {}).get("_tuple_new") is tuple.__new__
    )
