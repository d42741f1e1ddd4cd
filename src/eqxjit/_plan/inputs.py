"""Decides how the arguments of a call are guarded, and which arrays are taken from them.

The guards hold exactly if the arguments have the typed static key that the plan was made for.
They read each field, item and static value anew on every call, and remember nothing by identity.
"""

import collections
from collections.abc import Callable
from typing import Any

from .._trees.constants import CONSTANTS, is_constant
from .._trees.key_cache import KnownKeys, TracedObjects, learned_key
from .._trees.static_key import identity_suffices, is_opaque
from .._trees.structure import Leaf, Node, input_signature, is_plain_namedtuple, module_layout
from .plan import Array, Fields, Input, Mapping, Match, Registered, Sequence, Static
from .planner import Planner

# Small integers are single objects in CPython, as `True` and `None` are.
_SINGLETON_INTEGERS = range(-5, 257)

_WITHOUT_REGISTRATIONS = {"builtins", "numpy", "jax", "jaxlib", "equinox"}


class Inputs(Planner[Input]):
    """The inputs of one plan."""

    __slots__ = ("_traced",)

    def __init__(self, traced: TracedObjects | None, tick: Callable[[], None]):
        """`traced`: the large static objects that are compared by identity; `tick`: see `build`."""
        super().__init__(input_signature, tick)
        self._traced = traced

    def plan(self, node: Node | Leaf) -> Input:
        """Return how to read an object of this structure."""
        if isinstance(node, Leaf):
            return Array() if node.is_dynamic else self.static(node.value, is_leaf=True)
        if node.kind is type(None):
            return Static(None, Match.IS)
        self._tick()
        if node.kind is tuple or node.kind is list or is_plain_namedtuple(node.kind):
            return Sequence(node.kind, len(node.children), self._items(node))
        layout = module_layout(node)
        if layout is not None:
            static = [(field, self.static(value, is_leaf=False)) for field, value in layout.static]
            return Fields(node.kind, static, layout.dynamic, self._children(node))
        return self.container(node.kind, node.data, self._children(node))

    def container(self, kind: type, data: Any, items: list[Input]) -> Mapping | Registered:
        """Return how to read a dict, or a node that only the registry can take apart."""
        if kind is dict:
            return _dict(data, items)
        if kind is collections.OrderedDict:
            return Mapping(kind, data, items, None, KnownKeys(data, is_ordered=True))
        return Registered(kind, static_input(data, self._traced), items)

    def static(self, value: Any, is_leaf: bool) -> Static:
        """Return how to compare a static value: a leaf, or a part of a node's metadata."""
        static = static_input(value, self._traced)
        static.may_become_node = is_leaf and _can_become_a_node(type(value))
        return static


def _dict(keys: list[Any], items: list[Input]) -> Mapping:
    key_types = {type(key) for key in keys}
    if len(key_types) == 1 and key_types <= {str, bytes, int}:
        # Of one type, keys that are equal are the same: each is looked up.
        return Mapping(dict, keys, items, key_types, None)
    known = KnownKeys(keys, is_ordered=False) if keys else None
    return Mapping(dict, keys, items, None, known)


def static_input(value: Any, traced: TracedObjects | None = None) -> Static:
    """Return a comparison that holds exactly for values of the typed static key of `value`."""
    kind = type(value)
    if value is None or kind is bool or (kind is int and value in _SINGLETON_INTEGERS):
        return Static(value, Match.IS)
    if kind in CONSTANTS or is_constant(value):
        return Static(value, Match.SAME)
    if kind.__eq__ is object.__eq__:
        return Static(value, Match.IS)
    if is_opaque(value) and kind.__hash__ is not None:
        # Its hash tells that it was changed in place, as it does in the table.
        return Static(value, Match.OPAQUE, hash(value))
    if not identity_suffices(value):
        return Static(value, Match.KEY, learned_key(value, traced))
    return Static(value, Match.IS_OR_KEY, learned_key(value))


def _can_become_a_node(kind: type) -> bool:
    """Return whether a class may yet be registered as a pytree: not Python's, nor a library's."""
    return str(kind.__module__).partition(".")[0] not in _WITHOUT_REGISTRATIONS
