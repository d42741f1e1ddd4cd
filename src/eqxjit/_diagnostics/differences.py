"""Compares what two traces were made for, and says in the user's names how they differ."""

import collections
import math
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import jax.numpy as jnp

from .._code.files import is_users, is_users_module
from .description import ArrayPart, Description, NodePart, Part, StaticPart

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
TRANSFORMATION = "compiled for a transformation"
FUNCTION = "function defined again"
UNKNOWN_REASON = "not known"

#: What JAX sees of arrays; all else is the static half of a call.
OF_ARRAYS = (SHAPE, DTYPE, WEAK_TYPE, PLACEMENT)

_NOT_STATIC = "in a field that isn't static"

# Differences of one trace that are spelled out; a new model may differ in every array.
_MAX_SHOWN = 8

# The same for the keys of a dict in another order.
_MAX_LABELS = 4


class Difference(NamedTuple):
    """One way in which a trace differs from an earlier one.

    - `category`: which kind of difference: `"shape"`, `"dtype"`, `"weak type"`, `"sharding or
        device"`, `"static value changed"`, `"static where an array was"`, `"an array where a static
        value was"`, `"structure changed"`, `"argument newly given or left out"`,
        `"configuration changed"`, `"cache evicted or cleared"`, `"compiled for a transformation"`,
        `"function defined again"` or `"not known"`.
    - `path`: where, in the user's names, such as `model.layers[0].activation`.
    - `old`, `new`: what was there, and what is there now.
    - `remedy`: what to do about it, where that is known; else empty.
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
    """Return a text for each kind of difference, up to a bound; with remedies, if wanted."""
    alike: dict[tuple[str, str, str], list[Difference]] = collections.defaultdict(list)
    for difference in differences:
        alike[difference.category, difference.old, difference.new].append(difference)
    lines: list[str] = []
    remedies: set[str] = set()
    for first, *others in list(alike.values())[:_MAX_SHOWN]:
        line = str(first)
        if others:
            line += f" (and {len(others)} more: {', '.join(f'`{d.path}`' for d in others[:3])}"
            line += ", ...)" if len(others) > 3 else ")"
        if with_remedies and first.remedy and first.remedy not in remedies:
            remedies.add(first.remedy)
            line += f"\n    {first.remedy}."
        lines.append(line)
    if len(alike) > _MAX_SHOWN:
        lines.append(f"and {len(alike) - _MAX_SHOWN} more")
    return lines


def distance(old: Description, new: Description) -> int:
    """Return about how much two descriptions differ; 0 exactly if they don't."""
    if old.paths is new.paths or old.paths == new.paths:
        pairs = zip(old.parts, new.parts, strict=True)
        return sum([a is not b and a != b for a, b in pairs])
    old_parts = dict(zip(old.paths, old.parts, strict=True))
    changed = [old_parts.get(path) != part for path, part in zip(new.paths, new.parts, strict=True)]
    # Without any such difference, it is an order that differs.
    return sum(changed) + len(set(old.paths).difference(new.paths)) or 1


def differences(old: Description, new: Description, of_user: bool = True) -> list[Difference]:
    """Return how a description differs from an older one, outside in.

    What is in a node that is another altogether isn't listed. `of_user` says that the function is
    the user's: there is no remedy for what only the author of a library could change.
    """
    old_parts = dict(zip(old.paths, old.parts, strict=True))
    found: list[Difference] = []
    changed: set[int] = set()
    # Most arrays of a tree change alike.
    of_arrays: dict[Hashable, list[Difference]] = {}
    rows = zip(new.paths, new.parents, new.parts, strict=True)
    for index, (path, parent, part) in enumerate(rows):
        if parent in changed:
            changed.add(index)
        elif path not in old_parts:
            changed.add(index)
            found.append(_given(path, parent, "absent", str(part)))
        else:
            old_part = old_parts[path]
            if old_part is part or old_part == part:
                continue
            place = _Place(path, _module_around(new, parent), of_user)
            if isinstance(old_part, ArrayPart) and isinstance(part, ArrayPart):
                # Nothing in it but the path names the place.
                alike = (id(old_part), id(part), place.module)
                if alike not in of_arrays:
                    of_arrays[alike] = [*_compared(place, old_part, part)]
                compared = [
                    Difference(d.category, path, d.old, d.new, d.remedy) for d in of_arrays[alike]
                ]
            else:
                compared = [*_compared(place, old_part, part)]
            found += compared
            if compared:
                changed.add(index)
    remaining = set(new.paths)
    gone: set[int] = set()
    rows = zip(old.paths, old.parents, old.parts, strict=True)
    changed_paths = {new.paths[index] for index in changed}
    for index, (path, parent, part) in enumerate(rows):
        if parent in gone or (parent >= 0 and old.paths[parent] in changed_paths):
            gone.add(index)
        elif path not in remaining:
            gone.add(index)
            found.append(_given(path, parent, str(part), "absent"))
    if old.paths != new.paths:
        found += [item for item in _reordered(old, new) if item.path not in changed_paths]
    return found


