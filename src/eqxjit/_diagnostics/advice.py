"""Remedies: what to do about a difference that caused a trace.

`test_advice.py` follows every remedy, and checks that it helps.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from .description import NUMBERS, ArrayPart, Capture, Part, Row

# A remedy names at most this many captured arrays.
_MAX_CAPTURES = 3

_UNLESS = ", unless a shape or control flow depends on it"
_ONCE = "make it once, before the first call"
_OWNER = "If it should be the same, make {it} once, before the first call"

#: The text of each remedy by its name. The functions in `_CHOICES`, and `_for_recreated`, choose
#: among the names.
REMEDIES = {
    # Remedies for a number: as an argument, in a field, among many numbers in one container, or in
    # an object that is a leaf to JAX.
    "argument": "If it varies, pass `{array}`, which is traced, or an array made once" + _UNLESS,
    "field": "If it varies, make `{path}` an array, `{array}`, in a field that isn't static"
    + _UNLESS,
    "numbers": "If they vary, pass one array, as by `np.asarray({path})`, or make each number an "
    "array, as by `jax.tree.map(np.asarray, {path})`" + _UNLESS,
    "object": "If it varies, pass `{array}` as a separate argument" + _UNLESS,
    # Remedies for any other static value.
    "array": "An array in a static field is a constant: keep it in a field that isn't static",
    "iterator": "It is read while tracing only: draw from it before the call, and pass the values "
    "as arrays",
    "label": "If the function computes nothing with it, as with a name, leave it out of the call",
    # Remedies for an object that compares by identity, and was created again.
    "closure": "It closes over {captured}, which differs: pass that as an argument, or use "
    "`eqx.Partial(f, {names})`, whose arrays are traced",
    "function": f"It is a different object of the same code: if it should be the same, {_ONCE}",
    "instance": "`{kind}` objects compare by identity: make it once and reuse it, or make its "
    "class an `equinox.Module`, which compares by its parts",
    "made by a library": _OWNER,
    "optimizer": _OWNER + "; `optax.inject_hyperparams` makes a rate an array of its state",
    "partial": f"Partials compare by identity: {_ONCE}, or use `eqx.Partial`, which compares by "
    "its parts",
    "transformed": "Each call of `jax.{kind}` returns a new function, with constants in place of "
    f"the arrays of a Module: {_ONCE}, or use `eqx.filter_{{kind}}`, which compares by what it "
    "transforms",
    "wrapped again": "Define and wrap it once, outside of loops and of the functions that call it, "
    "and pass what varies as arrays",
    # Remedies for a different structure.
    "None at first": "If it is `None` at first only, pass its initial value instead, such as zeros",
    "keys": "If its keys vary, pass all of them in each call",
    "length": "If its length varies, pad it to one of a few lengths; or stack its arrays into one, "
    "by `jnp.stack({path})`, and pad that to one of a few sizes",
    # Remedies for a different array.
    "sharding or device": "Place it on the same device or sharding in all calls, by "
    "`jax.device_put` or `eqx.filter_shard`",
    "size": "If its size varies, pad it to a few sizes",
    "state": "A weak type comes from a Python number: give each array a dtype once, before the "
    "loop: `{root} = jax.tree.map(lambda a: a.astype(a.dtype), {root})`",
    "weak type": "A weak type comes from a Python number: give it a dtype when it is made, as in "
    "`jnp.asarray(..., dtype=jnp.{dtype})`",
}


class Change(NamedTuple):
    """A part that differs between two calls of a function.

    - `row`: the row of the later call, or of the earlier call if the part is absent in the later.
    - `old`, `new`: the part in the earlier and in the later call: a `Part`, an `ArrayPart`, or
        `None` if it is absent there.
    - `is_users_function`: whether the called function is the user's.
    - `is_public_function`: whether the called function is a library's, with a public name by which
        users call it.
    """

    row: Row
    old: Any
    new: Any
    is_users_function: bool
    is_public_function: bool

    @property
    def holder(self) -> Part | None:
        """The innermost node around the part that isn't a container; `None` for an argument."""
        parts = [row.part for row in self.row.around]
        return next((part for part in parts if part.nature != "container"), None)

    @property
    def is_users(self) -> bool:
        """True if the user wrote the class, or else the function, that the part is passed to.

        Only then can the user replace a static value by an array, say.
        """
        return self.holder.is_users if self.holder else self.is_users_function

    @property
    def is_passed_to_library(self) -> bool:
        """True for an argument that the user passes to a library's public function."""
        return self.is_public_function and not self.holder

    @property
    def is_alike(self) -> bool:
        """True for two leaves of one class which, if they are callable, also have the same code.

        The contents of the leaves may still differ.
        """
        old, new = self.old, self.new
        if not (isinstance(old, Part) and isinstance(new, Part)) or old.is_node or new.is_node:
            return False
        return (old.nature, old.kind, old.code_site) == (new.nature, new.kind, new.code_site)

    @property
    def is_recreated(self) -> bool:
        """True for two different objects of one class or code that compare by identity."""
        return self.is_alike and self.new.compares_by_identity

    @property
    def owner(self) -> Row | None:
        """The object of a library's class that the user created, and that holds the part.

        Going outwards from the part, the search ends before the first object of a user's class. The
        owner is the last library object that it meets.
        """
        rows = [row for row in self.row.around if row.part.nature != "container"]
        of_libraries = [*itertools.takewhile(lambda row: not row.part.is_users, rows)]
        return of_libraries[-1] if of_libraries else None


