"""Compares what two traces were made for, and says in the user's names how they differ."""

import collections
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .._places import Place, is_public
from . import advice
from .advice import Change
from .description import LONG_TEXT, ArrayPart, Description, Part, Row, array_text

FUNCTION = "function defined again"
CALLABLE = "another callable"

#: What JAX sees of arrays; all else is the static half of a call.
OF_ARRAYS = ("shape", "dtype", "weak type", "sharding or device")

_PLURALS = {
    "shape": "shapes",
    "dtype": "dtypes",
    "weak type": "weak types",
    "sharding or device": "shardings or devices",
}
# The name of the argument at the beginning of a path.
_ROOT = re.compile(r"[^.\[ ]*")

# What is spelled out: differences, as a new model may differ in every array; and parts.
_MAX_SHOWN = 8
_MAX_PARTS = 4


class Difference(NamedTuple):
    """One way in which a trace differs from an earlier one.

    - `category`: which kind of difference: `"shape"`, `"dtype"`, `"weak type"`, `"sharding or
        device"`, `"static value changed"`, `"static where an array was"`, `"an array where a static
        value was"`, `"structure changed"`, `"argument newly passed or left out"`,
        `"configuration changed"`, `"cache evicted or cleared"`, `"function defined again"`,
        `"another callable"` or `"unknown"`.
    - `path`: where, in the user's names, such as `model.layers[0].activation`.
    - `old`, `new`: what was there, and what is there now.
    - `remedy`: what to do about it, if anything; else empty.
    """

    category: str
    path: str
    old: str
    new: str
    remedy: str = ""

    def __str__(self) -> str:
        if not self.path:
            return f"{self.category}: {self.new}"
        if not self.old:
            return f"{self.category}: {self.new} in `{self.path}`"
        if self.old == self.new:
            return f"{self.category}: `{self.path}` is another {self.new}"
        return f"{self.category}: `{self.path}` was {self.old}, is {self.new}"

    @property
    def cause(self) -> str:
        """The cause, as it is counted over several traces."""
        return f"{self.category}: {self.path or self.new}"


def causes_of(differences: Iterable[Difference]) -> dict[str, Difference]:
    """Return what caused a trace, as it is counted over several traces, each with an example.

    Many arrays that differ alike have one cause, such as a batch of another size.
    """
    causes: dict[str, Difference] = {}
    for several in _by_category(differences):
        if len(several) > _MAX_PARTS:
            causes[f"{_PLURALS[several[0].category]} of {_arrays(several)}"] = several[0]
        else:
            causes |= {each.cause: each for each in several}
    return causes


def _by_category(differences: Iterable[Difference]) -> list[list[Difference]]:
    """Return differences in groups: those of arrays of one category together, others alone."""
    groups: dict[Any, list[Difference]] = {}
    for number, each in enumerate(differences):
        groups.setdefault(each.category if each.category in OF_ARRAYS else number, []).append(each)
    return [*groups.values()]


def _arrays(several: list[Difference]) -> str:
    """Return how many arrays differ, and in which arguments: `36 arrays in `model`, `state``."""
    roots = [*dict.fromkeys(_ROOT.match(each.path)[0] for each in several)]  # type: ignore[index]
    shown = [f"`{root}`" for root in roots[:_MAX_PARTS]]
    return f"{len(several)} arrays in {', '.join(shown)}{', ...' * (len(roots) > _MAX_PARTS)}"


def listed(differences: Iterable[Difference], with_remedies: bool = False) -> list[str]:
    """Return one line per kind of difference, at most `_MAX_SHOWN` of them.

    With `with_remedies`, a line is followed by its remedy.
    """
    lines: list[tuple[str, str]] = []
    alike: dict[tuple[str, str, str], list[Difference]] = collections.defaultdict(list)
    for several in _by_category(differences):
        kinds = {(each.old, each.new) for each in several}
        if len(kinds) > _MAX_PARTS:
            first = several[0]
            line = f"{first.category}: {_arrays(several)}, such as {str(first).partition(': ')[2]}"
            lines.append((line, first.remedy if with_remedies else ""))
            continue
        for each in several:
            alike[each.category, each.old, each.new].append(each)
    for first, *others in list(alike.values())[:_MAX_SHOWN]:
        line = str(first)
        if others:
            line += f" (and {len(others)} more: {', '.join(f'`{d.path}`' for d in others[:3])}"
            line += ", ...)" if len(others) > 3 else ")"
        lines.append((line, first.remedy if with_remedies else ""))
    if len(alike) > _MAX_SHOWN:
        lines.append((f"and {len(alike) - _MAX_SHOWN} more", ""))
    return with_remedies_once(lines)


