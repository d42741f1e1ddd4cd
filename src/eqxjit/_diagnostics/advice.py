"""Says what to do about a difference. Every remedy is here, and `test_advice.py` follows each."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from .description import NUMBERS, ArrayPart, Capture, Part, Row

# A remedy names no more of what a function closes over.
_MAX_CAPTURES = 3

_UNLESS = ", unless a shape or control flow depends on it"
_ONCE = "make it once, before the first call"
_OWNER = "If it should be the same, make {it} once, before the first call"

#: The text of each remedy by its name. `_CHOICES` says which remedies a category of difference has,
#: and a row of `test_advice.py` follows each.
REMEDIES = {
    # A number; many numbers in one container; a number in an object that JAX takes for a leaf.
    "argument": "If it varies, pass `{array}`, which is traced, or an array made once" + _UNLESS,
    "field": "If it varies, make `{path}` an array, `{array}`, in a field that isn't static"
    + _UNLESS,
    "numbers": "If they vary, pass one array, as by `np.asarray({path})`, or make each number an "
    "array, as by `jax.tree.map(np.asarray, {path})`" + _UNLESS,
    "object": "If it varies, pass `{array}` as a separate argument" + _UNLESS,
    # Any other static value.
    "array": "An array in a static field is a constant: keep it in a field that isn't static",
    "iterator": "Only traces read it: draw from it before the call, and pass the values as arrays",
    "label": "If the function computes nothing with it, as with a name, leave it out of the call",
    # An object that compares by identity, and was created again.
    "closure": "It closes over {captured}, which differs: pass that as an argument, or use "
    "`eqx.Partial(f, {names})`, whose arrays are traced",
    "function": f"It is another object of the same code: if it should be the same, {_ONCE}",
    "instance": "`{kind}` objects compare by identity: make it once and reuse it, or make its "
    "class an `equinox.Module`, which compares by its parts",
    "made by a library": _OWNER,
    "optimizer": _OWNER + "; `optax.inject_hyperparams` makes a rate an array of its state",
    "partial": f"Partials compare by identity: {_ONCE}, or use `eqx.Partial`, which compares by "
    "its parts",
    "transformed": "Each call of `jax.{kind}` makes another function, with constants in place of "
    f"the arrays of a Module: {_ONCE}, or use `eqx.filter_{{kind}}`, which compares by what it "
    "transforms",
    "wrapped again": "Define and wrap it once, outside of loops and of the functions that call it, "
    "and pass what varies as arrays",
    # A different structure.
    "None at first": "If it is `None` at first only, pass what it begins with instead, such as "
    "zeros",
    "keys": "If its keys vary, have it hold all of them in each call",
    "length": "If its length varies, fill it up to a few lengths; arrays in it may be one, by "
    "`jnp.stack({path})`, padded to a few sizes",
    # A different array.
    "sharding or device": "Place it alike in all calls, by `jax.device_put` or `eqx.filter_shard`",
    "size": "If its size varies, pad it to a few sizes",
    "state": "A weak type comes from a Python number: give each array a dtype once, before the "
    "loop: `{root} = jax.tree.map(lambda a: a.astype(a.dtype), {root})`",
    "weak type": "A weak type comes from a Python number: give it a dtype when it is made, as in "
    "`jnp.asarray(..., dtype=jnp.{dtype})`",
}


class Change(NamedTuple):
    """A part that differs between two calls.

    - `row`: the row of the later call, or of the earlier call if the part is absent in the later.
    - `old`, `new`: what the part was and is, of type `Part | ArrayPart | None`; None if absent.
    - `of_user`: whether the function is the user's.
    - `is_public`: whether the function is a public one of a library, which users call themselves.
    """

    row: Row
    old: Any
    new: Any
    of_user: bool
    is_public: bool = False

    @property
    def holder(self) -> Part | None:
        """The innermost node around the part that is no container."""
        parts = [row.part for row in self.row.around]
        return next((part for part in parts if part.nature != "container"), None)

    @property
    def is_users(self) -> bool:
        """True where the code around it is the user's, who can put an array here, say."""
        return self.holder.is_users if self.holder else self.of_user

    @property
    def is_alike(self) -> bool:
        """True for leaves of one code or class. What they hold may still differ."""
        old, new = self.old, self.new
        if not (isinstance(old, Part) and isinstance(new, Part)) or old.is_node or new.is_node:
            return False
        return (old.nature, old.kind, old.code_site) == (new.nature, new.kind, new.code_site)

    @property
    def is_remade(self) -> bool:
        """True for different objects of one code or class that compare by identity."""
        return self.is_alike and self.new.compares_by_identity

    @property
    def owner(self) -> Row | None:
        """The outermost object of a library's class that holds the part. The user created it."""
        rows = [row for row in self.row.around if row.part.nature != "container"]
        made = [*itertools.takewhile(lambda row: not row.part.is_users, rows)]
        return made[-1] if made else None


