"""Compares what two traces were made for, and says in the user's names how they differ."""

import collections
import itertools
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from .._places import Place
from . import advice
from .advice import Change
from .description import LONG_TEXT, UNKNOWN, ArrayPart, Description, Part, Row, array_text

FUNCTION = "function defined again"
CALLABLE = "another callable"

#: What JAX sees of arrays; all else is the static half of a call.
OF_ARRAYS = ("shape", "dtype", "weak type", "sharding or device")

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
            return f"{self.category}: {self.new}{f': {self.old}' if self.old else ''}"
        if not self.old:
            return f"{self.category}: {self.new} in `{self.path}`"
        if self.old == self.new:
            return f"{self.category}: `{self.path}` is another {self.new}"
        return f"{self.category}: `{self.path}` was {self.old}, is {self.new}"

    @property
    def cause(self) -> str:
        """The cause, as it is counted over several traces."""
        return f"{self.category}: {self.path or self.new}"


def listed(differences: Iterable[Difference], with_remedies: bool = False) -> list[str]:
    """Return a text for each kind of difference, up to a bound; with remedies if asked."""
    alike: dict[tuple[str, str, str], list[Difference]] = collections.defaultdict(list)
    for difference in differences:
        alike[difference.category, difference.old, difference.new].append(difference)
    lines: list[tuple[str, str]] = []
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
    """Return lines, each with its remedy on another, unless one before has that."""
    texts: list[str] = []
    remedies = {""}
    for line, remedy in lines:
        texts.append(line if remedy in remedies else f"{line}\n    {remedy}.")
        remedies.add(remedy)
    return texts


def _all_changes(old: Description, new: Description) -> list[tuple[Row, Any, Any]]:
    """Return the parts that differ, outside in: each row, what was there, and what is there now."""
    old_parts, new_parts = ({row.path: row.part for row in rows} for rows in (old, new))
    changed = [row for row in new if old_parts.get(row.path) != row.part]
    changed += [row for row in old if row.path not in new_parts]
    # One object may have changed in place, which no call sees.
    alone = {r.path for row in changed for r in row.around if r.part.equals_itself_alone}
    same = {path for path in alone if old_parts.get(path) == new_parts.get(path)}
    changes = [
        (row, old_parts.get(row.path), new_parts.get(row.path))
        for row in changed
        if same.isdisjoint([each.path for each in row.around])
    ]
    if not changes and [*old_parts] != [*new_parts]:
        # Of the same parts: the first that is elsewhere is in a dict whose keys are.
        moved = next(r for was, r in zip(old, new, strict=True) if was.path != r.path)
        row = moved.around[0] if moved.around else moved
        moved_part = row.part._replace(text=f"{row.part} with its keys in another order")
        changes.append((row, row.part, moved_part))
    return changes


def distance(old: Description, new: Description) -> int:
    """Return in how many parts two descriptions differ, those in nodes that differ included."""
    return len(_all_changes(old, new))


def _changes(old: Description, new: Description, of_user: bool) -> list[Change]:
    """Return the parts that differ, without those of nodes that are another altogether."""
    changes: list[Change] = []
    opaque: set[str] = set()
    for row, was, is_now in _all_changes(old, new):
        if any(each.path in opaque for each in row.around):
            continue
        change = Change(row, was, is_now, new, of_user)
        # What an opened callable holds tells more than that it is another one.
        if not (change.is_remade and is_now.is_node):
            opaque.add(row.path)
        changes.append(change)
    explained = {
        each.path for change in changes if not change.is_remade for each in change.row.around
    }
    changes = [c for c in changes if not (c.is_remade and c.row.path in explained)]
    # A model of another size has other shapes and other static fields.
    categories: dict[str, set[str]] = collections.defaultdict(set)
    for change in changes:
        models = [row.path for row in change.row.around if row.part.module]
        for model in models[-1:]:
            categories[model].add(_category(change))
    if any(len(found) > 1 for found in categories.values()):
        return [c._replace(is_resized=any(part.module for part in c.around)) for c in changes]
    return changes


def _category(change: Change) -> str:
    old, new = change.old, change.new
    if not change.row.around and None in (old, new):
        return "argument newly passed or left out"
    if change.is_remade:
        return "static value changed"
    # To JAX an instance is a leaf, though its parts are described.
    if any(part is None or (part.is_node and not part.is_opaque) for part in (old, new)):
        return "structure changed"
    if isinstance(old, Part):
        is_array = isinstance(new, ArrayPart)
        return "an array where a static value was" if is_array else "static value changed"
    if isinstance(new, Part):
        return "static where an array was"
    return "shape" if old.shape != new.shape else "dtype"


def _group_of(change: Change) -> tuple[Hashable, ...] | None:
    """Return what changes of one cause share: the node that holds them, and the cause."""
    new, around = change.new, change.row.around
    if change.is_remade and not new.is_node and new.nature != "iterator":
        # Objects below one argument that one call made again.
        if change.owner is not None:
            return change.owner.path, "remade"
        if new.made_at is None or not new.maker or not around:
            return None
        return around[-1].path, new.made_at.filename, new.maker
    containers = _containers(change)
    if containers and _category(change) == "static value changed" and not change.is_remade:
        return containers[-1].path, "numbers" if new.nature == "number" else "values"
    return None


def _containers(change: Change) -> list[Row]:
    """Return the containers around a part, inside out, up to an object of a class."""
    return [*itertools.takewhile(lambda row: row.part.nature == "container", change.row.around)]