def with_remedies_once(lines: Iterable[tuple[str, str]]) -> list[str]:
    """Return each line with its remedy below it, unless an earlier line has the same remedy."""
    texts: list[str] = []
    remedies = {""}
    for line, remedy in lines:
        texts.append(line if remedy in remedies else f"{line}\n    {remedy}.")
        remedies.add(remedy)
    return texts


def _all_changes(old: Description, new: Description) -> list[tuple[Row, Any, Any]]:
    """Return each part that differs: its row, what was there, and what is there now."""
    old_parts, new_parts = ({row.path: row.part for row in rows} for rows in (old, new))
    changed = [row for row in new if old_parts.get(row.path) != row.part]
    changed += [row for row in old if row.path not in new_parts]
    # An object that compares by identity is the same one. What changed in it retraces nothing.
    alone = {r.path for row in changed for r in row.around if r.part.compares_by_identity}
    same = {path for path in alone if old_parts.get(path) == new_parts.get(path)}
    return [
        (row, old_parts.get(row.path), new_parts.get(row.path))
        for row in changed
        if same.isdisjoint([each.path for each in row.around])
    ]


def distance(old: Description, new: Description) -> int:
    """Return in how many parts two descriptions differ, those in nodes that differ included."""
    return len(_all_changes(old, new))


def _changes(old: Description, new: Description, place: Place | None) -> list[Change]:
    """Return the parts that differ. A node that was replaced stands for all parts in it."""
    changes: list[Change] = []
    another: set[str] = set()
    of_user = place is None or place.is_users
    of_public = place is not None and is_public(place)
    for row, was, is_now in _all_changes(old, new):
        change = Change(row, was, is_now, of_user, of_public)
        if another.isdisjoint([each.path for each in row.around]):
            changes.append(change)
            if not change.is_alike:
                another.add(row.path)
    # What differs in an object tells more than that it is a different object.
    explained = {row.path for c in changes if not c.is_remade for row in c.row.around}
    return [c for c in changes if not (c.is_alike and c.row.path in explained)]


def _category(change: Change) -> str:
    old, new = change.old, change.new
    if not change.row.around and None in (old, new):
        return "argument newly passed or left out"
    # A dataclass is a leaf to JAX, though its parts are described.
    if any(part is None or (part.is_node and not part.is_opaque) for part in (old, new)):
        return "structure changed"
    if isinstance(old, Part):
        is_array = isinstance(new, ArrayPart)
        return "an array where a static value was" if is_array else "static value changed"
    if isinstance(new, Part):
        return "static where an array was"
    return "shape" if old.shape != new.shape else "dtype"


def differences(old: Description, new: Description, place: Place | None = None) -> list[Difference]:
    """Return how a description differs from an older one.

    `place` is where the called function is defined. Without it, both describe trees of the user's.
    """
    groups: dict[str, tuple[Row, list[Change]]] = {}
    for change in _changes(old, new, place):
        row = _told_with(change)
        groups.setdefault(row.path, (row, []))[1].append(change)
    found: list[Difference] = []
    for row, changes in groups.values():
        is_one = changes[0].is_remade or len(changes) >= _MAX_PARTS
        if is_one and row is not changes[0].row:
            found.append(_of_many(row, changes))
        else:
            found += [each for change in changes for each in _of_one(change)]
    return found