def _reordered(old: Description, new: Description) -> Iterator[Difference]:
    """Return the dicts that have the same keys in another order."""
    old_labels, new_labels = _labels(old), _labels(new)
    for path, part in zip(new.paths, new.parts, strict=True):
        before, after = old_labels.get(path, []), new_labels.get(path, [])
        if before != after and sorted(before) == sorted(after):
            pairs = enumerate(zip(before, after, strict=True))
            start = next(i for i, (old_label, new_label) in pairs if old_label != new_label)
            texts = [f"{part} in the order {_some(labels, start)}" for labels in (before, after)]
            yield Difference(STRUCTURE, path, *texts)


def _some(labels: list[str], start: int) -> str:
    """Return a few labels, from that one on."""
    stop = start + _MAX_LABELS
    shown = ["..."] * (start > 0) + labels[start:stop] + ["..."] * (stop < len(labels))
    return ", ".join(shown)


def _labels(description: Description) -> dict[str, list[str]]:
    """Return the labels of each node's children, by its path: the keys of a dict, say."""
    labels: dict[str, list[str]] = collections.defaultdict(list)
    paths = description.paths
    for path, parent in zip(paths, description.parents, strict=True):
        if parent >= 0:
            labels[paths[parent]].append(path[len(paths[parent]) :].strip("[]"))
    return labels


def _given(path: str, parent: int, old: str, new: str) -> Difference:
    return Difference(ARGUMENT if parent < 0 else STRUCTURE, path, old, new)


class _Place(NamedTuple):
    """The place of a part, and who can change what is there.

    - `path`: where, in the user's names.
    - `module`: that of the class that holds it; empty for an argument, also inside of containers.
    - `of_user`: whether the function is the user's.
    """

    path: str
    module: str
    of_user: bool

    @property
    def is_users(self) -> bool:
        """True where the code around it is the user's, who can put an array here, say."""
        return is_users_module(self.module) if self.module else self.of_user


def _module_around(description: Description, index: int) -> str:
    while index >= 0:
        part = description.parts[index]
        if isinstance(part, NodePart) and part.module:
            return part.module
        index = description.parents[index]
    return ""


def _compared(place: _Place, old: Part, new: Part) -> Iterator[Difference]:
    path = place.path
    if isinstance(old, ArrayPart) and isinstance(new, ArrayPart):
        yield from _compared_arrays(place, old, new)
    elif isinstance(old, StaticPart) and isinstance(new, StaticPart):
        yield Difference(STATIC_VALUE, path, *_texts(old, new), _remedy_for_static(place, old, new))
    elif isinstance(old, ArrayPart) and isinstance(new, StaticPart):
        remedy = _as_array(place, _dtype_like(old, new), new.is_field)
        yield Difference(NOW_STATIC, path, str(old), str(new), remedy)
    elif isinstance(old, StaticPart) and isinstance(new, ArrayPart):
        yield Difference(NOW_ARRAY, path, str(old), str(new))
    else:
        texts = str(old), str(new)
        if isinstance(old, NodePart) and isinstance(new, NodePart) and texts[0] == texts[1]:
            # Equal details: another class of the same name.
            texts = f"{old}{old.detail}", f"{new}{new.detail}"
        yield Difference(STRUCTURE, path, *texts)


def _texts(old: StaticPart, new: StaticPart) -> tuple[str, str]:
    if old.text == new.text and old.kind != new.kind:
        return f"{old} ({old.kind})", f"{new} ({new.kind})"
    return str(old), str(new)


def _compared_arrays(place: _Place, old: ArrayPart, new: ArrayPart) -> Iterator[Difference]:
    path = place.path
    if old.shape != new.shape:
        remedy = ""
        if len(old.shape) == len(new.shape) > 0 and old.shape[1:] == new.shape[1:]:
            remedy = "If its size varies, pad it to a few sizes" if place.is_users else ""
        yield Difference(SHAPE, path, old.shape_text, new.shape_text, remedy)
    if old.dtype != new.dtype:
        yield Difference(DTYPE, path, old.dtype, new.dtype)
    elif old.weak_type != new.weak_type:
        remedy = (
            "A weak type comes from a Python number: give it a dtype when it is made, as in "
            f"`jnp.asarray(..., dtype=jnp.{old.dtype})`"
            # The user's own array, whoever's function it goes to.
            if not place.module or place.is_users
            else ""
        )
        weak = f"{old.dtype} of weak type"
        texts = (weak, new.dtype) if old.weak_type else (old.dtype, weak)
        yield Difference(WEAK_TYPE, path, *texts, remedy)
    if old.placement != new.placement:
        anywhere = "where JAX put it"
        yield Difference(PLACEMENT, path, old.placement or anywhere, new.placement or anywhere)