def for_change(change: Change, category: str) -> str:
    """Return what to do about a part that differs; empty if there is nothing to do."""
    # A category that isn't among the choices has no remedy, and so none of another category.
    choose = _for_remade if change.is_remade else _CHOICES.get(category)
    return _say(choose(change), change) if choose else ""


def _for_remade(change: Change) -> str:
    new: Part = change.new
    # Only the author of a library could change how it calls its own functions.
    if not (change.of_user or new.is_users):
        return ""
    if new.nature == "function" and not change.row.name:
        return "wrapped again"
    if new.nature == "function" and new.is_users and _captures_apart(change):
        return "closure"
    if not new.is_users and new.nature != "iterator":
        # `str`, because `__module__` of a class may be any object.
        return "optimizer" if str(new.module).startswith("optax.") else "made by a library"
    if new.nature == "transformed":
        return "transformed" if hasattr(eqx, f"filter_{new.kind}") else "function"
    return "instance" if new.nature == "method" else new.nature


def _captures_apart(change: Change) -> list[Capture]:
    """Return the arrays, and trees of arrays, that two functions of one code close over apart."""
    old: dict[str, Capture] = {capture.name: capture for capture in change.old.captures}
    return [each for each in change.new.captures if old.get(each.name, each) != each]


def _for_static(change: Change) -> str:
    old, new = change.old, change.new
    if change.is_users and new.nature == "array":
        return "array"
    if change.is_users and new.nature == "label" and not change.holder and isinstance(old, Part):
        return "label"
    # A number that the user passes to a library's function is the user's.
    is_passed = change.is_public and not change.holder
    if not (change.is_users or is_passed) or not _dtype(old, new):
        return ""
    if any(row.part.is_opaque for row in change.row.around):
        return "object"
    return "field" if change.holder else "argument"


def _for_numbers(change: Change) -> str:
    is_passed = change.is_public and not change.holder
    return "numbers" if change.is_users or is_passed else ""


def _for_structure(change: Change) -> str:
    old, new = change.old, change.new
    if not change.is_users:
        # The user can't give a library's object another structure.
        return ""
    if old is None or new is None:
        kinds = [row.part.kind for row in change.row.around]
        return "keys" if kinds[:1] == ["dict"] else ""
    if (old.kind, new.nature) in (("None", "container"), ("None", "traced array")):
        return "None at first"
    is_longer = old.nature == new.nature == "container" and old.kind == new.kind
    return "length" if is_longer and not change.holder else ""


def _for_shape(change: Change) -> str:
    old, new = change.old, change.new
    is_size = old.shape != new.shape and len(old.shape) == len(new.shape)
    return "size" if is_size and change.is_users else ""


def _for_weak_type(change: Change) -> str:
    if change.holder is None or change.is_users:
        # The user made the array, whoever's function it goes to.
        return "weak type"
    return "state" if change.of_user or change.is_public else ""


def _for_placement(change: Change) -> str:
    return "sharding or device"


#: What chooses a remedy for a part that wasn't created again, by the category of the difference.
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


def _say(name: str, change: Change) -> str:
    if not name:
        return ""
    old, new, row = change.old, change.new, change.row
    path, owner = row.name, (change.owner or row).name
    dtype = new.dtype if isinstance(new, ArrayPart) else _dtype(old, new)
    captures = _captures_apart(change)[:_MAX_CAPTURES] if name == "closure" else []
    return REMEDIES[name].format(
        path=path,
        it=f"`{owner}`" if owner else "it",
        root=_root(change).name,
        array=_array_code("..." if name == "field" else path, dtype),
        captured=" and ".join(map(str, captures)),
        names=", ".join([capture.name for capture in captures]),
        kind=(new or old).kind,
        dtype=dtype,
    )


def _array_code(value: str, dtype: str) -> str:
    """Return the code that makes an array of a number, which runs in each call."""
    # A NumPy scalar takes a quarter of the time of `jnp.asarray`, and JAX traces it, too. NumPy
    # itself hasn't all of JAX's dtypes.
    if dtype and hasattr(np, dtype):
        return f"np.{dtype}({value})"
    return f"jnp.asarray({value}, dtype=jnp.{dtype})"


def _root(change: Change) -> Row:
    """Return the outermost tree around a part that the user's objects have no part in."""
    rows = [change.row, *change.row.around]
    is_made = lambda row: row.part.nature == "container" or not row.part.is_users  # noqa: E731
    return [change.row, *itertools.takewhile(is_made, rows[1:])][-1]


def _dtype(old: Any, new: Any) -> str:
    """Return the dtype for a number that varies, or that is where an array was; or nothing."""
    if old is None or new is None or new.nature != "number":
        return ""
    # Not without a dtype, because the array would then be of weak type, unlike most arrays.
    if old.nature == "number":
        return jnp.result_type(NUMBERS[old.kind], NUMBERS[new.kind]).name
    # NumPy doesn't know the dtype of random keys.
    if isinstance(old, ArrayPart) and not old.dtype.startswith("key"):
        return jnp.result_type(jnp.dtype(old.dtype), NUMBERS[new.kind]).name
    return ""
