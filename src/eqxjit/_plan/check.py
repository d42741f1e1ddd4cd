"""Carries out the guards of a plan one by one, and names the first that fails.

The slow, plain twin of the generated guards: they hold for exactly the calls that this finds no
mismatch in.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from jax.tree_util import FlattenedIndexKey, default_registry, keystr, tree_flatten_with_path

from .._compat import ArrayImpl, fields_of
from .._trees.numpy_inputs import is_node, is_plain_array
from .inputs import static_input
from .native import predicate
from .plan import (
    Array,
    CallPlan,
    Fields,
    InnerInput,
    Input,
    Mapping,
    Match,
    Registered,
    Repeat,
    Sequence,
    Static,
    StaticRun,
)


def first_mismatch(plan: CallPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the path of the first input that isn't as planned; None if all are.

    **Arguments:**

    - `plan`: the plan of earlier calls.
    - `args`, `kwargs`: those of a call, bound to the function's parameters.

    **Returns:**

    A path such as `model.layers[0].activation`; of an argument that is left out, its name.
    """
    pairs = [*itertools.zip_longest(plan.args, args, fillvalue=_MISSING)]
    paths = plan.signature.path_names(len(pairs))
    for name in plan.kwargs | kwargs:
        pairs.append((plan.kwargs.get(name, _MISSING), kwargs.get(name, _MISSING)))
        paths.append(plan.signature.keyword_path(name))
    for path, (node, value) in zip(paths, pairs, strict=True):
        found = _argument_mismatch(node, value)
        if found is not None:
            return f"{path}{found}"
    return None


_MISSING: Any = object()


def _argument_mismatch(node: Input, value: Any) -> str | None:
    """Return the path of the first mismatch from an argument on: empty for the argument itself."""
    if node is _MISSING or value is _MISSING:
        return ""
    try:
        return _mismatch(node, value)
    except Exception:
        # Generated guards that raise don't hold either.
        return ""


def _mismatch(node: Input, value: Any) -> str | None:
    """Return the path of the first mismatch below a value: empty for the value itself."""
    match node:
        case Array():
            is_matched = type(value) is ArrayImpl or is_plain_array(value)
        case Static():
            is_matched = _is_static(node, value)
        case _:
            is_matched = type(value) is node.cls and _is_shape_of(node, value)
    if not is_matched:
        return ""
    for label, child, part in _children(node, value):
        found = _mismatch(child, part)
        if found is not None:
            return f"{label if isinstance(label, str) else _label(value, label)}{found}"
    return None


def _is_shape_of(node: InnerInput, value: Any) -> bool:
    """Return whether a node of the right class has the parts that were planned."""
    match node:
        case Sequence():
            return len(value) == node.n
        case Mapping():
            if len(value) != len(node.keys):
                return False
            if node.key_types is not None:
                return {*map(type, value)} == node.key_types
            return node.known_keys is None or node.known_keys.match(value)
        case Fields():
            return len(fields_of(value)) == len(node.static) + len(node.dynamic)
        case Registered():
            children, data = default_registry.flatten_one_level(value)
            return _is_static(node.data, data) and len(tuple(children)) == len(node.items)


def _children(node: Input, value: Any) -> Iterator[tuple[str | int, Input, Any]]:
    """Yield the children: how the path goes on, or the number, what is planned, and what came."""
    match node:
        case Sequence():
            names = getattr(node.cls, "_fields", None)
            for index, (item, part) in enumerate(zip(_planned(node), value, strict=True)):
                yield (f"[{index}]" if names is None else f".{names[index]}"), item, part
        case Mapping():
            for key, item in zip(node.keys, node.items, strict=True):
                yield f"[{key!r}]", item, value[key]
        case Fields():
            fields = fields_of(value)
            for name, item in (*node.static, *zip(node.dynamic, node.items, strict=True)):
                yield f".{name}", item, fields.get(name, _MISSING)
        case Registered():
            children = tuple(default_registry.flatten_one_level(value)[0])
            for index, (item, part) in enumerate(zip(node.items, children, strict=True)):
                yield index, item, part
        case _:
            pass


def _planned(node: Sequence) -> Iterator[Input]:
    """Yield what is planned for each item of a sequence."""
    for item in node.items:
        match item:
            case StaticRun():
                yield from map(static_input, item.values)
            case Repeat():
                yield from itertools.repeat(item.item, item.n)
            case _:
                yield item


def _is_static(node: Static, value: Any) -> bool:
    """Return whether a value has the typed static key of the planned one."""
    if node.may_become_node and is_node(value):
        return False
    if value is node.value and node.match in (Match.SAME, Match.IS_OR_KEY):
        return True
    return type(value) is type(node.value) and predicate(node)(value)


def _label(value: Any, index: int) -> str:
    """Return what the path to a child of a registered node ends in."""
    keyed, _ = tree_flatten_with_path(value, is_leaf=lambda each: each is not value)
    last = keyed[index][0][-1]
    return f"[{last.key}]" if isinstance(last, FlattenedIndexKey) else keystr((last,))
