"""Says what to do about a difference: every remedy is here, and `test_advice.py` follows each."""

import itertools
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp

from .description import NUMBERS, ArrayPart, Part, Row

_UNLESS = ", unless a shape or control flow depends on it"
_ONCE = "make it once, before the first call"
_OWNER = "If it should be the same, make {it} once, before the first call"

#: What there is to be done, by a name; a row of `test_advice.py` follows each.
REMEDIES = {
    # A number, or many in one container; the third where JAX doesn't look into what holds it.
    "argument": "If it varies, pass `{array}`" + _UNLESS,
    "field": "If it varies, make `{path}` an array, `{array}`, in a field that isn't static"
    + _UNLESS,
    "object": "If it varies, pass `{array}` as a separate argument" + _UNLESS,
    "numbers": "If they vary, pass one array of them, as by `jnp.asarray({path})`, or make each an "
    "array, as by `jax.tree.map(jnp.asarray, {path})`" + _UNLESS,
    # Another static value.
    "array": "An array in a static field is a constant: keep it in a field that isn't static",
    "iterator": "Only traces read it: draw from it before the call, and pass the values as arrays",
    "label": "If the function computes nothing with it, as with a name, leave it out of the call",
    # Another object that equals itself alone.
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
    # Another structure.
    "None at first": "If it is `None` at first only, pass what it begins with instead, such as "
    "zeros",
    "keys": "If its keys vary, have it hold all of them in each call",
    "length": "If its length varies, fill it up to a few lengths; arrays in it may be one, by "
    "`jnp.stack({path})`, padded to a few sizes",
    # Another array.
    "sharding or device": "Place it alike in all calls, by `jax.device_put` or `eqx.filter_shard`",
    "size": "If its size varies, pad it to a few sizes",
    "weak type": "A weak type comes from a Python number: give it a dtype when it is made, as in "
    "`jnp.asarray(..., dtype=jnp.{dtype})`",
}


class Change(NamedTuple):
    """A part that differs between two calls: what it was and is, None where it is absent."""

    # Of the latter call; of the former if it is absent there.
    row: Row
    # Of type `Part | ArrayPart | None`, which each remedy narrows.
    old: Any
    new: Any
    # Whether the function is the user's.
    of_user: bool

    @property
    def holder(self) -> Part | None:
        """The innermost node around it that is no container."""
        parts = [row.part for row in self.row.around]
        return next((part for part in parts if part.nature != "container"), None)

    @property
    def is_users(self) -> bool:
        """True where the code around it is the user's, who can put an array here, say."""
        return self.holder.is_users if self.holder else self.of_user

    @property
    def is_alike(self) -> bool:
        """True for leaves of one code, or one class, which what they hold may tell apart."""
        old, new = self.old, self.new
        if not (isinstance(old, Part) and isinstance(new, Part)) or old.is_node or new.is_node:
            return False
        return (old.nature, old.kind, old.made_at) == (new.nature, new.kind, new.made_at)

    @property
    def is_remade(self) -> bool:
        """True for objects of one code, or one class, that equal themselves alone."""
        return self.is_alike and self.new.equals_itself_alone

    @property
    def owner(self) -> Row | None:
        """The outermost object of a library's class that holds it: the user made that."""
        rows = [row for row in self.row.around if row.part.nature != "container"]
        made = [*itertools.takewhile(lambda row: not row.part.is_users, rows)]
        return made[-1] if made else None


def for_change(change: Change, category: str) -> str:
    """Return what to do about a part that differs; empty if there is nothing."""
    if change.is_remade:
        name = _for_remade(change)
    elif category == "sharding or device" or (category == "weak type" and not change.holder):
        # The user's array, whoever's function it goes to.
        name = category
    elif not change.is_users:
        # The user can't make it something else everywhere.
        name = ""
    elif category in REMEDIES:
        name = category
    elif category.startswith("static"):
        name = _for_static(change)
    else:
        name = _for_structure(change)
    return _say(name, change)


def _for_remade(change: Change) -> str:
    new: Part = change.new
    # A library's in a library's function: only its author could change another one.
    if not (change.of_user or new.is_users):
        return ""
    if new.nature == "function" and not change.row.name:
        return "wrapped again"
    if not new.is_users and new.nature != "iterator":
        # A class may say anything of its module.
        return "optimizer" if str(new.module).startswith("optax.") else "made by a library"
    if new.nature == "transformed":
        return "transformed" if hasattr(eqx, f"filter_{new.kind}") else "function"
    return "instance" if new.nature == "method" else new.nature


def _for_static(change: Change) -> str:
    if change.new.nature == "array":
        return "array"
    if change.new.nature == "label" and not change.holder and isinstance(change.old, Part):
        return "label"
    if not _dtype(change.old, change.new):
        return ""
    if any(row.part.is_opaque for row in change.row.around):
        return "object"
    return "field" if change.holder else "argument"


def _for_structure(change: Change) -> str:
    old, new = change.old, change.new
    if isinstance(old, ArrayPart) and isinstance(new, ArrayPart):
        is_size = old.shape != new.shape and len(old.shape) == len(new.shape)
        return "size" if is_size else ""
    if old is None or new is None:
        kinds = [row.part.kind for row in change.row.around]
        return "keys" if kinds[:1] == ["dict"] else ""
    if (old.kind, new.nature) in (("None", "container"), ("None", "traced array")):
        return "None at first"
    is_longer = old.nature == new.nature == "container" and old.kind == new.kind
    return "length" if is_longer and not change.holder else ""


def _say(name: str, change: Change) -> str:
    if not name:
        return ""
    old, new, row = change.old, change.new, change.row
    path, owner = row.name, (change.owner or row).name
    dtype = new.dtype if isinstance(new, ArrayPart) else _dtype(old, new)
    return REMEDIES[name].format(
        path=path,
        it=f"`{owner}`" if owner else "it",
        array=f"jnp.asarray({'...' if name == 'field' else path}, dtype=jnp.{dtype})",
        kind=(new or old).kind,
        dtype=dtype,
    )


def _dtype(old: Any, new: Any) -> str:
    """Return the dtype for a number that varies, or that is where an array was; or nothing."""
    if old is None or new is None or new.nature != "number":
        return ""
    # With a dtype, because without one the array would be of weak type, unlike most others.
    if old.nature == "number":
        return jnp.result_type(NUMBERS[old.kind], NUMBERS[new.kind]).name
    # A key of random numbers has a dtype that only JAX has.
    if isinstance(old, ArrayPart) and not old.dtype.startswith("key"):
        return jnp.result_type(jnp.dtype(old.dtype), NUMBERS[new.kind]).name
    return ""
