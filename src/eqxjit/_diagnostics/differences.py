"""Compares what two traces were made for, and says in the user's names how they differ.

Two steps: the causes, each of one or more parts that differ, and then a text for each.
"""

import collections
import os
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from .._code.place import Place
from . import advice
from .advice import Change
from .description import LONG_TEXT, ArrayPart, Description, NodePart, Part, StaticPart

SHAPE = "shape"
DTYPE = "dtype"
WEAK_TYPE = "weak type"
PLACEMENT = "sharding or device"
STATIC_VALUE = "static value changed"
NOW_STATIC = "static where an array was"
NOW_ARRAY = "an array where a static value was"
STRUCTURE = "structure changed"
ARGUMENT = "argument newly given or left out"
CONFIGURATION = "configuration changed"
CACHE = "cache evicted or cleared"
FUNCTION = "function defined again"
UNKNOWN_REASON = "not known"

#: What JAX sees of arrays; all else is the static half of a call.
OF_ARRAYS = (SHAPE, DTYPE, WEAK_TYPE, PLACEMENT)

# Differences of one trace that are spelled out; a new model may differ in every array.
_MAX_SHOWN = 8

# The same for objects that one call made.
_MAX_PARTS = 4


class Difference(NamedTuple):
    """One way in which a trace differs from an earlier one.

    - `category`: which kind of difference: `"shape"`, `"dtype"`, `"weak type"`, `"sharding or
        device"`, `"static value changed"`, `"static where an array was"`, `"an array where a static
        value was"`, `"structure changed"`, `"argument newly given or left out"`,
        `"configuration changed"`, `"cache evicted or cleared"`, `"function defined again"` or
        `"not known"`.
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
        if self.old == self.new:
            return f"{self.category}: `{self.path}` is another {self.new}"
        return f"{self.category}: `{self.path}` was {self.old}, is {self.new}"


def listed(differences: tuple[Difference, ...], with_remedies: bool = False) -> list[str]:
    """Return a text for each kind of difference, up to a bound; with remedies if asked."""
    alike: dict[tuple[str, str, str], list[Difference]] = collections.defaultdict(list)
    for difference in differences:
        alike[difference.category, difference.old, difference.new].append(difference)
    lines: list[str] = []
    remedies = {""}
    for first, *others in list(alike.values())[:_MAX_SHOWN]:
        line = str(first)
        if others:
            line += f" (and {len(others)} more: {', '.join(f'`{d.path}`' for d in others[:3])}"
            line += ", ...)" if len(others) > 3 else ")"
        if with_remedies and first.remedy not in remedies:
            remedies.add(first.remedy)
            line += f"\n    {first.remedy}."
        lines.append(line)
    if len(alike) > _MAX_SHOWN:
        lines.append(f"and {len(alike) - _MAX_SHOWN} more")
    return lines


# --- Causes ---------------------------------------------------------------------------------------


def distance(old: Description, new: Description) -> int:
    """Return in how many parts two descriptions differ, those in nodes that differ included."""
    pairs = zip(_before(old, new), new.parts, strict=True)
    # Equal parts are mostly one object.
    n = sum([was is not part and was != part for was, part in pairs])
    return n if old.paths == new.paths else n + len({*old.paths}.difference(new.paths))


def _before(old: Description, new: Description) -> Sequence[Part | None]:
    """Return the older description's part for each path of the newer one."""
    if old.paths == new.paths:
        return old.parts
    return [*map(dict(zip(old.paths, old.parts, strict=True)).get, new.paths)]