def for_change(change: Change, category: str) -> str:
    """Return the remedy for a part that differs; empty if there is none."""
    choose = _for_recreated if change.is_recreated else _CHOICES.get(category)
    name = choose(change) if choose else ""
    return _remedy_text(name, change) if name else ""


# Each of these functions returns the name of a remedy, or an empty string.


def _for_recreated(change: Change) -> str:
    new: Part = change.new
    # If a library passes its own object to its own function, users can't change that.
    if not (change.is_users_function or new.is_users):
        return ""
    if new.nature == "function" and not change.row.name:
        return "wrapped again"
    if new.nature == "function" and new.is_users and _changed_captures(change):
        return "closure"
    if not new.is_users and new.nature != "iterator":
        # `str`, because the `__module__` of a class may be any object.
        return "optimizer" if str(new.module).startswith("optax.") else "made by a library"
    if new.nature == "transformed":
        return "transformed" if hasattr(eqx, f"filter_{new.kind}") else "function"
    return "instance" if new.nature == "method" else new.nature


def _changed_captures(change: Change) -> list[Capture]:
    """Return the new function's captures that differ from those of the old function."""
    old: dict[str, Capture] = {capture.name: capture for capture in change.old.captures}
    return [each for each in change.new.captures if old.get(each.name, each) != each]


def _for_static(change: Change) -> str:
    old, new = change.old, change.new
    if change.is_users and new.nature == "array":
        return "array"
    if change.is_users and new.nature == "label" and not change.holder and isinstance(old, Part):
        return "label"
    if not (change.is_users or change.is_passed_to_library) or not _dtype(old, new):
        return ""
    if any(row.part.is_opaque for row in change.row.around):
        return "object"
    return "field" if change.holder else "argument"


def _for_numbers(change: Change) -> str:
    return "numbers" if change.is_users or change.is_passed_to_library else ""


def _for_structure(change: Change) -> str:
    old, new = change.old, change.new
    if not change.is_users:
        # The user can't change the structure of a library's object.
        return ""
    if old is None or new is None:
        kinds = [row.part.kind for row in change.row.around]
        return "keys" if kinds[:1] == ["dict"] else ""
    if (old.kind, new.nature) in (("None", "container"), ("None", "traced array")):
        return "None at first"
    # Two tuples, say, can differ in their length only.
    is_length = old.nature == new.nature == "container" and old.kind == new.kind
    return "length" if is_length and not change.holder else ""


def _for_shape(change: Change) -> str:
    old, new = change.old, change.new
    is_size = old.shape != new.shape and len(old.shape) == len(new.shape)
    return "size" if is_size and change.is_users else ""


def _for_weak_type(change: Change) -> str:
    if change.holder is None or change.is_users:
        # The user created the array, also if the function is a library's.
        return "weak type"
    return "state" if change.is_users_function or change.is_public_function else ""


def _for_placement(change: Change) -> str:
    return "sharding or device"


#: The function that chooses a remedy, by the category of the difference. A category that isn't here
#: has no remedies. Recreated objects have a function of their own.
_CHOICES: dict[str, Callable[[Change], str]] = {
    "argument newly passed or left out": _for_structure,
    "numbers": _for_numbers,
    "shape": _for_shape,
    "sharding or device": _for_placement,
    "static value changed": _for_static,
    "static where an array was": _for_static,
    "structure changed": _for_structure,
    "weak type": _for_weak_type,
}


def _remedy_text(name: str, change: Change) -> str:
    """Return the text of a remedy, with the names and values of a change filled in."""
    old, new = change.old, change.new
    path = change.row.name
    owner = (change.owner or change.row).name
    dtype = new.dtype if isinstance(new, ArrayPart) else _dtype(old, new)
    captures = _changed_captures(change)[:_MAX_CAPTURES] if name == "closure" else []
    return REMEDIES[name].format(
        path=path,
        it=f"`{owner}`" if owner else "it",
        root=_root(change).name,
        # The code that computes the value of a field isn't known, so `...` stands for it.
        array=_array_code("..." if name == "field" else path, dtype),
        captured=" and ".join(map(str, captures)),
        names=", ".join([capture.name for capture in captures]),
        kind=(new or old).kind,
        dtype=dtype,
    )


def _array_code(value: str, dtype: str) -> str:
    """Return code that makes an array of a number in each call."""
    # JAX traces NumPy scalars, too, and creating one takes a quarter of the time of `jnp.asarray`.
    # NumPy lacks some of JAX's dtypes, such as `bfloat16`.
    if dtype and hasattr(np, dtype):
        return f"np.{dtype}({value})"
    return f"jnp.asarray({value}, dtype=jnp.{dtype})"


def _root(change: Change) -> Row:
    """Return the outermost tree around a part with no object of a user's class in between.

    If the part is an array in an optimizer's state, the tree is the whole state.
    """
    root = change.row
    for row in change.row.around:
        if row.part.nature != "container" and row.part.is_users:
            break
        root = row
    return root


def _dtype(old: Any, new: Any) -> str:
    """Return the dtype for an array that replaces a number; empty if `new` isn't a number.

    `old` is a different number, or an array.
    """
    if old is None or new is None or new.nature != "number":
        return ""
    # A remedy always names a dtype, because an array that is created from a number without one has
    # a weak type, unlike most arrays.
    if old.nature == "number":
        return jnp.result_type(NUMBERS[old.kind], NUMBERS[new.kind]).name
    # NumPy can't represent the dtype of typed random keys.
    if isinstance(old, ArrayPart) and not old.dtype.startswith("key"):
        return jnp.result_type(jnp.dtype(old.dtype), NUMBERS[new.kind]).name
    return ""
