"""Decides how the output of a call is put together from the arrays that JAX returned.

Modules are built without running their construction, as their registered unflatten does.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import equinox as eqx

from .._compat import root_treedef
from .._trees.given import WHOLE, Given, Position
from .._trees.out_spec import OutSpec
from .._trees.structure import (
    Leaf,
    ModuleLayout,
    Node,
    is_namedtuple,
    is_standard_namedtuple,
    module_layout,
    output_signature,
    structure_of,
)
from .names import can_be_written
from .plan import (
    Constant,
    GivenStatic,
    MakeDict,
    MakeModule,
    MakeNamedTuple,
    MakeSequence,
    Output,
    Take,
    Unflatten,
    UnflattenGiven,
)
from .planner import Planner


def output_structure(out_spec: OutSpec, given: Given, tick: Callable[[], None]) -> Node | Leaf:
    """Return the structure of a call's output, with the positions of what came in.

    What compares by identity is the same for all calls that pass the guards.
    """
    leaves, treedef = out_spec.resolve(given)
    positioned = list(leaves)
    for index, position in out_spec.leaf_positions(leaves):
        positioned[index] = position
    structure = structure_of(treedef, tuple(positioned), tick)
    for path, part, position in out_spec.positions(treedef, given):
        tick()
        node = structure
        for index in path:
            assert isinstance(node, Node)
            node = node.children[index]
        assert isinstance(node, Node)
        node.given = {**node.given, part: position}
    return structure


class Outputs(Planner[Output]):
    """The output of one plan.

    - `given`: see `CallPlan`.
    """

    __slots__ = ("given",)

    def __init__(self, tick: Callable[[], None]):
        """`tick`: see `build`."""
        super().__init__(output_signature, tick)
        self.given: list[Position] = []

    def plan(self, node: Node | Leaf) -> Output:
        """Return how to make an object of this structure."""
        if isinstance(node, Leaf):
            if node.is_dynamic:
                return Take()
            return self._constant(node.value)
        cls = node.kind
        if cls is type(None):
            return Constant(None)
        self._tick()
        layout = module_layout(node)
        if layout is not None:
            return self._module(node, layout)
        if node.given:
            return UnflattenGiven(cls, self._metadata(node), _labels(node), self._children(node))
        if cls is tuple or cls is list:
            return MakeSequence(cls, self._items(node))
        if cls is dict:
            return MakeDict(node.data, self._children(node))
        if is_namedtuple(cls):
            return MakeNamedTuple(cls, self._children(node), is_standard_namedtuple(cls))
        return Unflatten(root_treedef(node.treedef), _labels(node), self._children(node))

    def _module(self, node: Node, layout: ModuleLayout) -> MakeModule:
        dynamic = [*zip(layout.dynamic, self._children(node), strict=True)]
        static = [
            (field, self._constant(node.given.get(part, value)))
            for part, (field, value) in enumerate(layout.static, 1)
        ]
        # Dynamic fields come first, as upstream.
        fields = [*dynamic, *static]
        plain = _plain_class(node.kind, tuple([field for field, _ in fields]))
        return MakeModule(node.kind, fields, len(dynamic), plain)

    def _constant(self, value: Any) -> Constant | GivenStatic:
        if type(value) is not Position:
            return Constant(value)
        self.given.append(value)
        return GivenStatic(value)

    def _metadata(self, node: Node) -> Any:
        """Return the metadata of a node of which a part came in."""
        if WHOLE in node.given:
            return self._constant(node.given[WHOLE])
        parts = [self._constant(node.given.get(i, part)) for i, part in enumerate(node.data)]
        return tuple(parts) if type(node.data) is tuple else parts


def _plain_class(kind: type, fields: tuple[str, ...]) -> type | None:
    """Return a class whose objects are given these fields, and then made instances of a class of
    Modules.

    Storing the attributes of a plain object costs next to nothing; a Module's `__setattr__` is a
    Python function, and refuses. None where objects can't change from the one class to the other.
    """
    if not all(map(can_be_written, fields)):
        return None
    plain = _plain_class_of(fields)
    trial = plain()
    try:
        trial.__class__ = kind
    except TypeError:
        # Slots, for instance, make for another layout.
        return None
    # Or it would be finalized as one of the user's.
    object.__setattr__(trial, "__class__", plain)
    return plain


@functools.lru_cache(maxsize=1024)
def _plain_class_of(_fields: tuple[str, ...]) -> type:
    # One for each set of fields: Python lays out the objects of a class by what they are given.
    base = eqx.Module
    while base.__dictoffset__ and base.__base__:
        # Both classes must have got their `__dict__` on top of the same base.
        base = base.__base__
    return types.new_class(
        "Fields", (base,), {}, lambda namespace: namespace.update(__hash__=object.__hash__)
    )


def _labels(node: Node) -> Any:
    return getattr(node.kind, "_fields", None) or range(len(node.children))
