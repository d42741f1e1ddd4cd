"""Compares the descriptions of two traced calls, and says in the user's names how they differ."""

import collections
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .._places import Place, is_public
from . import advice
from .advice import Change
from .description import LONG_TEXT, ArrayPart, Description, Part, Row, array_text

# Categories of differences between the functions of two wrappers.
_FUNCTION = "function defined again"
_CALLABLE = "another callable"

#: The categories of differences between arrays. All other categories concern static values.
OF_ARRAYS = ("shape", "dtype", "weak type", "sharding or device")

_PLURALS = {
    "shape": "shapes",
    "dtype": "dtypes",
    "weak type": "weak types",
    "sharding or device": "shardings or devices",
}
_DEFAULT_DEVICE = "JAX's default device"

# The name of the argument at the beginning of a path.
_ROOT = re.compile(r"[^.\[ ]*")

# The number of lines of an explanation is bounded, because a new model may differ in every array.
# If about `_MAX_PARTS` parts or more differ alike, they are summed up in one line.
_MAX_SHOWN = 8
_MAX_PARTS = 4


class Difference(NamedTuple):
    """One way in which a trace differs from an earlier one.

    - `category`: the kind of difference: `"shape"`, `"dtype"`, `"weak type"`, `"sharding or
        device"`, `"static value changed"`, `"static where an array was"`, `"an array where a static
        value was"`, `"structure changed"`, `"argument newly passed or left out"`,
        `"configuration changed"`, `"cache evicted or cleared"`, `"function defined again"`,
        `"another callable"` or `"unknown"`.
    - `path`: the place in the arguments, in the user's names, such as `model.layers[0].activation`.
    - `old`: what was there in the earlier trace.
    - `new`: what is there in the later trace.
    - `remedy`: what to do about the difference; empty if there is nothing to do.
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
            return f"{self.category}: `{self.path}` is a different {self.new}"
        on = "on " if self.category == "sharding or device" else ""
        return f"{self.category}: `{self.path}` was {on}{self.old}, is {on}{self.new}"

    @property
    def cause(self) -> str:
        """The category and the path, by which causes are counted over several traces."""
        return f"{self.category}: {self.path or self.new}"


def causes_of(differences: Iterable[Difference]) -> dict[str, Difference]:
    """Return the causes of a trace, each with one of its differences as an example.

    A cause has the same name in all traces, so that causes can be counted. Many arrays that differ
    in the same way, for example because the batch size changed, share one cause.
    """
    causes: dict[str, Difference] = {}
    for group in _grouped(differences):
        if len(group) > _MAX_PARTS:
            causes[f"{_PLURALS[group[0].category]} of {_arrays_text(group)}"] = group[0]
        else:
            causes |= {each.cause: each for each in group}
    return causes


def _grouped(differences: Iterable[Difference]) -> list[list[Difference]]:
    """Return differences in groups.

    All arrays that differ in one category are a group. Any other difference is a group by itself.
    """
    groups: dict[Any, list[Difference]] = {}
    for number, each in enumerate(differences):
        key = each.category if each.category in OF_ARRAYS else number
        groups.setdefault(key, []).append(each)
    return [*groups.values()]


def _arrays_text(group: list[Difference]) -> str:
    """Return how many arrays differ, and in which arguments: ``36 arrays in `model`, `state` ``."""
    roots = [*dict.fromkeys(_ROOT.match(each.path)[0] for each in group)]  # type: ignore[index]
    shown = [f"`{root}`" for root in roots[:_MAX_PARTS]]
    if len(roots) > _MAX_PARTS:
        shown.append("...")
    return f"{len(group)} arrays in {', '.join(shown)}"


def listed(differences: Iterable[Difference], with_remedies: bool = False) -> list[str]:
    """Return one line per kind of difference, at most `_MAX_SHOWN` of them.

    With `with_remedies`, a line is followed by its remedy.
    """
    lines: list[tuple[str, str]] = []
    alike: dict[tuple[str, str, str], list[Difference]] = collections.defaultdict(list)
    for group in _grouped(differences):
        values = {(each.old, each.new) for each in group}
        if len(values) > _MAX_PARTS:
            first = group[0]
            example = str(first).partition(": ")[2]
            lines.append(
                (f"{first.category}: {_arrays_text(group)}, such as {example}", first.remedy)
            )
        else:
            for each in group:
                alike[each.category, each.old, each.new].append(each)
    for first, *others in list(alike.values())[:_MAX_SHOWN]:
        line = str(first)
        if others:
            paths = [f"`{each.path}`" for each in others[:3]]
            if len(others) > 3:
                paths.append("...")
            line += f" (and {len(others)} more: {', '.join(paths)})"
        lines.append((line, first.remedy))
    if len(alike) > _MAX_SHOWN:
        lines.append((f"and {len(alike) - _MAX_SHOWN} more", ""))
    return with_remedies_once(lines) if with_remedies else [line for line, _ in lines]


def with_remedies_once(lines: Iterable[tuple[str, str]]) -> list[str]:
    """Return each line with its remedy below it, unless an earlier line has the same remedy.

    `lines` are pairs of a line and a remedy, which may be empty.
    """
    texts: list[str] = []
    remedies = {""}
    for line, remedy in lines:
        texts.append(line if remedy in remedies else f"{line}\n    {remedy}.")
        remedies.add(remedy)
    return texts


def _changed_rows(old: Description, new: Description) -> list[tuple[Row, Any, Any]]:
    """Return each part that differs: its row, the old part, and the new part.

    A part that is absent is `None`.
    """
    old_parts = {row.path: row.part for row in old}
    new_parts = {row.path: row.part for row in new}
    changed = [row for row in new if old_parts.get(row.path) != row.part]
    changed += [row for row in old if row.path not in new_parts]
    # If an object that compares by identity is the same object, a change in it causes no trace.
    by_identity = {r.path for row in changed for r in row.around if r.part.compares_by_identity}
    same_objects = {path for path in by_identity if old_parts.get(path) == new_parts.get(path)}
    return [
        (row, old_parts.get(row.path), new_parts.get(row.path))
        for row in changed
        if same_objects.isdisjoint([each.path for each in row.around])
    ]


def distance(old: Description, new: Description) -> int:
    """Return in how many parts two descriptions differ, counting the parts of replaced nodes."""
    return len(_changed_rows(old, new))


def _changes(old: Description, new: Description, place: Place | None) -> list[Change]:
    """Return the parts that differ. A node that was replaced stands for all parts in it."""
    changes: list[Change] = []
    replaced: set[str] = set()
    is_users_function = place is None or place.is_users
    is_public_function = place is not None and is_public(place)
    for row, old_part, new_part in _changed_rows(old, new):
        change = Change(row, old_part, new_part, is_users_function, is_public_function)
        if replaced.isdisjoint([each.path for each in row.around]):
            changes.append(change)
            if not change.is_alike:
                replaced.add(row.path)
    # A change within an object tells more than that the object is a different one, so it replaces
    # the change of the object.
    explained = {row.path for c in changes if not c.is_recreated for row in c.row.around}
    return [c for c in changes if not (c.is_alike and c.row.path in explained)]


def _category(change: Change) -> str:
    """Return the category of a change; for two arrays, the first in which they differ."""
    old, new = change.old, change.new
    if not change.row.around and None in (old, new):
        return "argument newly passed or left out"
    # A plain dataclass (`is_opaque`) is a leaf to JAX, though its parts are described.
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

    `place` is where the called function is defined. Without a place, the descriptions are of trees
    of the user's.
    """
    # The changes that are reported together, by the path of the row under which they are reported.
    groups: dict[str, tuple[Row, list[Change]]] = {}
    for change in _changes(old, new, place):
        row = _reported_row(change)
        groups.setdefault(row.path, (row, []))[1].append(change)
    found: list[Difference] = []
    for row, changes in groups.values():
        is_one_cause = changes[0].is_recreated or len(changes) >= _MAX_PARTS
        if is_one_cause and row is not changes[0].row:
            found.append(_difference_of_many(row, changes))
        else:
            found += [each for change in changes for each in _differences_of_one(change)]
    return found


