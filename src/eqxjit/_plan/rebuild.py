"""Generates the way out of a specialised call: the output from the arrays that JAX returned.

Modules are built without running their construction, as their registered unflatten does.
"""

import functools
import types
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import equinox as eqx

from .._code.source import indented, wrapped
from .._compat import fields_of, root_treedef, unflatten_node
from .._trees.given import WHOLE, Position
from .._trees.structure import (
    Leaf,
    ModuleLayout,
    Node,
    module_layout,
    n_arrays,
    output_signature,
    runs,
)
from .names import Constants, can_be_written

# Longer ones get a variable, to be read, and because Python's parser limits nested brackets.
_LONGEST_EXPRESSION = 60


class RebuildSource:
    """The source of an output.

    - `result`: the expression that is the output.
    - `helpers`: functions that it calls.
    """

    __slots__ = (
        "_body",
        "_expression",
        "_loops",
        "_makers",
        "_names",
        "_segments",
        "_source",
        "_taken",
        "helpers",
        "result",
    )

    def __init__(
        self,
        names: Constants,
        output: Node | Leaf,
        arrays: str,
        expression: Callable[[Position], str],
        hint: str = "out",
        outer: "RebuildSource | None" = None,
    ):
        """Generate what makes `output` from its arrays, a variable named `arrays`.

        `expression` gives the source of a static object that came in. `outer` is the way out that
        this is a part of: helpers are shared.
        """
        self._names = names
        self._expression = expression
        self._source = arrays
        #: How many of the arrays are taken, and by which variables: (start, names).
        self._taken = 0
        self._segments: list[tuple[int, list[str]]] = []
        self._loops = False
        self._body: list[str] = []
        self.helpers: list[str] = outer.helpers if outer else []
        #: The helpers that make runs of equal items, by the signature of an item.
        self._makers: dict[Hashable, str] = outer._makers if outer else {}
        self.result = self._build(output, hint)

    @property
    def lines(self) -> list[str]:
        """The statements to run first."""
        return self._unpacking() + self._body

    def _unpacking(self) -> list[str]:
        """Return the statements that name the arrays; those that a loop takes stay in the list."""
        lines: list[str] = []
        for start, names in self._segments:
            source = (
                f"{self._source}[{start}:{start + len(names)}]" if self._loops else self._source
            )
            lines += wrapped("(", names, f") = {source}")
        return lines

    def _build(self, node: Node | Leaf, hint: str) -> str:
        """Return the expression that makes a node: short, or the name of a variable."""
        if isinstance(node, Leaf):
            return self._leaf(node, hint)
        if node.kind is type(None):
            return "None"
        children: list[str] = []
        labels = _labels(node)
        for start, run in self._runs(node):
            if len(run) == 1:
                children.append(self._build(run[0], f"{hint}_{labels[start]}"))
                continue
            made = self._run(run)
            if node.kind is list and len(run) == len(node.children) and isinstance(run[0], Node):
                # Made in one piece, a fresh list already.
                return made[1:]
            children.append(made)
        layout = module_layout(node)
        if layout is not None:
            return self._module(node, layout, children, hint)
        head, items, tail = self._brackets(node, children, hint)
        source = wrapped(head, items, tail)
        if len(source) == 1 and len(source[0]) <= _LONGEST_EXPRESSION:
            return source[0]
        name = self._names.variable(hint)
        self._body += wrapped(f"{name} = {head}", items, tail)
        return name

    def _runs(self, node: Node) -> Iterable[tuple[int, list[Node | Leaf]]]:
        if node.kind is tuple or node.kind is list:
            return runs(node.children, output_signature)
        return [(index, [child]) for index, child in enumerate(node.children)]

    def _run(self, run: list[Node | Leaf]) -> str:
        """Make equal items in a loop, in a function that serves all runs of such items."""
        node = run[0]
        if isinstance(node, Leaf) and not node.is_dynamic:
            values = tuple([leaf.value for leaf in run if isinstance(leaf, Leaf)])
            return f"*{self._names.constant('values', values)}"
        self._loops = True
        start, stop = self._taken, self._taken + n_arrays(node) * len(run)
        self._taken = stop
        arrays = f"{self._source}[{start}:{stop}]"
        if isinstance(node, Leaf):
            return f"*{arrays}"
        signature = output_signature(node)
        make = self._makers.get(signature)
        if make is None:
            make = self._makers[signature] = self._define_maker(node)
        return f"*{make}({arrays})"

    def _define_maker(self, node: Node) -> str:
        names = self._names
        kind = node.kind.__name__.lower()
        make, arrays = names.helper("make", node.kind), names.variable(f"{kind}s_arrays")
        items, item_arrays = names.variable(f"new_{kind}s"), names.variable(f"{kind}_arrays")
        item = RebuildSource(names, node, item_arrays, self._expression, f"new_{kind}", self)
        if item._loops:
            # It takes slices.
            targets, lines = [item_arrays], item.lines
        else:
            targets, lines = item._segments[0][1], item._body
        head, tail = ("for (", ")") if len(targets) > 1 else ("for ", "")
        source, size = arrays, n_arrays(node)
        if size > 1:
            iterator = f"{names.constant('iter', iter)}({arrays})"
            source = f"{names.constant('zip', zip)}(*[{iterator}] * {size})"
        self.helpers += [
            f"def {make}({arrays}):",
            f"    {items} = []",
            *indented(wrapped(head, targets, f"{tail} in {source}:")),
            *indented(lines, 2),
            f"        {items}.append({item.result})",
            f"    return {items}",
            "",
        ]
        return make

    def _leaf(self, leaf: Leaf, hint: str) -> str:
        if type(leaf.value) is Position:
            return self._expression(leaf.value)
        if not leaf.is_dynamic:
            if leaf.value is None or leaf.value is True or leaf.value is False:
                return repr(leaf.value)
            return self._names.constant(hint, leaf.value)
        name = self._names.variable(hint)
        self._take(name)
        return name

    def _take(self, name: str) -> None:
        """Name the next array."""
        if self._segments:
            start, names = self._segments[-1]
            if start + len(names) == self._taken:
                names.append(name)
                self._taken += 1
                return
        self._segments.append((self._taken, [name]))
        self._taken += 1

    def _brackets(self, node: Node, children: list[str], hint: str) -> tuple[str, list[str], str]:
        """Return the source around the children of a node that isn't a Module."""
        names = self._names
        if node.given:
            return self._with_given_metadata(node, children)
        if node.kind is tuple:
            return "(", children, ")"
        if node.kind is list:
            return "[", children, "]"
        if node.kind is dict:
            keys = [self._key(key, hint) for key in node.data]
            return "{", [f"{k}: {c}" for k, c in zip(keys, children, strict=True)], "}"
        if issubclass(node.kind, tuple) and hasattr(node.kind, "_fields"):
            kind = names.constant(node.kind.__name__, node.kind)
            if not _is_standard_namedtuple(node.kind):
                return f"{kind}(", children, ")"
            return f"{names.constant('new_tuple', tuple.__new__)}({kind}, (", children, "))"
        treedef = root_treedef(node.treedef)
        # Not the bound method: Python's garbage collector can't see through jaxlib's.
        unflatten = functools.partial(type(treedef).unflatten, treedef)
        return f"{names.constant(f'unflatten_{hint}', unflatten)}([", children, "])"

    def _module(self, node: Node, layout: ModuleLayout, children: list[str], hint: str) -> str:
        names = self._names
        name = names.variable(hint)
        kind = names.constant(node.kind.__name__, node.kind)
        static = [
            (field, self._leaf(Leaf(node.given.get(part, value)), f"{hint}_{field}"))
            for part, (field, value) in enumerate(layout.static, 1)
        ]
        # Dynamic fields come first, as upstream.
        values = [*zip(layout.dynamic, children, strict=True), *static]
        plain = _plain_class(node.kind, tuple([field for field, _ in values]))
        if plain is not None:
            self._body.append(f"{name} = {names.constant('Fields', plain)}()")
            self._body += [f"{name}.{field} = {value}" for field, value in values]
            self._body.append(f"{name}.__class__ = {kind}")
            return name
        fields = names.variable(f"{hint}_fields")
        self._body.append(f"{name} = {names.constant('new_object', object.__new__)}({kind})")
        self._body.append(f"{fields} = {names.constant('fields_of', fields_of)}({name})")
        self._body += [f"{fields}[{field!r}] = {value}" for field, value in values]
        return name

    def _with_given_metadata(self, node: Node, children: list[str]) -> tuple[str, list[str], str]:
        names = self._names
        unflatten = names.constant("unflatten", unflatten_node)
        kind = names.constant(node.kind.__name__, node.kind)
        if WHOLE in node.given:
            data = self._expression(node.given[WHOLE])
        else:
            parts = [
                self._expression(node.given[i]) if i in node.given else names.constant("part", part)
                for i, part in enumerate(node.data)
            ]
            data = f"[{', '.join(parts)}]"
            if type(node.data) is tuple:
                data = f"{names.constant('tuple', tuple)}({data})"
        return f"{unflatten}({kind}, {data}, [", children, "])"

    def _key(self, key: Any, hint: str) -> str:
        return repr(key) if type(key) in (str, int) else self._names.constant(f"{hint}_key", key)


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
    if node.kind is dict:
        return node.data
    layout = module_layout(node)
    if layout is not None:
        return layout.dynamic
    return getattr(node.kind, "_fields", None) or range(len(node.children))


def _is_standard_namedtuple(kind: type) -> bool:
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