def compare(old: Description, new: Description, of_user: bool = True) -> list[list[Change]]:
    """Return how a description differs from an older one.

    **Returns:**

    The parts of each cause, outside in: objects below one argument that one call made anew are one
    cause, and the parts of a node that is another altogether aren't compared.

    **Arguments:**

    - `of_user`: whether the function is the user's.
    """
    before = _before(old, new)
    changes: list[Change] = []
    # The indices of the parts that differ, and of those in them.
    inside: set[int] = set()
    for index, (path, parent, part) in enumerate(zip(*new, strict=True)):
        was = before[index]
        if parent in inside:
            inside.add(index)
        elif was is not part and was != part:
            inside.add(index)
            changes.append(Change(path, was, part, new, parent, of_user))
    if old.paths != new.paths:
        changes += _gone(old, new, {change.path for change in changes}, of_user)
    if not changes and old.paths != new.paths:
        # Of the same parts: the first that is elsewhere is in a dict whose keys are.
        first = next(i for i, path in enumerate(old.paths) if path != new.paths[i])
        index = new.parents[first]
        part = new.parts[index]
        moved = NodePart(f"{part} with its keys in another order", None)
        changes.append(Change(new.paths[index], part, moved, new, new.parents[index], of_user))
    causes: dict[Hashable, list[Change]] = {}
    for change in changes:
        made_by = _made_by(change) if type(change.new) is StaticPart else None
        causes.setdefault(made_by or change.path, []).append(change)
    return [*causes.values()]


def _gone(old: Description, new: Description, changed: set[str], of_user: bool) -> Iterator[Change]:
    """Yield the parts that the newer description lacks, but for those in what changed."""
    remaining = set(new.paths)
    inside: set[int] = set()
    for index, (path, parent, part) in enumerate(zip(*old, strict=True)):
        if parent in inside or path in changed:
            inside.add(index)
        elif path not in remaining:
            inside.add(index)
            yield Change(path, part, None, old, parent, of_user)


def _made_by(change: Change) -> Hashable:
    """Return which call made an object anew; None for any other change."""
    if not change.is_remade:
        return None
    owner = change.owner
    if owner is not None:
        return owner[0], None
    assert isinstance(change.new, StaticPart)
    made_at = change.new.made_at
    if made_at is None or not change.new.maker or change.parent < 0:
        return None
    return change.around[0][0], made_at.filename, change.new.maker


# --- Texts ----------------------------------------------------------------------------------------


def differences(found: list[list[Change]]) -> list[Difference]:
    """Return the text of each cause, with a remedy if there is one."""
    shown: list[Difference] = []
    for cause in found:
        first = cause[0]
        path, old, new = first[:3]
        if len(cause) > 1 or (first.is_remade and not _is_by_itself(first)):
            shown.append(_of_remade(cause))
        elif isinstance(old, ArrayPart) and isinstance(new, ArrayPart):
            shown += _of_arrays(first, old, new)
        elif isinstance(old, ArrayPart) and isinstance(new, StaticPart):
            remedy = advice.for_array_now_static(first)
            shown.append(Difference(NOW_STATIC, path, str(old), str(new), remedy))
        elif isinstance(old, StaticPart) and isinstance(new, ArrayPart):
            shown.append(Difference(NOW_ARRAY, path, str(old), str(new)))
        elif isinstance(old, StaticPart) and isinstance(new, StaticPart):
            texts = _texts_apart(old, new)
            shown.append(Difference(STATIC_VALUE, path, *texts, advice.for_static(first)))
        else:
            is_argument = first.parent < 0 and None in (old, new)
            category = ARGUMENT if is_argument else STRUCTURE
            shown.append(Difference(category, path, *_texts_apart(old, new)))
    return shown


def _is_by_itself(change: Change) -> bool:
    """Return whether the user made an object made anew by itself, not as a part of another."""
    part, owner = change.new, change.owner
    assert isinstance(part, StaticPart)
    if owner is None or advice.is_made_by_user(part):
        return True
    # Equinox's wrappers and layers make none.
    return part.kind == "partial" and owner[1].module.startswith("equinox")


def _of_remade(cause: list[Change]) -> Difference:
    """Return the difference of an object whose parts one call made anew."""
    first = cause[0]
    path, node = first.owner or _around_all(cause)
    parts = [
        f"`{change.path[len(path) :]}`"
        + (f" is another {change.new}" if _is_by_itself(change) else "")
        for change in cause
    ]
    more = ["..."] * (len(parts) > _MAX_PARTS)
    text = f"{node}, made anew: {', '.join([*parts[:_MAX_PARTS], *more])}"
    return Difference(STATIC_VALUE, path, text, text, advice.for_remade_parts(path, cause))


