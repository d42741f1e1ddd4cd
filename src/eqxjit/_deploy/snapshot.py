"""Copies static objects, so that a later change in place doesn't reach what was made of them."""

import copy
from typing import Any

from .._interruptions import unless_it_raises
from .._spec.static import CONSTANTS, freeze, referents, same


def copy_static(value: Any) -> Any:
    """Return a copy of a static object; the object itself where it can't change, or be copied."""
    if type(value) in CONSTANTS or type(value).__eq__ is object.__eq__:
        return value
    frozen = freeze(value)
    # What compares by identity is no other object in the copy.
    memo = {id(referent): referent for referent in referents(frozen)}
    # An object of the user's may be one that can't be copied.
    copied = unless_it_raises(lambda: copy.deepcopy(value, {**memo}), value)
    return copied if unless_it_raises(lambda: same(copied, frozen), False) else value
