"""Writes how a specialised call takes its arguments: the guards, and their arrays."""

import operator

from jax.tree_util import default_registry

from .._code.source import indented, wrapped
from .._code.text import short
from .._compat import ArrayImpl, fields_of
from .._trees.constants import CONSTANTS, is_same, is_told_by_equality
from .._trees.key_cache import has_key
from .._trees.numpy_inputs import is_plain_array
from .._trees.static_key import is_same_opaque
from .names import Constants
from .plan import (
    Array,
    CallPlan,
    Fields,
    InnerInput,
    Input,
    Mapping,
    Match,
    Passed,
    Registered,
    Repeat,
    Sequence,
    Static,
    StaticRun,
    n_arrays,
)
from .signature import absent

# A longer one is broken at its `or`.
_LONGEST_CONDITION = 72

# So many are faster added to a list one by one than together.
_FEW_ARRAYS = 4

# One object, and so one name: it is made anew wherever it is read.
_flatten_one_level = default_registry.flatten_one_level


class GuardSource:
    """The source of the guards, and of the arrays, of a call's arguments.

    - `guards`: the conditions, each as its alternatives (joined by `or`), and comments.
    - `arrays`: the flat arrays, as arguments of the jitted function; the first `n_first` of these
        are the first positional argument's.
    - `helpers`: functions that the guards call.
    - `sources`: by the `id` of a node that isn't read in a loop, the expression that gives it.
    - `below`: likewise, the variable with the fields of a Module, or the parts of another node.
    """

    __slots__ = (
        "_argument",
        "_found",
        "_loop",
        "_n_constants",
        "_names",
        "_own",
        "_readers",
        "_seen",
        "arrays",
        "below",
        "guards",
        "helpers",
        "n_first",
        "sources",
    )

    def __init__(
        self, plan: CallPlan, names: Constants, own: tuple[str, str] | None, seen: str | None
    ):
        """
        **Arguments:**

        - `own`: the names of the functions that copy a NumPy array, and a list of arrays; None to
            pass them as they are.
        - `seen`: the name of the dict of the static objects looked at; None to look again at each.
        """
        self._names = names
        self._own = own
        #: Passed on by readers, and to `has_key`.
        self._seen = f", {seen}" if seen else ""
        self.guards: list[tuple[str, ...]] = []
        #: How many of them, the first, are of arguments that are constants.
        self._n_constants = 0
        self.arrays: list[str] = []
        self.n_first = 0
        self.helpers: list[str] = []
        self.sources: dict[int, str] = {}
        self.below: dict[int, str] = {}
        #: The helpers that read runs of equal items, by the `id` of what they read.
        self._readers: dict[int, str] = {}
        #: The loop that is being written, if one is.
        self._loop: _Loop | None = None
        #: The argument that is being read, and the list that holds the arrays of its last run.
        self._argument = ""
        self._found: str | None = None
        self._read_arguments(plan)

    def _read_arguments(self, plan: CallPlan) -> None:
        # Arrays come in the order of `(args, kwargs)`, that is, keyword arguments sorted by name.
        by_keyword: dict[str, list[str]] = {}
        kwargs = dict(plan.kwargs)
        for index, name, passed in plan.parameters():
            if passed is Passed.BY_POSITION:
                self._read_positional(index, name, plan.args[index], name)
            elif passed is Passed.BY_NAME:
                arrays = by_keyword[name] = []
                self._read_argument(name, kwargs.pop(name), name, arrays)
            elif passed is Passed.EXTRA:
                extra = plan.args[index:]
                self._guard(f"# *{name}: {len(extra)} given")
                self._guard(f"{self._names.named(len)}({name}) == {len(extra)}")
                for position, node in enumerate(extra):
                    self._read_positional(
                        index + position, f"{name}[{position}]", node, f"{name}_{position}"
                    )
            elif passed is Passed.MORE:
                self._guard(f"# **{name}: {len(kwargs)} given")
                self._guard(f"{self._names.named(len)}({name}) == {len(kwargs)}")
                for key, node in kwargs.items():
                    arrays = by_keyword[key] = []
                    self._read_argument(f"{name}[{key!r}]", node, f"{name}_{key}", arrays)
            else:
                self._guard(f"# {name}: left out")
                self._guard(f"{name} is {self._names.constant('absent', absent)}")
        for key in sorted(by_keyword):
            self.arrays += by_keyword[key]

    def _read_positional(self, index: int, source: str, node: Input, hint: str) -> None:
        self._read_argument(source, node, hint, self.arrays)
        if index == 0:
            self.n_first = len(self.arrays)

    def _read_argument(self, source: str, node: Input, hint: str, arrays: list[str]) -> None:
        at = len(self.guards)
        self._argument, self._found = hint, None
        self.guards.append((f"# {source}: {_describe(node)}",))
        self._read(node, source, hint, arrays)
        if source.isidentifier() and isinstance(node, Static) and type(node.value) in CONSTANTS:
            # Before all others: it may spare a look into those.
            own = self.guards[at:]
            del self.guards[at:]
            self.guards[self._n_constants : self._n_constants] = own
            self._n_constants += len(own)

    # --- One node -----------------------------------------------------------------------------

    def _read(self, node: Input, source: str, hint: str, arrays: list[str]) -> None:
        """Guard the object that the expression `source` gives, and collect its arrays."""
        if self._loop is None:
            self.sources[id(node)] = source
        if isinstance(node, Array):
            arrays.append(self._read_array(source, hint))
        elif isinstance(node, Static):
            self._guard(*self._static_guard(source, node, hint))
            if node.may_become_node:
                self._guard(f"{self._names.named(_flatten_one_level)}({source}) is None")
        elif isinstance(node, Sequence):
            self._read_sequence(node, source, hint, arrays)
        elif isinstance(node, Mapping):
            self._read_mapping(node, source, hint, arrays)
        elif isinstance(node, Fields):
            self._read_fields(node, source, hint, arrays)
        elif isinstance(node, Registered):
            self._read_registered(node, source, hint, arrays)

    def _read_array(self, source: str, hint: str) -> str:
        name, first_use = self._named(source, hint)
        is_array = self._names.constant("is_array", is_plain_array)
        otherwise = f"{is_array}({name})"
        if self._own is not None:
            # Only what is an array: a parameter goes on to the next call if the guards don't hold.
            otherwise += f"\nand ({name} := {self._own[0]}({name})) is not None"
        array = self._names.constant("Array", ArrayImpl)
        self._guard(f"{self._names.named(type)}({first_use}) is {array}", otherwise)
        return name

    def _read_sequence(self, node: Sequence, source: str, hint: str, arrays: list[str]) -> None:
        name = self._guard_type(node.cls, source, hint)
        self._guard(f"{self._names.named(len)}({name}) == {node.n}")
        labels = getattr(node.cls, "_fields", range(node.n))
        index = 0
        for item in node.items:
            if not isinstance(item, StaticRun | Repeat):
                self._read(item, f"{name}[{index}]", f"{hint}_{labels[index]}", arrays)
                index += 1
                continue
            items = name if item.n == node.n else f"{name}[{index}:{index + item.n}]"
            index += item.n
            if isinstance(item, StaticRun):
                self._read_static_run(item, items, hint)
            elif isinstance(item.item, Array):
                self._read_array_run(items, hint, arrays)
            else:
                self._read_run(item.item, items, arrays)

    def _read_array_run(self, items: str, hint: str, arrays: list[str]) -> None:
        name = self._names.variable(f"{hint}_arrays")
        only_arrays = self._names.constant("only_arrays", _ONLY_ARRAYS)
        mapped = self._names.named(map)
        if self._own is not None:
            otherwise = f"({name} := {self._own[1]}({name})) is not None"
        else:
            is_array = self._names.constant("is_array", is_plain_array)
            otherwise = f"{self._names.named(all)}({mapped}({is_array}, {name}))"
        self._guard(
            f"{{*{mapped}({self._names.named(type)}, {name} := {items})}} == {only_arrays}",
            otherwise,
        )
        arrays.append(f"*{name}")

    def _read_static_run(self, run: StaticRun, items: str, hint: str) -> None:
        """Compare numbers and texts with those of the trace in a few C calls."""
        name = self._names.variable(f"{hint}_values")
        expected = self._names.constant(name, run.values)
        mapped, same = self._names.named(map), self._names.constant("is_", operator.is_)
        identical = f"{self._names.named(all)}({mapped}({same}, {name} := {items}, {expected}))"
        if all(map(is_told_by_equality, run.values)):
            kinds = self._names.constant(f"{hint}_types", [*map(type, run.values)])
            of_types = f"[*{mapped}({self._names.named(type)}, {name})] == {kinds}"
            equal = f"{of_types}\nand {self._names.named(tuple)}({name}) == {expected}"
        else:
            equal = self._same(f"{self._names.named(tuple)}({name})", expected)
        self._guard(identical, equal)

    def _read_run(self, item: Input, items: str, arrays: list[str]) -> None:
        """Read equal items in a loop, in a function that serves all runs of such items."""
        read = self._readers.get(id(item))
        if read is None:
            read = self._readers[id(item)] = self._define_reader(item)
        if self._loop is not None:
            # Inside another loop: the arrays go into the same list, in their order.
            found = self._loop.found
            if arrays:
                self._loop.end_step(self.guards, arrays)
        elif self._found is not None and arrays[-1:] == [f"*{self._found}"]:
            # Run after run into one list, which then need not be joined with others.
            found = self._found
        else:
            self._found = self._names.variable(f"{self._argument}_arrays")
            found = f"{self._found} := []"
            arrays.append(f"*{self._found}")
        self._guard(f"{read}({items}, {found}{self._seen})")

    def _define_reader(self, node: Input) -> str:
        names, cls = self._names, _class_of(node)
        kind = cls.__name__.lower()
        read, items = names.helper("read", cls), names.variable(f"{kind}s")
        each, found = names.variable(f"each_{kind}"), names.variable(f"found_in_{kind}s")
        outer, self.guards, self._loop = (self.guards, self._loop), [], _Loop(found)
        arrays: list[str] = []
        self._read(node, each, each, arrays)
        self._loop.end_step(self.guards, arrays)
        body = self._loop.body
        self.guards, self._loop = outer
        self.helpers += [
            f"def {read}({items}, {found}{self._seen}):",
            f"    # Each: {_describe(node)}",
            f"    for {each} in {items}:",
            *indented(body, 2),
            "    return True",
            "",
        ]
        return read

    def _read_mapping(self, node: Mapping, source: str, hint: str, arrays: list[str]) -> None:
        name, keys = self._guard_type(node.cls, source, hint), node.keys
        if node.cls is dict:
            self._guard(f"{self._names.named(len)}({name}) == {len(keys)}")
        if node.key_types is not None:
            expected = self._names.constant(f"{hint}_key_types", node.key_types)
            mapped = f"{self._names.named(map)}({self._names.named(type)}, {name})"
            self._guard(f"{{*{mapped}}} == {expected}")
        for key, child in zip(keys, node.items, strict=True):
            source = f"{name}[{self._names.key(f'{hint}_key', key)}]"
            self._read(child, source, f"{hint}_{key}", arrays)
        if node.known_keys is not None:
            # In the end: a key that isn't there is found sooner.
            match = self._names.constant(f"{hint}_keys_match", node.known_keys.match)
            self._guard(f"{match}({name})")

    def _read_fields(self, node: Fields, source: str, hint: str, arrays: list[str]) -> None:
        name = self._guard_type(node.cls, source, hint)
        fields = self._names.variable(f"{hint}_fields")
        n_fields = len(node.dynamic) + len(node.static)
        read = self._names.constant("fields_of", fields_of)
        if self._loop is None:
            self.below[id(node)] = fields
        self._guard(f"{self._names.named(len)}({fields} := {read}({name})) == {n_fields}")
        for field, static in node.static:
            self._guard(*self._static_guard(f"{fields}[{field!r}]", static, f"{hint}_{field}"))
        for field, child in zip(node.dynamic, node.items, strict=True):
            self._read(child, f"{fields}[{field!r}]", f"{hint}_{field}", arrays)

    def _read_registered(self, node: Registered, source: str, hint: str, arrays: list[str]) -> None:
        """Read any other node through JAX's registry, one level deep."""
        name = self._guard_type(node.cls, source, hint)
        parts = self._names.variable(f"{hint}_parts")
        children = self._names.variable(f"{hint}_children")
        if self._loop is None:
            self.below[id(node)] = parts
        self._guard(f"({parts} := {self._names.named(_flatten_one_level)}({name}))")
        self._guard(*self._static_guard(f"{parts}[1]", node.data, f"{hint}_data"))
        self._guard(
            f"{self._names.named(len)}({children} := {self._names.named(tuple)}({parts}[0]))"
            f" == {len(node.items)}"
        )
        for index, child in enumerate(node.items):
            self._read(child, f"{children}[{index}]", f"{hint}_{index}", arrays)

    # --- Parts of conditions ------------------------------------------------------------------

    def _static_guard(self, source: str, static: Static, hint: str) -> tuple[str, ...]:
        """Return the condition, as its alternatives."""
        value, match = static.value, static.match
        kind = type(value)
        if value is None or kind is bool:
            return (f"{source} is {value}",)
        if match is Match.IS:
            hint = f"int_{value}" if kind is int else hint
            return (f"{source} is {self._names.constant(hint, value)}",)
        constant = self._names.constant(hint, value)
        if match is Match.OPAQUE:
            same, hashed = self._names.named(is_same_opaque), self._names.named(hash)
            return (f"{same}({source}, {constant}, {hashed}({source}), {static.key})",)
        if match is Match.KEY:
            key = self._names.constant(f"{hint}_key", static.key)
            name, first_use = self._named(source, hint)
            of_kind = f"{self._names.named(type)}({first_use}) is {self._names.named(kind)}"
            # To make the key of an array, say, would take long.
            self._guard(of_kind)
            return (f"{self._names.named(has_key)}({name}, {key}{self._seen})",)
        name, first_use = self._named(source, hint)
        identical = f"({first_use}) is {constant}" if name != source else f"{name} is {constant}"
        of_kind = f"{self._names.named(type)}({name}) is {self._names.named(kind)}"
        if match is Match.IS_OR_KEY:
            key = self._names.constant(f"{hint}_key", static.key)
            same = f"{self._names.named(has_key)}({name}, {key})"
        elif kind in CONSTANTS and is_told_by_equality(value):
            same = f"{name} == {constant}"
        else:
            same = self._same(name, constant)
        return (identical, f"{of_kind}\nand {same}")

    def _same(self, source: str, constant: str) -> str:
        return f"{self._names.constant('is_same', is_same)}({source}, {constant})"

    def _guard_type(self, cls: type, source: str, hint: str) -> str:
        name, first_use = self._named(source, hint)
        self._guard(f"{self._names.named(type)}({first_use}) is {self._names.named(cls)}")
        return name

    def _named(self, source: str, hint: str) -> tuple[str, str]:
        """Return a variable for what an expression gives, and the expression at its first use."""
        if source.isidentifier():
            return source, source
        name = self._names.variable(hint)
        return name, f"{name} := {source}"

    def _guard(self, *alternatives: str) -> None:
        """Add a condition, as its alternatives, or a comment."""
        self.guards.append(alternatives)

    def _comment(self, text: str) -> None:
        self.guards.append((f"# {text}",))


