"""Writes how a specialised call puts its output together."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._code.source import indented, wrapped
from .._compat import fields_of, unflatten_node
from .._trees.given import Position
from .names import Constants
from .plan import (
    Constant,
    GivenStatic,
    MakeDict,
    MakeModule,
    MakeNamedTuple,
    MakeSequence,
    Output,
    Repeat,
    StaticRun,
    Take,
    Unflatten,
    UnflattenGiven,
    n_items,
)

# Longer ones get a variable, to be read, and because Python's parser limits nested brackets.
_LONGEST_EXPRESSION = 60


class OutputSource:
    """The source of an output.

    - `result`: the expression that is the output.
    - `helpers`: functions that it calls.
    """

    __slots__ = (
        "_body",
        "_expression",
        "_is_bare",
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
        output: Output,
        arrays: str,
        expression: Callable[[Position], str],
        hint: str = "out",
        outer: "OutputSource | None" = None,
        is_bare: bool = False,
    ):
        """Generate what makes `output` from its arrays, a variable named `arrays`.

        With `is_bare`, that is the only array itself.

        `expression` gives the source of a static object that came in. `outer` is the way out that
        this is a part of: helpers are shared.
        """
        self._names = names
        self._expression = expression
        self._source = arrays
        self._is_bare = is_bare
        #: How many of the arrays are taken, and by which variables: (start, names).
        self._taken = 0
        self._segments: list[tuple[int, list[str]]] = []
        self._loops = False
        self._body: list[str] = []
        self.helpers: list[str] = outer.helpers if outer else []
        #: By the `id` of an item, the helper that makes runs of it, and how many arrays it takes.
        self._makers: dict[int, tuple[str, int]] = outer._makers if outer else {}
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

    def _build(self, node: Output, hint: str) -> str:
        """Return the expression that makes a node: short, or the name of a variable."""
        if isinstance(node, Take):
            if self._is_bare:
                return self._source
            name = self._names.variable(hint)
            self._take(name)
            return name
        if isinstance(node, Constant | GivenStatic):
            return self._static(node, hint)
        if isinstance(node, MakeModule):
            return self._module(node, hint)
        if isinstance(node, MakeSequence):
            items = self._items(node, hint)
            match node.items:
                case [Repeat() as only] if node.cls is list and not isinstance(only.item, Take):
                    # Made in one piece, a fresh list already.
                    return items[0][1:]
            head, tail = ("[", "]") if node.cls is list else ("(", ")")
        else:
            head, items, tail = self._brackets(node, hint)
        source = wrapped(head, items, tail)
        if len(source) == 1 and len(source[0]) <= _LONGEST_EXPRESSION:
            return source[0]
        name = self._names.variable(hint)
        self._body += wrapped(f"{name} = {head}", items, tail)
        return name

    def _items(self, node: MakeSequence, hint: str) -> list[str]:
        items: list[str] = []
        index = 0
        for item in node.items:
            if isinstance(item, StaticRun):
                items.append(f"*{self._names.constant('values', item.values)}")
            elif not isinstance(item, Repeat):
                items.append(self._build(item, f"{hint}_{index}"))
            elif isinstance(item.item, Take):
                items.append(f"*{self._take_slice(item.n)}")
            else:
                maker = self._makers.get(id(item.item))
                if maker is None:
                    maker = self._makers[id(item.item)] = self._define_maker(item.item)
                make, n_arrays = maker
                items.append(f"*{make}({self._take_slice(item.n * n_arrays)})")
            index += n_items(item)
        return items

    def _take_slice(self, n: int) -> str:
        """Return the expression for the next arrays, which a loop takes, or a sequence."""
        self._loops = True
        start, self._taken = self._taken, self._taken + n
        return f"{self._source}[{start}:{self._taken}]"

    def _define_maker(self, node: Output) -> tuple[str, int]:
        """Define the function that makes all runs of such items in a loop."""
        names, cls = self._names, _class_of(node)
        kind = cls.__name__.lower()
        make, arrays = names.helper("make", cls), names.variable(f"{kind}s_arrays")
        items, item_arrays = names.variable(f"new_{kind}s"), names.variable(f"{kind}_arrays")
        item = OutputSource(names, node, item_arrays, self._expression, f"new_{kind}", self)
        if item._loops:
            # It takes slices.
            targets, lines = [item_arrays], item.lines
        else:
            targets, lines = item._segments[0][1], item._body
        head, tail = ("for (", ")") if len(targets) > 1 else ("for ", "")
        source, n_arrays = arrays, item._taken
        if n_arrays > 1:
            iterator = f"{names.named(iter)}({arrays})"
            source = f"{names.named(zip)}(*[{iterator}] * {n_arrays})"
        self.helpers += [
            f"def {make}({arrays}):",
            f"    {items} = []",
            *indented(wrapped(head, targets, f"{tail} in {source}:")),
            *indented(lines, 2),
            f"        {items}.append({item.result})",
            f"    return {items}",
            "",
        ]
        return make, n_arrays

    def _static(self, node: Constant | GivenStatic, hint: str) -> str:
        if isinstance(node, GivenStatic):
            return self._expression(node.position)
        value = node.value
        if value is None or value is True or value is False:
            return repr(value)
        return self._names.constant(hint, value)

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

    def _brackets(self, node: Output, hint: str) -> tuple[str, list[str], str]:
        """Return the source around the items of a node, and theirs."""
        names = self._names
        if isinstance(node, MakeDict):
            items = self._labelled(node.items, node.keys, hint)
            keys = [names.key(f"{hint}_key", key) for key in node.keys]
            return "{", [f"{k}: {c}" for k, c in zip(keys, items, strict=True)], "}"
        if isinstance(node, MakeNamedTuple):
            items = self._labelled(node.items, getattr(node.cls, "_fields", ()), hint)
            cls = names.named(node.cls)
            if not node.is_standard:
                return f"{cls}(", items, ")"
            return f"{names.constant('new_tuple', tuple.__new__)}({cls}, (", items, "))"
        assert isinstance(node, Unflatten | UnflattenGiven)
        items = self._labelled(node.items, node.labels, hint)
        if isinstance(node, UnflattenGiven):
            unflatten = names.constant("unflatten", unflatten_node)
            cls = names.named(node.cls)
            return f"{unflatten}({cls}, {self._metadata(node.data)}, [", items, "])"
        # Not the bound method: Python's garbage collector can't see through jaxlib's.
        unflatten = functools.partial(type(node.treedef).unflatten, node.treedef)
        return f"{names.constant(f'unflatten_{hint}', unflatten)}([", items, "])"

    def _labelled(self, nodes: list[Output], labels: Iterable[Any], hint: str) -> list[str]:
        return [
            self._build(node, f"{hint}_{label}") for node, label in zip(nodes, labels, strict=True)
        ]

    def _module(self, node: MakeModule, hint: str) -> str:
        names = self._names
        dynamic, static = node.fields[: node.n_dynamic], node.fields[node.n_dynamic :]
        values = [(field, self._build(child, f"{hint}_{field}")) for field, child in dynamic]
        name = names.variable(hint)
        cls = names.named(node.cls)
        values += [(field, self._build(child, f"{hint}_{field}")) for field, child in static]
        if node.plain is not None:
            self._body.append(f"{name} = {names.constant('Fields', node.plain)}()")
            self._body += [f"{name}.{field} = {value}" for field, value in values]
            self._body.append(f"{name}.__class__ = {cls}")
            return name
        fields = names.variable(f"{hint}_fields")
        self._body.append(f"{name} = {names.constant('new_object', object.__new__)}({cls})")
        self._body.append(f"{fields} = {names.constant('fields_of', fields_of)}({name})")
        self._body += [f"{fields}[{field!r}] = {value}" for field, value in values]
        return name

    def _metadata(self, data: GivenStatic | Sequence[Constant | GivenStatic]) -> str:
        if isinstance(data, GivenStatic):
            return self._expression(data.position)
        assert isinstance(data, Sequence)
        parts = [
            self._expression(part.position)
            if isinstance(part, GivenStatic)
            else self._names.constant("part", part.value)
            for part in data
        ]
        source = f"[{', '.join(parts)}]"
        if type(data) is tuple:
            return f"{self._names.named(tuple)}({source})"
        return source


def _class_of(node: Output) -> type:
    """Return the class of what a node makes."""
    if isinstance(node, MakeDict):
        return dict
    if isinstance(node, Unflatten):
        return node.treedef.node_data()[0]
    assert isinstance(node, MakeSequence | MakeNamedTuple | MakeModule | UnflattenGiven)
    return node.cls