def _around_all(cause: list[Change]) -> tuple[str, NodePart]:
    """Return the innermost node that holds all parts of a cause."""
    levels = zip(*[change.around for change in cause], strict=False)
    return [nodes[0] for nodes in levels if len({path for path, _ in nodes}) == 1][-1]


def _texts_apart(old: Part | None, new: Part | None) -> tuple[str, str]:
    """Return the texts of two parts, with more details if these are equal."""
    texts = ("absent" if old is None else str(old)), ("absent" if new is None else str(new))
    if texts[0] != texts[1]:
        return texts
    if isinstance(old, NodePart) and isinstance(new, NodePart):
        return f"{old}{old.detail}", f"{new}{new.detail}"
    assert isinstance(old, StaticPart)
    assert isinstance(new, StaticPart)
    if old.text != new.text:
        # Both are long: from a little before the first character that differs.
        start = len(os.path.commonprefix([old.text, new.text])) - LONG_TEXT // 4
        return _excerpt(old.text, start), _excerpt(new.text, start)
    if old.kind != new.kind:
        return f"{old} ({old.kind})", f"{new} ({new.kind})"
    if old.site != new.site:
        return f"{old} ({old.site})", f"{new} ({new.site})"
    return texts


def _excerpt(text: str, start: int) -> str:
    stop = start + LONG_TEXT
    return f"...{text[start:stop]}{'...' if stop < len(text) else ''}"


def _of_arrays(change: Change, old: ArrayPart, new: ArrayPart) -> Iterator[Difference]:
    path = change.path
    if old.shape != new.shape:
        remedy = advice.for_shape(change, old, new)
        yield Difference(SHAPE, path, old.shape_text, new.shape_text, remedy)
    if old.dtype != new.dtype:
        yield Difference(DTYPE, path, old.dtype, new.dtype)
    elif old.weak_type != new.weak_type:
        weak = f"{old.dtype} of weak type"
        texts = (weak, new.dtype) if old.weak_type else (old.dtype, weak)
        yield Difference(WEAK_TYPE, path, *texts, advice.for_weak_type(change, old))
    if old.placement != new.placement:
        anywhere = "where JAX put it"
        yield Difference(PLACEMENT, path, old.placement or anywhere, new.placement or anywhere)


def defined_again(place: Place) -> Difference:
    """Return the difference of a function that is one of several, each defined or made anew."""
    # A line of a library's is no help.
    where = f" ({place.site})" if place.site and place.is_users else ""
    if place.transformation:
        of = "" if place.site else "an object of "
        text = f"another `jax.{place.transformation}` of {of}`{place.qualname}`{where}"
    elif place.owner:
        text = f"`{place.qualname}` of another `{place.owner}`"
    elif where:
        text = f"another function made of the same code{where}"
    else:
        text = f"another one of `{place.qualname}`"
    return Difference(FUNCTION, "", "", f"{text} was traced before", advice.for_function(place))


def with_apt_remedies(found: list[Difference]) -> tuple[Difference, ...]:
    """Return the differences, without remedies that help only where all are of one kind.

    A model of another size has other shapes and other static fields: neither should be padded, or
    made an array.
    """
    if len({difference.category for difference in found}) == 1:
        return tuple(found)
    return tuple(
        d._replace(remedy="") if d.remedy == advice.PAD or advice.NOT_STATIC in d.remedy else d
        for d in found
    )


def configuration_differences(old: dict[str, str], new: dict[str, str]) -> list[Difference]:
    """Return how JAX's configuration differs, as far as traces and programs depend on it."""
    if old == new:
        return []
    return [
        Difference(CONFIGURATION, name, old.get(name, "absent"), new.get(name, "absent"))
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
