"""Generates the way out of a specialised call: the output from the arrays that JAX returned.

Modules are built without running their construction, as their registered unflatten does.
"""

import functools
from collections.abc import Iterable
from typing import Any

from ._compat import fields_of, root_treedef
from ._constants import Constants
from ._source import indented, wrapped
from ._structure import (
    Leaf,
    ModuleLayout,
    Node,
    module_layout,
    n_arrays,
    output_signature,
    runs,
)

# Longer ones get a variable, to be read, and because Python's parser limits nested brackets.
_LONGEST_EXPRESSION = 60


class WayOut:
    """The source of an output.

    - `result`: the expression that is the output.
    """

    __slots__ = ("_body", "_loops", "_names", "_segments", "_source", "_taken", "result")

    def __init__(self, names: Constants, output: Node | Leaf, arrays: str, wish: str = "out"):
        """Generates what makes `output` from the list of its arrays, a variable named `arrays`."""
        self._names = names
        self._source = arrays
        #: How many of the arrays are taken, and by which variables: (start, names).
        self._taken = 0
        self._segments: list[tuple[int, list[str]]] = []
        self._loops = False
        self._body: list[str] = []
        self.result = self._build(output, wish)

    @property
    def lines(self) -> list[str]:
        """The statements to run first."""
        return self._unpacking() + self._body

    def _unpacking(self) -> list[str]:
        """The statements that name the arrays; those that a loop takes stay in the list."""
        lines: list[str] = []
        for start, names in self._segments:
            source = (
                f"{self._source}[{start}:{start + len(names)}]" if self._loops else self._source
            )
            lines += wrapped("(", names, f") = {source}")
        return lines

    def _build(self, node: Node | Leaf, wish: str) -> str:
        """The expression that makes a node: short, or the name of a variable that holds it."""
        if isinstance(node, Leaf):
            return self._leaf(node, wish)
        if node.kind is type(None):
            return "None"
        children: list[str] = []
        labels = _labels(node)
        for start, run in self._runs(node):
            if len(run) > 1:
                children.append(self._run(run, wish))
            else:
                children.append(self._build(run[0], f"{wish}_{labels[start]}"))
        if node.kind is list and len(children) == 1 and children[0].startswith("*"):
            # Made in one piece, by a loop or a slice: a fresh list already.
            return children[0][1:]
        layout = module_layout(node)
        if layout is not None:
            return self._module(node, layout, children, wish)
        head, items, tail = self._brackets(node, children, wish)
        source = wrapped(head, items, tail)
        if len(source) == 1 and len(source[0]) <= _LONGEST_EXPRESSION:
            return source[0]
        name = self._names.variable(wish)
        self._body += wrapped(f"{name} = {head}", items, tail)
        return name

    def _runs(self, node: Node) -> Iterable[tuple[int, list[Node | Leaf]]]:
        if node.kind is tuple or node.kind is list:
            return runs(node.children, output_signature)
        return [(index, [child]) for index, child in enumerate(node.children)]

    def _run(self, run: list[Node | Leaf], wish: str) -> str:
        """Equal items are made in a loop."""
        self._loops = True
        size = n_arrays(run[0])
        start, stop = self._taken, self._taken + size * len(run)
        self._taken = stop
        if isinstance(run[0], Leaf):
            return f"*{self._source}[{start}:{stop}]"
        names = self._names
        items, arrays = names.variable(f"{wish}_items"), names.variable(f"{wish}_arrays")
        item = WayOut(names, run[0], arrays, f"{wish}_item")
        source = f"{self._source}[{start}:{stop}]"
        if size > 1:
            each = f"{names.constant('iter', iter)}({source})"
            source = f"{names.constant('zip', zip)}(*[{each}] * {size})"
        if item._loops:
            # It takes slices of the list.
            source = f"{names.constant('map', map)}({names.constant('list', list)}, {source})"
            targets, lines = [arrays], item.lines
        else:
            targets, lines = item._segments[0][1], item._body
        head, tail = ("for (", ")") if len(targets) > 1 else ("for ", "")
        self._body += [
            f"{items} = []",
            *wrapped(head, targets, f"{tail} in {source}:"),
            *indented(lines),
            f"    {items}.append({item.result})",
        ]
        return f"*{items}"

    def _leaf(self, leaf: Leaf, wish: str) -> str:
        if not leaf.is_dynamic:
            if leaf.value is None or leaf.value is True or leaf.value is False:
                return repr(leaf.value)
            return self._names.constant(wish, leaf.value)
        name = self._names.variable(wish)
        self._take(name)
        return name

    def _take(self, name: str) -> None:
        """Names the next array."""
        if self._segments:
            start, names = self._segments[-1]
            if start + len(names) == self._taken:
                names.append(name)
                self._taken += 1
                return
        self._segments.append((self._taken, [name]))
        self._taken += 1

    def _brackets(self, node: Node, children: list[str], wish: str) -> tuple[str, list[str], str]:
        """How to write a node that isn't a Module: what is before, between and after brackets."""
        names = self._names
        if node.kind is tuple:
            return "(", children, ")"
        if node.kind is list:
            return "[", children, "]"
        if node.kind is dict:
            keys = [self._key(key, wish) for key in node.data]
            return "{", [f"{k}: {c}" for k, c in zip(keys, children, strict=True)], "}"
        if issubclass(node.kind, tuple) and hasattr(node.kind, "_fields"):
            kind = names.constant(node.kind.__name__, node.kind)
            if not _is_standard_namedtuple(node.kind):
                return f"{kind}(", children, ")"
            return f"{names.constant('new_tuple', tuple.__new__)}({kind}, (", children, "))"
        treedef = root_treedef(node.treedef)
        # Not the bound method: Python's garbage collector can't see through jaxlib's.
        unflatten = functools.partial(type(treedef).unflatten, treedef)
        return f"{names.constant(f'unflatten_{wish}', unflatten)}([", children, "])"

    def _module(self, node: Node, layout: ModuleLayout, children: list[str], wish: str) -> str:
        names = self._names
        name, fields = names.variable(wish), names.variable(f"{wish}_fields")
        kind = names.constant(node.kind.__name__, node.kind)
        self._body.append(f"{name} = {names.constant('new_object', object.__new__)}({kind})")
        self._body.append(f"{fields} = {names.constant('fields_of', fields_of)}({name})")
        if layout.static:
            # Copying a dict is faster than filling one; dynamic fields come first, as upstream.
            template = dict.fromkeys(layout.dynamic) | dict(layout.static)
            self._body.append(f"{fields} |= {names.constant(f'{wish}_static_fields', template)}")
        for field, child in zip(layout.dynamic, children, strict=True):
            self._body.append(f"{fields}[{field!r}] = {child}")
        return name

    def _key(self, key: Any, wish: str) -> str:
        return repr(key) if type(key) in (str, int) else self._names.constant(f"{wish}_key", key)


def _labels(node: Node) -> Any:
    if node.kind is dict:
        return node.data
    layout = module_layout(node)
    if layout is not None:
        return layout.dynamic
    return getattr(node.kind, "_fields", None) or range(len(node.children))


def _is_standard_namedtuple(kind: type) -> bool:
    """Whether calling a named tuple's class does no more than make the tuple."""
    new = vars(kind).get("__new__")
    return (
        kind.__bases__ == (tuple,)
        and kind.__init__ is object.__init__
        # The function that `collections.namedtuple` generates calls this, and nothing else.
        and getattr(new, "__globals__", {}).get("_tuple_new") is tuple.__new__
    )