def _reported_row(change: Change) -> Row:
    """Return the row that a change is reported under, together with changes of the same cause.

    A recreated object that isn't the user's is reported under the library's object that owns it,
    and a changed static value under the outermost of the containers directly around it. Any other
    change is reported under its own row.
    """
    if change.is_recreated:
        if change.new.is_users:
            return change.row
        return change.owner or change.row
    row = change.row
    if _category(change) == "static value changed":
        for around in change.row.around:
            if around.part.nature != "container":
                break
            row = around
    return row


def _difference_of_many(row: Row, changes: list[Change]) -> Difference:
    """Return one difference for several changes that are reported under one row."""
    first = changes[0]
    if first.is_recreated:
        parts = [f"`{change.row.path[len(row.path) :]}`" for change in changes]
        if len(parts) > _MAX_PARTS:
            parts[_MAX_PARTS:] = ["..."]
        old = new = f"{row.part}, recreated: {', '.join(parts)}"
        remedy = advice.for_change(first, "static value changed")
    else:
        are_numbers = all(change.new.nature == "number" for change in changes)
        old = ""
        new = f"{len(changes)} {'numbers' if are_numbers else 'values'}"
        remedy = advice.for_change(first._replace(row=row), "numbers") if are_numbers else ""
    return Difference("static value changed", row.name, old, new, remedy)


