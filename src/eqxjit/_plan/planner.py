"""Plans what inputs and outputs have in common: sequences, and runs of equal items in them."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from .._trees.structure import Leaf, Node, runs
from .plan import Repeat, StaticRun

_Planned = TypeVar("_Planned")


class Planner(Generic[_Planned]):
    """The inputs, or the output, of one plan: equal items of sequences are planned once."""

    __slots__ = ("_repeated", "_signature", "_tick")

    def __init__(self, signature: Callable[[Node | Leaf], Hashable], tick: Callable[[], None]):
        """`signature`: equal for what is planned alike; `tick`: see `build`."""
        self._signature = signature
        self._tick = tick
        #: What is repeated, by its signature.
        self._repeated: dict[Hashable, _Planned] = {}

    def plan(self, node: Node | Leaf) -> _Planned:
        """Return the plan of an object of this structure."""
        raise NotImplementedError

    def _children(self, node: Node) -> list[_Planned]:
        return [self.plan(child) for child in node.children]

    def _items(self, node: Node) -> list[_Planned | StaticRun | Repeat[_Planned]]:
        items: list[_Planned | StaticRun | Repeat[_Planned]] = []
        for run in runs(node.children, self._signature):
            first = run[0]
            if len(run) == 1:
                items.append(self.plan(first))
            elif isinstance(first, Node) or first.is_dynamic:
                signature = self._signature(first)
                item = self._repeated.get(signature)
                if item is None:
                    item = self._repeated[signature] = self.plan(first)
                items.append(Repeat(len(run), item))
            else:
                values = [leaf.value for leaf in run if isinstance(leaf, Leaf)]
                items.append(StaticRun(tuple(values)))
        return items