_NUMBERS: dict[str, type] = {"int": int, "float": float, "complex": complex}


def _as_array(place: _Place, dtype: str | None, is_field: bool) -> str:
    """Return the advice to make a number an array; empty where the user can't."""
    if dtype is None or not place.is_users:
        return ""
    given = f", dtype=jnp.{dtype}" if dtype else ""
    unless = ", unless a shape or control flow depends on it"
    if not place.module:
        return f"If it varies, pass `jnp.asarray({place.path}{given})`{unless}"
    where = f", {_NOT_STATIC}" if is_field else ""
    return f"If it varies, make `{place.path}` an array, `jnp.asarray(...{given})`{where}{unless}"


def _dtype_of(*parts: StaticPart) -> str | None:
    """Return the dtype that JAX gives these numbers; None if some is no number or doesn't fit.

    Without one, the array would be of a weak type, unlike most others that may come here.
    """
    kinds = [_NUMBERS.get(part.kind) for part in parts]
    if None in kinds:
        return None
    dtype = jnp.result_type(*kinds)
    return dtype.name if all(_fits(part, dtype) for part in parts) else None


def _dtype_like(old: ArrayPart, new: StaticPart) -> str | None:
    """Return the dtype with which a number is like the array that was there, if it can be.

    It is empty where a number is so by itself.
    """
    try:
        dtype = jnp.dtype(old.dtype)
    except TypeError:
        # A key of random numbers.
        return None
    if new.kind == "bool":
        return dtype.name
    kind = _NUMBERS.get(new.kind)
    if kind is None or not jnp.issubdtype(dtype, _WIDEST[kind]) or not _fits(new, dtype):
        return _dtype_of(new)
    return "" if old.weak_type and dtype == jnp.result_type(kind) else dtype.name


# What must hold of a dtype so that each number of a kind is one of its own.
_WIDEST: dict[type, type] = {int: jnp.number, float: jnp.inexact, complex: jnp.complexfloating}


def _fits(part: StaticPart, dtype: jnp.dtype) -> bool:
    try:
        number = _NUMBERS[part.kind](str(part))
    except ValueError:
        # A class of the user's, of that name.
        return False
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return int(limits.min) <= number <= int(limits.max)
    largest = float(jnp.finfo(dtype).max)
    return all(
        abs(value) <= largest or (isinstance(value, float) and not math.isfinite(value))
        for value in (number.real, number.imag)
    )


def _remedy_for_static(place: _Place, old: StaticPart, new: StaticPart) -> str:
    once = "make it once, at module level, outside `__init__`"
    code = new.made_at
    if new.kind == old.kind == "partial":
        # The code is that of the function below it.
        if place.is_users or (code is not None and is_users(code.filename)):
            return f"A partial equals itself alone: if it should be the same, {once}"
        return ""
    if code and code == old.made_at:
        it = f"It is another object of the same code ({code})"
        return f"{it}: if it should be the same, {once}" if is_users(code.filename) else ""
    if not code and not old.made_at and new.is_compared_by_identity:
        if new.kind != old.kind or not is_users_module(new.module):
            return ""
        if _class_of(old) != _class_of(new):
            return f"A {new.kind} equals itself alone: make it once, and its class"
        return (
            f"A {new.kind} equals itself alone: make it once, or give its class an `__eq__` and a "
            "`__hash__`, as a frozen dataclass has"
        )
    return _as_array(place, _dtype_of(old, new), new.is_field)


def _class_of(part: StaticPart) -> object:
    # The key of what is compared by identity begins with it.
    return part.key[0] if isinstance(part.key, tuple) else None


def with_apt_remedies(found: list[Difference]) -> tuple[Difference, ...]:
    """Return the differences, without remedies that only help where nothing of another kind
    differs.

    A model of another size has other shapes and other static fields: neither should be padded, or
    made an array.
    """
    if len({difference.category for difference in found}) == 1:
        return tuple(found)
    return tuple(
        difference._replace(remedy="") if _is_of_size(difference) else difference
        for difference in found
    )


def _is_of_size(difference: Difference) -> bool:
    return difference.category == SHAPE or _NOT_STATIC in difference.remedy


def configuration_differences(old: dict[str, str], new: dict[str, str]) -> list[Difference]:
    """Return how JAX's configuration differs, as far as traces and programs depend on it."""
    return [
        Difference(CONFIGURATION, name, old.get(name, "absent"), new.get(name, "absent"))
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