class _Loop:
    """The body of a loop over equal items: guards on an item, its arrays, further guards, ...

    - `found`: the variable that holds the list to which the arrays are added.
    - `body`: the lines.
    """

    __slots__ = ("body", "found")

    def __init__(self, found: str):
        self.found = found
        self.body: list[str] = []

    def end_step(self, guards: list[tuple[str, ...]], arrays: list[str]) -> None:
        """Write the guards so far, and what adds the arrays so far; both lists are emptied."""
        self.body += ["if not (", *indented(conditions(guards)), "):", "    return False"]
        if len(arrays) <= _FEW_ARRAYS and not any(array.startswith("*") for array in arrays):
            self.body += [f"{self.found}.append({array})" for array in arrays]
        else:
            self.body += wrapped(f"{self.found} += (", arrays, ")")
        guards.clear()
        arrays.clear()


_ONLY_ARRAYS = {ArrayImpl}


def conditions(guards: list[tuple[str, ...]]) -> list[str]:
    """Guard and comments as the lines of one condition."""
    lines: list[str] = []
    joined = ""
    for alternatives in guards:
        if alternatives[0].startswith("#"):
            lines.append(alternatives[0])
            continue
        if len(alternatives) == 1:
            lines.append(joined + alternatives[0])
        else:
            first, *others = alternatives
            on_one_line = f"{joined}({' or '.join(alternatives)})".replace("\n", " ")
            if len(on_one_line) <= _LONGEST_CONDITION:
                lines.append(on_one_line)
            else:
                broken = [first, *[f"or {other}" for other in others]]
                lines += [f"{joined}(", *indented("\n".join(broken).split("\n")), ")"]
        joined = "and "
    return lines


def _describe(node: Input) -> str:
    if isinstance(node, Array):
        return "an array"
    if isinstance(node, Static):
        return f"static, {short(node.value, 60)}"
    count = n_arrays(node)
    return f"{_class_of(node).__name__} with {count} array{'' if count == 1 else 's'}"


def _class_of(node: Input) -> type:
    assert isinstance(node, InnerInput)
    return node.cls
