"""Copies and types of trees, which `freeze`, `save` and `pack` have in common."""

import copy
from collections.abc import Iterable
from typing import Any

import jax

from .._diagnostics.description import Description
from .._diagnostics.differences import differences, listed
from .._spec.static_key import referents, same, static_key
from .._spec.tree import Spec, combine

#: The shape and dtype of an array.
Type = jax.ShapeDtypeStruct


def type_of(leaf: Any) -> Type:
    """Return the type of an array inside a jitted function, without its weak type."""
    aval = jax.typeof(leaf)
    return Type(aval.shape, aval.dtype)


def changes(old: Description, new: Description) -> list[str]:
    """Return a line for each difference between two descriptions of trees."""
    # Very large trees have no description.
    return listed(differences(old, new)) or ["somewhere in a large tree"]


def snapshot(spec: Spec, arrays: Iterable[Any], statics: Iterable[Any]) -> Any:
    """Return the tree of these parts, with a copy of each static object."""
    return combine(spec, iter(arrays), map(_copy_static, statics))


def _copy_static(value: Any) -> Any:
    """Return a copy of a static object, or the object itself if it can't be copied."""
    key = static_key(value)
    # An object that compares by identity must stay the same object in the copy.
    memo = {id(referent): referent for referent in referents(key)}
    try:
        copied = copy.deepcopy(value, memo)
        # A copy that doesn't equal the object isn't what the user froze or packed.
        return copied if same(copied, key) else value
    except (AttributeError, RuntimeError, TypeError, ValueError, copy.Error):
        # Locks and files can't be copied. The `==` of a copy may fail, too.
        return value
