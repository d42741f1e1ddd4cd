"""Compares what two traces were made for, and says in the user's names how they differ."""

import collections
import itertools
import re
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from .._places import Place
from . import advice
from .advice import Change
from .description import (
    LONG_TEXT,
    UNKNOWN,
    ArrayPart,
    Description,
    NodePart,
    Row,
    StaticPart,
    array_text,
)

FUNCTION = "function defined again"
CALLABLE = "another callable"

#: What JAX sees of arrays; all else is the static half of a call.
OF_ARRAYS = ("shape", "dtype", "weak type", "sharding or device")

# What is spelled out: differences, as a new model may differ in every array; and objects made anew.
_MAX_SHOWN = 8
_MAX_PARTS = 4

# By the types of what was there and is there now; arrays are compared further.
_CATEGORIES: dict[tuple[type, type], str] = {
    (StaticPart, StaticPart): "static value changed",
    (ArrayPart, StaticPart): "static where an array was",
    (StaticPart, ArrayPart): "an array where a static value was",
}


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


def _causes(old: Description, new: Description, of_user: bool) -> list[list[Change]]:
    """Return the parts that differ, outside in: those of one cause together."""
    changes: list[Change] = []
    # The paths of what differs, and of all that is in it: the parts of a node that is another
    # altogether aren't compared.
    changed: set[str] = set()
    old_parts, new_parts = ({row.path: row.part for row in rows} for rows in (old, new))
    for row in (*new, *old):
        was, is_now = old_parts.get(row.path), new_parts.get(row.path)
        if row.around and row.around[0].path in changed:
            changed.add(row.path)
        elif row.path not in changed and was != is_now:
            changed.add(row.path)
            changes.append(Change(row, was, is_now, new, of_user))
    if not changes:
        for was, row in zip(old, new, strict=False):
            if was.path != row.path and row.around:
                # Of the same parts: the first that is elsewhere is in a dict whose keys are.
                part = row.around[0].part
                moved = NodePart(f"{part} with its keys in another order", None)
                return [[Change(row.around[0], part, moved, new, of_user)]]
    # Objects below one argument that one call made anew are one cause, with one remedy.
    causes: dict[Hashable, list[Change]] = {}
    for change in changes:
        causes.setdefault(_made_by(change) or change.row.path, []).append(change)
    return [*causes.values()]


def _made_by(change: Change) -> Hashable:
    """Return which call made an object anew; None for any other change."""
    if not change.is_remade:
        return None
    if change.owner is not None:
        return change.owner.path, None
    made_at, maker = change.new.made_at, change.new.maker
    if made_at is None or not maker or not change.row.around:
        return None
    return change.row.around[-1].path, made_at.filename, maker


def distance(old: Description, new: Description) -> int:
    """Return in how many parts two descriptions differ, those in nodes that differ included."""
    parts = {row.path: row.part for row in old}
    n_same = sum([parts.get(row.path) == row.part for row in new])
    # Or the same paths in another order.
    is_alike = [*parts] == [row.path for row in new]
    return max(len(old), len(new)) - n_same + (not is_alike)


def _lists_apart(
    causes: list[list[Change]],
) -> tuple[list[list[Change]], list[tuple[Row, list[Change]]]]:
    """Return the causes without numbers of which many changed in a list, and these by the list."""
    by_list: dict[str, list[Change]] = collections.defaultdict(list)
    for cause in causes:
        holder = cause[0].row.around[:1]
        is_item = bool(holder) and not holder[0].part.module and type(holder[0].part.key) is tuple
        if len(cause) == 1 and is_item and advice.are_numbers(cause[0]):
            by_list[holder[0].path].append(cause[0])
    many = {path for path, changes in by_list.items() if len(changes) > _MAX_SHOWN}
    rest = [c for c in causes if not (c[0].row.around and c[0].row.around[0].path in many)]
    return rest, [(by_list[path][0].row.around[0], by_list[path]) for path in sorted(many)]


def differences(old: Description, new: Description, of_user: bool = True) -> list[Difference]:
    """Return how a description differs from an older one; `of_user` says whose the function is."""
    shown: list[Difference] = []
    causes, lists = _lists_apart(_causes(old, new, of_user))
    for holder, changes in lists:
        text = f"{len(changes)} numbers"
        remedy = advice.for_numbers(changes[0], holder)
        shown.append(Difference("static value changed", holder.path, "", text, remedy))
    for cause in causes:
        first = cause[0]
        path, was, is_now = first.row.path, first.old, first.new
        if len(cause) > 1 or (first.is_remade and not _is_by_itself(first)):
            shown.append(_of_remade(cause))
        elif isinstance(was, ArrayPart) and isinstance(is_now, ArrayPart):
            shown += _of_arrays(first, was, is_now)
        else:
            # A node has no remedy, because a structure is mostly meant.
            category = _CATEGORIES.get((type(was), type(is_now)), "structure changed")
            remedy = advice.for_static(first) if category.startswith("static") else ""
            if not first.row.around and None in (was, is_now):
                category = "argument newly passed or left out"
            old_text, new_text = _texts_apart(was, is_now)
            shown.append(Difference(category, path, old_text, new_text, remedy))
    if len({difference.category for difference in shown}) == 1:
        return shown
    # A model of another size has other shapes and other static fields: neither should be padded, or
    # made an array.
    unapt = advice.PAD, advice.NOT_STATIC
    return [d._replace(remedy="") if any(part in d.remedy for part in unapt) else d for d in shown]