def _told_with(change: Change) -> Row:
    """Return the row that a change is reported under, together with others of the same cause.

    For a recreated object that is the library's object around it, and for a static value the
    outermost container around it. Otherwise it is the row of the change itself.
    """
    if change.is_remade:
        return change.row if change.new.is_users else change.owner or change.row
    rows = itertools.takewhile(lambda row: row.part.nature == "container", change.row.around)
    is_value = _category(change) == "static value changed"
    return [change.row, *rows][-1] if is_value else change.row


def _of_many(row: Row, changes: list[Change]) -> Difference:
    first = changes[0]
    if first.is_remade:
        parts = [f"`{change.row.path[len(row.path) :]}`" for change in changes]
        parts[_MAX_PARTS:] = ["..."] * (len(parts) > _MAX_PARTS)
        old = new = f"{row.part}, recreated: {', '.join(parts)}"
        remedy = advice.for_change(first, "static value changed")
    else:
        are_numbers = all(change.new.nature == "number" for change in changes)
        old, new = "", f"{len(changes)} {'numbers' if are_numbers else 'values'}"
        remedy = advice.for_change(first._replace(row=row), "numbers") if are_numbers else ""
    return Difference("static value changed", row.name, old, new, remedy)


def _of_one(change: Change) -> Iterator[Difference]:
    old, new = change.old, change.new
    if isinstance(old, ArrayPart) and isinstance(new, ArrayPart):
        found = _of_arrays(old, new)
    else:
        found = [(_category(change), *_texts_apart(old, new))]
    for category, was, is_now in found:
        remedy = advice.for_change(change, category)
        yield Difference(category, change.row.name, was, is_now, remedy)


def of_functions(old: Description, new: Description, place: Place) -> list[Difference]:
    """Return how the function under a wrapper differs from the one that was traced before it."""
    # A line in a library is no help.
    where = f" ({place.site})" if place.site and place.is_users else ""
    category, another = CALLABLE, f"a different object of `{place.qualname}`{where}"
    # What is innermost in Equinox's wrappers, or else such a wrapper.
    part = [row.part for row in new if not row.name][-1]
    by_identity = {
        "partial": f"another {part.text}",
        "instance": f"another `{part.kind}`",
        "method": f"`{part.text}` of another `{part.kind}`",
    }
    if part.nature in by_identity:
        another = f"{by_identity[part.nature]}, which compares by identity,"
    elif part.nature == "transformed":
        another = f"another {part.text}{where}"
    elif part.kind == "function" and "<" in place.qualname:
        # A function at module level exists once. Only a decorator makes a new function around it.
        category, another = FUNCTION, f"another function made of the same code{where}"
    return [
        each._replace(category=CALLABLE)
        if each.path
        else Difference(category, "", "", f"{another} was traced before", each.remedy)
        for each in differences(old, new, place)
    ]


def _texts_apart(old: Any, new: Any) -> tuple[str, str]:
    """Return the texts of two parts, with more details if these are equal."""
    was, is_now = ["absent" if part is None else str(part) for part in (old, new)]
    if was == is_now and old.is_node:
        was = is_now = f"{was} (another class of that name)"
    elif was == is_now and old.text != new.text:
        # Both are long: from a little before the first character that differs.
        pairs = zip(old.text, new.text, strict=False)
        n_alike = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
        start = n_alike - LONG_TEXT // 4
        stop = start + LONG_TEXT
        was, is_now = [f"...{p.text[start:stop]}{'...' * (stop < len(p.text))}" for p in (old, new)]
    return was, is_now


def _of_arrays(old: ArrayPart, new: ArrayPart) -> Iterator[tuple[str, str, str]]:
    """Yield the category and both texts of each difference between two arrays."""
    if old.shape != new.shape:
        yield "shape", array_text(old.dtype, old.shape), array_text(new.dtype, new.shape)
    if old.dtype != new.dtype:
        yield "dtype", old.dtype, new.dtype
    elif old.weak_type != new.weak_type:
        was, is_now = [f"{p.dtype}{' of weak type' * p.weak_type}" for p in (old, new)]
        yield "weak type", was, is_now
    if old.placement != new.placement:
        was, is_now = [part.placement or "where JAX put it" for part in (old, new)]
        yield "sharding or device", was, is_now