def _differences_of_one(change: Change) -> Iterator[Difference]:
    """Yield the differences of one change. Two arrays may differ in several ways."""
    old, new = change.old, change.new
    if isinstance(old, ArrayPart) and isinstance(new, ArrayPart):
        found = _differences_of_arrays(old, new)
    else:
        found = [(_category(change), *_distinct_texts(old, new))]
    for category, old_text, new_text in found:
        remedy = advice.for_change(change, category)
        yield Difference(category, change.row.name, old_text, new_text, remedy)


def differences_of_functions(old: Description, new: Description, place: Place) -> list[Difference]:
    """Return how the function of a wrapper differs from the function of an earlier wrapper.

    Both functions are defined at `place`, and the earlier one was traced last.
    """
    # A line in a library wouldn't help users.
    where = f" ({place.site})" if place.site and place.is_users else ""
    category = _CALLABLE
    earlier = f"a different object of `{place.qualname}`{where}"
    # Rows without a name are Equinox's wrappers around the function and, last, the function.
    part = [row.part for row in new if not row.name][-1]
    by_identity = {
        "partial": f"a different {part.text}",
        "instance": f"a different `{part.kind}`",
        "method": f"`{part.text}` of a different `{part.kind}`",
    }
    if part.nature in by_identity:
        earlier = f"{by_identity[part.nature]}, which compares by identity,"
    elif part.nature == "transformed":
        earlier = f"a different {part.text}{where}"
    elif part.kind == "function" and "<" in place.qualname:
        # The `<` of `<locals>` or `<lambda>`. A function at module level is defined once: if it
        # differs, a decorator has returned a different function around it.
        category = _FUNCTION
        earlier = f"a different function of the same code{where}"
    return [
        each._replace(category=_CALLABLE)
        if each.path
        else Difference(category, "", "", f"{earlier} was traced before", each.remedy)
        for each in differences(old, new, place)
    ]


def _distinct_texts(old: Any, new: Any) -> tuple[str, str]:
    """Return the texts of two parts, with more details where the short texts are equal."""
    old_text, new_text = ["absent" if part is None else str(part) for part in (old, new)]
    if old_text != new_text or not (isinstance(old, Part) and isinstance(new, Part)):
        return old_text, new_text
    if old.is_node:
        text = f"{old_text} (a different class of that name)"
        return text, text
    if old.text == new.text:
        return old_text, new_text
    # Two long texts were cut before they differ. Show a part of each that begins a little before
    # the first character that differs.
    pairs = zip(old.text, new.text, strict=False)
    n_alike = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
    start = n_alike - LONG_TEXT // 4
    stop = start + LONG_TEXT
    old_text, new_text = [
        f"...{part.text[start:stop]}{'...' if stop < len(part.text) else ''}" for part in (old, new)
    ]
    return old_text, new_text


def _differences_of_arrays(old: ArrayPart, new: ArrayPart) -> Iterator[tuple[str, str, str]]:
    """Yield the category, the old text and the new text of each difference between two arrays."""
    if old.shape != new.shape:
        yield "shape", array_text(old.dtype, old.shape), array_text(new.dtype, new.shape)
    if old.dtype != new.dtype:
        yield "dtype", old.dtype, new.dtype
    elif old.weak_type != new.weak_type:
        old_text, new_text = [
            f"{part.dtype} of weak type" if part.weak_type else part.dtype for part in (old, new)
        ]
        yield "weak type", old_text, new_text
    if old.placement != new.placement:
        old_text, new_text = [part.placement or _DEFAULT_DEVICE for part in (old, new)]
        yield "sharding or device", old_text, new_text