def of_functions(old: Description, new: Description, place: Place) -> list[Difference]:
    """Return how the function under a wrapper differs from the one that was traced before it."""
    if UNKNOWN in (old, new) or not isinstance(new[0].part, NodePart):
        return [_defined_again(new, place)]
    opened = [row.part for row in new if isinstance(row.part, NodePart) and row.part.opened]
    shown: list[Difference] = []
    for each in differences(old, new, place.is_users):
        # The fields of Equinox's wrappers tell nothing.
        path = _WRAPPED.sub("", each.path).lstrip(".")
        if not path and not opened:
            # A function in a wrapper of Equinox's.
            return [_defined_again(new, place)]
        remedy = each.remedy.replace(f"`{each.path}`", f"`{path}`")
        if opened:
            are_numbers = all(map(_NUMBER.fullmatch, (each.old, each.new)))
            remedy = advice.for_held(path, opened[0]) if are_numbers else ""
        shown.append(each._replace(category=CALLABLE, path=path, remedy=remedy))
    if not shown and opened:
        text = f"{'' if opened[0].opened == 'method' else 'another '}{opened[0]}"
        text += ", which compares by identity, was traced before"
        shown.append(Difference(CALLABLE, "", "", text, advice.for_opened(opened[0])))
    return shown or [_defined_again(new, place)]


_NUMBER = re.compile(r"-?\d+(\.\d*)?(e[-+]?\d+)?|True|False")
_WRAPPED = re.compile(r"^(?:\._fun\w*)+")


def _is_by_itself(change: Change) -> bool:
    """Return whether the user made an object made anew by itself, not as a part of another."""
    part, owner = change.new, change.owner
    # Equinox's wrappers and layers make no partials.
    return (
        owner is None
        or advice.is_made_by_user(part)
        or (part.kind == "partial" and owner.part.module.startswith("equinox"))
    )


def _of_remade(cause: list[Change]) -> Difference:
    first = cause[0]
    # Or the innermost node that holds them all.
    owner = first.owner or next(
        row for row in first.row.around if all(row in change.row.around for change in cause)
    )
    path, node = owner.path, owner.part
    parts = [
        f"`{change.row.path[len(path) :]}`"
        + (f" is another {change.new}" if _is_by_itself(change) else "")
        for change in cause
    ]
    more = ["..."] * (len(parts) > _MAX_PARTS)
    text = f"{node}, made anew: {', '.join([*parts[:_MAX_PARTS], *more])}"
    remedy = advice.for_remade_parts(path, cause)
    return Difference("static value changed", path, text, text, remedy)


def _texts_apart(old: Any, new: Any) -> list[str]:
    """Return the texts of two parts, with more details if these are equal."""
    texts = ["absent" if part is None else str(part) for part in (old, new)]
    if texts[0] != texts[1]:
        return texts
    if isinstance(old, NodePart):
        return [f"{part}{part.detail}" for part in (old, new)]
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


def _of_arrays(change: Change, old: ArrayPart, new: ArrayPart) -> Iterator[Difference]:
    path = change.row.path
    if old.shape != new.shape:
        remedy = advice.for_shape(change, old, new)
        texts = array_text(old.dtype, old.shape), array_text(new.dtype, new.shape)
        yield Difference("shape", path, *texts, remedy)
    if old.dtype != new.dtype:
        yield Difference("dtype", path, old.dtype, new.dtype)
    elif old.weak_type != new.weak_type:
        weak = f"{old.dtype} of weak type"
        texts = (weak, new.dtype) if old.weak_type else (old.dtype, weak)
        yield Difference("weak type", path, *texts, advice.for_weak_type(change, old))
    if old.placement != new.placement:
        was, is_now = [part.placement or "where JAX put it" for part in (old, new)]
        yield Difference("sharding or device", path, was, is_now, advice.PLACE)


def _defined_again(new: Description, place: Place) -> Difference:
    part = next((row.part for row in new if isinstance(row.part, StaticPart)), None)
    # A line of a library's is no help.
    where = f" ({place.site})" if place.site and place.is_users else ""
    if part and part.is_transformed:
        of = f"an object of `{part.transformed}`" if part.transformed else f"`{place.qualname}`"
        text = f"another `{part.maker}` of {of}{where}"
    elif where:
        text = f"another function made of the same code{where}"
    else:
        text = f"another one of `{place.qualname}`"
    remedy = advice.for_function(part, place.is_users)
    return Difference(FUNCTION, "", "", f"{text} was traced before", remedy)