def differences(
    old: Description, new: Description, of_user: bool = True, category: str = ""
) -> list[Difference]:
    """Return how a description differs from an older one; `of_user` says whose the function is."""
    groups: dict[Hashable, list[Change]] = {}
    for change in _changes(old, new, of_user):
        groups.setdefault(_group_of(change) or change.row.path, []).append(change)
    shown: list[Difference] = []
    for changes in groups.values():
        if _is_one(changes):
            shown.append(_of_many(changes))
        else:
            shown += [each for change in changes for each in _of_one(change)]
    return [each._replace(category=category) for each in shown] if category else shown


def _is_one(changes: list[Change]) -> bool:
    """Return whether changes of one group are told as one."""
    first = changes[0]
    if first.is_remade:
        return len(changes) > 1 or not _is_by_itself(first)
    return len(changes) >= _MAX_PARTS


def _is_by_itself(change: Change) -> bool:
    """Return whether the user made an object by itself, not as a part of another."""
    part, owner = change.new, change.owner
    # Equinox's wrappers and layers make no partials.
    return (
        owner is None
        or part.nature == "iterator"
        or advice.is_made_by_user(part)
        or (part.nature == "partial" and owner.part.module.startswith("equinox"))
    )


def _of_many(changes: list[Change]) -> Difference:
    first = changes[0]
    if not first.is_remade:
        row, is_number = _containers(first)[-1], first.new.nature == "number"
        text = f"{len(changes)} {'numbers' if is_number else 'values'}"
        remedy = advice.for_numbers(first, row) if is_number else ""
        return Difference("static value changed", row.name, "", text, remedy)
    # Or the innermost node that holds them all.
    owner = first.owner or next(
        row for row in first.row.around if all(row in change.row.around for change in changes)
    )
    parts = [f"`{change.row.path[len(owner.path) :]}`" for change in changes]
    more = ["..."] * (len(parts) > _MAX_PARTS)
    text = f"{owner.part}, recreated: {', '.join([*parts[:_MAX_PARTS], *more])}"
    remedy = advice.for_remade_parts(owner, changes)
    return Difference("static value changed", owner.name, text, text, remedy)


def _of_one(change: Change) -> Iterator[Difference]:
    old, new, category = change.old, change.new, _category(change)
    if isinstance(old, ArrayPart) and isinstance(new, ArrayPart):
        for name, texts in _of_arrays(old, new):
            yield Difference(name, change.row.name, *texts, advice.for_change(change, name))
        return
    was, is_now = _texts_apart(old, new)
    yield Difference(category, change.row.name, was, is_now, advice.for_change(change, category))


def of_functions(old: Description, new: Description, place: Place) -> list[Difference]:
    """Return how the function under a wrapper differs from the one that was traced before it."""
    if UNKNOWN in (old, new):
        text = f"another one of `{place.qualname}` was traced before"
        return [Difference(CALLABLE, "", "", text)]
    found = differences(old, new, place.is_users, CALLABLE)
    # The innermost below Equinox's wrappers, or such a wrapper.
    was, is_now = ([row.part for row in rows if not row.name][-1] for rows in (old, new))
    category, text = _another(is_now, place)
    before = was.text if was.text != is_now.text and not is_now.is_node else ""
    return [
        each if each.path else Difference(category, "", before, text, each.remedy) for each in found
    ]


def _another(new: Part, place: Place) -> tuple[str, str]:
    """Return the category and the text of a function that isn't the one of before."""
    # A line of a library's is no help.
    where = f" ({place.site})" if place.site and place.is_users else ""
    category, text = CALLABLE, f"another one of `{place.qualname}`{where}"
    if new.is_node and new.equals_itself_alone:
        text = f"another {new.text if new.nature == 'partial' else f'`{new.kind}`'}"
        of = f"{new.text} of " if new.nature == "method" else ""
        text = f"{of}{text}, which compares by identity,"
    elif new.is_transformed:
        of = f"an object of `{new.transformed}`" if new.transformed else f"`{place.qualname}`"
        text = f"another `{new.maker}` of {of}{where}"
    elif new.nature == "function":
        # A decorator's may be around a function at module level, which wasn't made again.
        is_wrapper = (new.maker or new.kind != "function") and "<" not in place.qualname
        if is_wrapper:
            text = f"another wrapper of `{place.qualname}`{where}"
        else:
            category = FUNCTION
            text = f"another function made of the same code{where}" if where else text
    return category, f"{text} was traced before"


def _texts_apart(old: Any, new: Any) -> list[str]:
    """Return the texts of two parts, with more details if these are equal."""
    texts = ["absent" if part is None else str(part) for part in (old, new)]
    if texts[0] != texts[1]:
        return texts
    if old.is_node:
        return texts if new.equals_itself_alone else [f"{part}{part.detail}" for part in (old, new)]
    if old.text != new.text:
        # Both are long: from a little before the first character that differs.
        pairs = zip(old.text, new.text, strict=False)
        alike = [*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
        start = len(alike) - LONG_TEXT // 4
        stop = start + LONG_TEXT
        return [f"...{p.text[start:stop]}{'...' * (stop < len(p.text))}" for p in (old, new)]
    for details in ((old.kind, new.kind), (old.site, new.site)):
        if details[0] != details[1]:
            return [f"{texts[0]} ({detail})" for detail in details]
    return texts


def _of_arrays(old: ArrayPart, new: ArrayPart) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the category and both texts of each difference between two arrays."""
    if old.shape != new.shape:
        yield "shape", (array_text(old.dtype, old.shape), array_text(new.dtype, new.shape))
    if old.dtype != new.dtype:
        yield "dtype", (old.dtype, new.dtype)
    elif old.weak_type != new.weak_type:
        weak = f"{old.dtype} of weak type"
        yield "weak type", (weak, new.dtype) if old.weak_type else (old.dtype, weak)
    if old.placement != new.placement:
        was, is_now = [part.placement or "where JAX put it" for part in (old, new)]
        yield "sharding or device", (was, is_now)
