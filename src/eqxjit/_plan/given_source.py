"""Writes how a specialised call reads the static objects that came in, for its output."""

from .._compat import fields_of
from .._trees.given import WHOLE, Position
from .guard_source import GuardSource
from .names import Constants
from .plan import CallPlan, Fields, InnerInput, Input, Mapping, Registered, Sequence, StaticRun


class NoSource(Exception):
    """A static object that generated code can't read: the generic path serves the structure."""


class GivenSource:
    """The expressions for static objects that came in, after the guards.

    - `fun_statics`: parameters that hold the function's own, with their positions.
    """

    __slots__ = ("_guard_source", "_names", "_plan", "fun_statics")

    def __init__(self, plan: CallPlan, names: Constants, guard_source: GuardSource):
        self._plan = plan
        self._names = names
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
        node: Input | StaticRun = self._plan.argument(position.path)
        source: str | None = sources[id(node)]
        for index in position.path[2:]:
            assert isinstance(node, InnerInput)
            child = node.child_at(index) if isinstance(node, Sequence) else node.items[index]
            # What is read in a loop has no variable of its own.
            source = sources.get(id(child)) or (source and self._child(node, source, index))
            node = child
        if source is None:
            raise NoSource
        if position.is_leaf:
            return source
        assert isinstance(node, Fields | Registered)
        return self._part(node, source, position.part)

    def _child(self, node: InnerInput, source: str, index: int) -> str | None:
        """Return the expression for a child that the guards read in a loop."""
        if isinstance(node, Sequence):
            return f"{source}[{index}]"
        if isinstance(node, Mapping):
            return f"{source}[{self._names.key('key', node.keys[index])}]"
        if isinstance(node, Fields):
            return f"{self._fields(source)}[{node.dynamic[index]!r}]"
        return None

    def _fields(self, source: str) -> str:
        return f"{self._names.constant('fields_of', fields_of)}({source})"

    def _part(self, node: Fields | Registered, source: str, part: int) -> str:
        below = self._guard_source.below.get(id(node))
        if isinstance(node, Fields):
            # Before the static fields comes what the Module wraps.
            field, _ = node.static[part - 1]
            return f"{below or self._fields(source)}[{field!r}]"
        if below is None:
            raise NoSource
        return f"{below}[1]" if part == WHOLE else f"{below}[1][{part}]"
