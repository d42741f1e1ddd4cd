"""How generated code reads the static objects that came in with a call, for its output."""

import collections
from collections.abc import Callable

from .._compat import fields_of
from .._trees.given import WHOLE, Given, Position, parts_of
from .._trees.out_spec import OutSpec
from .._trees.static_key import compares_by_identity
from .._trees.structure import Leaf, Node, is_plain_namedtuple, module_layout, structure_of
from .guards import GuardSource
from .names import Constants


class NoSource(Exception):
    """A static object that generated code can't read: the generic path serves the structure."""


class GivenSource:
    """The expressions for static objects that came in, after the guards.

    - `fun_statics`: parameters that hold the function's own, with their positions.
    """

    __slots__ = ("_arguments", "_guard_source", "_names", "fun_statics")

    def __init__(self, names: Constants, arguments: Node, guard_source: GuardSource):
        self._names = names
        self._arguments = arguments
        self._guard_source = guard_source
        self.fun_statics: dict[str, Position] = {}

    def expression(self, position: Position) -> str:
        """Return the expression for the object at a position.

        **Raises:**

        - `NoSource`, where only a node's own flatten would tell.
        """
        if position.half:
            name = self._names.variable(f"fun_static_{len(self.fun_statics)}")
            self.fun_statics[name] = position
            return name
        sources = self._guard_source.sources
        node: Node | Leaf = self._arguments
        source: str | None = None
        for index in position.path:
            assert isinstance(node, Node)
            child = node.children[index]
            source = sources.get(id(child)) or (source and self._child(node, source, index))
            node = child
        if source is None:
            raise NoSource
        if isinstance(node, Leaf):
            return source
        return self._part(node, source, position.part)

    def _child(self, node: Node, source: str, index: int) -> str | None:
        """Return the expression for a child that the guards read in a loop."""
        if node.kind in (tuple, list) or is_plain_namedtuple(node.kind):
            return f"{source}[{index}]"
        if node.kind in (dict, collections.OrderedDict):
            key = node.data[index]
            plain = type(key) in (str, int)
            return f"{source}[{repr(key) if plain else self._names.constant('key', key)}]"
        layout = module_layout(node)
        if layout is None:
            return None
        return f"{self._fields(source)}[{layout.dynamic[index]!r}]"

    def _fields(self, source: str) -> str:
        return f"{self._names.constant('fields_of', fields_of)}({source})"

    def _part(self, node: Node, source: str, part: int) -> str:
        below = self._guard_source.below.get(id(node))
        layout = module_layout(node)
        if layout is not None:
            # Before the fields comes what the Module wraps.
            field, _ = layout.static[part - 1]
            return f"{below or self._fields(source)}[{field!r}]"
        if below is None:
            raise NoSource
        return f"{below}[1]" if part == WHOLE else f"{below}[1][{part}]"


def output_structure(out_spec: OutSpec, given: Given, tick: Callable[[], None]) -> Node | Leaf:
    """Return the structure of a call's output, with the positions of what came in.

    What compares by identity is the same for all calls that pass the guards.
    """
    leaves, treedef = out_spec.resolve(given)
    positioned = list(leaves)
    for index, leaf in enumerate(leaves):
        position = out_spec.leaf_position(index)
        if position is not None and not compares_by_identity(type(leaf)):
            positioned[index] = position
    structure = structure_of(treedef, tuple(positioned), tick)
    found = out_spec.positions(given) if out_spec.is_given else {}
    found = {
        place: position
        for place, position in found.items()
        if not compares_by_identity(type(given.get(position)))
    }
    pending: list[tuple[Node | Leaf, tuple[int, ...]]] = [(structure, ())] if found else []
    while pending:
        node, path = pending.pop()
        if isinstance(node, Node):
            parts = parts_of(node.data, node.kind)
            for part in (WHOLE, *range(len(parts))):
                if (path, part) in found:
                    node.given[part] = found[path, part]
            pending += [(child, (*path, i)) for i, child in enumerate(node.children)]
    return structure
