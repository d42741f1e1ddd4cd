"""Says what to do about a difference: every remedy is here, and `test_advice.py` follows each."""

import itertools
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from .._places import is_users, is_users_module
from .description import NUMBERS, ArrayPart, Description, Part, Row

_ONCE = "make it once, before the first call"
_BY_PARTS = ", which compares by its parts"
_UNLESS = ", unless a shape or control flow depends on it"
_APART = "If it varies, pass `{array}` as a separate argument"
_OWNER = "If it should be the same, make {it} once, before the first call"
_VALUE = "make it an array, a tuple or a frozen dataclass"

#: What there is to be done, by a name; a row of `test_advice.py` follows each.
REMEDIES = {
    # A number, or many in one container; the last ones where JAX doesn't look into what holds it.
    "argument": "If it varies, pass `{array}`" + _UNLESS,
    "field": "If it varies, make `{path}` an array, `{made}`" + _UNLESS,
    "static field": "If it varies, make `{path}` an array, `{made}`, in a field that isn't static"
    + _UNLESS,
    "argument of its own": _APART + _UNLESS,
    "object": _APART + ", or make `{holder}` an `equinox.Module` with such an array" + _UNLESS,
    "in a partial": _APART + ", or use `eqx.Partial` with such an array" + _UNLESS,
    "among others": "If they vary, pass these numbers as one array of their own" + _UNLESS,
    # Another static value.
    "array": "An array in a static field is a constant: keep it in a field that isn't static",
    "iterator": "Only traces read it: draw from it before the call, and pass the values as arrays",
    "label": "If the function computes nothing with it, as with a name, leave it out of the call",
    "slice": "If it varies, pass an array for `start` to `jax.lax.dynamic_slice_in_dim`",
    # Another object that equals itself alone.
    "function": "It is another object of the same code{site}: if it should be the same, {once}",
    "instance": "`{kind}` instances compare by identity: create one and reuse it, or make its "
    "class an `equinox.Module` or a frozen dataclass, which compare by their parts",
    "local partial": "Partials compare by identity: {once}",
    "made by a library": _OWNER,
    "method": "A method of another object is another method: make that object once and reuse it, "
    "or make its class an `equinox.Module`" + _BY_PARTS,
    "optimizer": _OWNER + "; `optax.inject_hyperparams` makes a rate an array of its state",
    "partial": "Partials compare by identity: {once}, or use `eqx.Partial`" + _BY_PARTS,
    "parts": "If they should be the same, make them, or {it}, once, before the first call",
    "transformed": "Each call of `jax.{name}` makes another function: " + _ONCE,
    "transformed, for Equinox": "Each call of `jax.{name}` makes another function: "
    f"{_ONCE}, or use {{filtered}}{_BY_PARTS}",
    "transformed Module": "`jax.{name}` makes a function that isn't a pytree: the arrays of the "
    "{transformed} in it are constants, and each is traced again. Use {filtered}, or pass the "
    "{transformed} as an argument",
    "wrapped again": "Define and wrap it once, outside of loops and of the functions that call it, "
    "and pass what varies as arrays",
    # Another structure.
    "None at first": "If it is `None` at first only, pass what it begins with instead{zeros}",
    "keys": "If its keys vary, have it hold all of them in each call",
    "length": "If its length varies, fill it up to a few lengths, or pass one array, "
    "`jnp.stack({path})`, padded to a few sizes",
    "order": "Insert its keys in the same order each time",
    "container": "Pass the same kind of container each time",
    # Another array.
    "placement": "Place it alike in all calls, by `jax.device_put` or `eqx.filter_shard`",
    "size": "If its size varies, pad it to a few sizes",
    "weak type": "A weak type comes from a Python number: give it a dtype when it is made, as in "
    "`jnp.asarray(..., dtype=jnp.{dtype})`",
    # What no call takes.
    "unhashable": _VALUE,
    "unhashable, the user's": f"{_VALUE}, or give its class an `__eq__` and a `__hash__`",
    "unhashable slice": "pass its start and its stop as numbers, or as a tuple of these",
}


class Change(NamedTuple):
    """A part that differs between two calls: what it was and is, None where it is absent."""

    # Of the latter call; of the former if it is absent there.
    row: Row
    # Of type `Part | ArrayPart | None`, which each remedy narrows.
    old: Any
    new: Any
    # The latter call's.
    description: Description
    # Of the function.
    of_user: bool
    # Whether it is in a model that differs in other ways, too: another model is meant.
    is_resized: bool = False

    @property
    def around(self) -> list[Any]:
        return [row.part for row in self.row.around]

    @property
    def holder(self) -> str:
        """The module of the innermost node around it that is no container; empty without one."""
        return next((part.module for part in self.around if part.module or part.is_opaque), "")

    @property
    def is_users(self) -> bool:
        """True where the code around it is the user's, who can put an array here, say."""
        if self.holder:
            return is_users_module(self.holder)
        # A partial that is wrapped is its caller's, whoever's function it is of.
        return self.of_user or any(
            r.part.nature == "partial" and not r.name for r in self.row.around
        )

    @property
    def is_remade(self) -> bool:
        """True for objects of one code, or one class, that equal themselves alone."""
        old, new = self.old, self.new
        if not (isinstance(old, Part) and isinstance(new, Part) and new.equals_itself_alone):
            return False
        of_one = (old.nature, old.kind, old.made_at) == (new.nature, new.kind, new.made_at)
        # A function that holds something else isn't the same.
        is_function = new.nature == "function" and bool(self.row.name)
        return of_one and (old.text == new.text or not is_function)

    @property
    def owner(self) -> Row | None:
        """The outermost object of a library's class that holds it: the user made that."""
        rows = [row for row in self.row.around if row.part.module]
        made = [*itertools.takewhile(lambda row: not is_users_module(row.part.module), rows)]
        return made[-1] if made else None


def is_made_by_user(part: Part) -> bool:
    """Return whether the user wrote the code of a callable, or the class of anything else."""
    return is_users(part.made_at.filename) if part.made_at else is_users_module(part.module)


def for_change(change: Change, category: str) -> str:
    """Return what to do about a part that differs; empty if there is nothing."""
    new = change.new
    if category == "sharding or device":
        name = "placement"
    elif category == "weak type":
        # The user's array, whoever's function it goes to.
        name = "weak type" if change.is_users or not change.holder else ""
    elif change.is_remade:
        name = _for_remade(change)
    elif not change.is_users:
        # The user can't make it something else everywhere.
        name = ""
    elif category.startswith("static"):
        name = new.nature if new.nature in ("array", "slice") else ""
        if new.nature == "label" and not change.holder and isinstance(change.old, Part):
            name = "label"
        elif _dtype(change.old, new) is not None:
            name = _for_number(change)
    else:
        name = "" if change.is_resized else _for_structure(change)
    return _say(name, change)


def _for_number(change: Change) -> str:
    opaque = [row for row in change.row.around if row.part.is_opaque]
    if opaque:
        # An array in it couldn't be hashed, and a static field of a Module couldn't hold it either.
        if len(opaque) > 1 or opaque[0].is_field:
            return "argument of its own"
        return "in a partial" if opaque[0].part.nature == "partial" else "object"
    if not change.holder:
        return "argument"
    if change.row.is_field:
        return "" if change.is_resized else "static field"
    return "field"


def _for_remade(change: Change) -> str:
    new: Part = change.new
    # A library's that the user wraps: only its author could change another one.
    is_wrapped = not (change.row.name or new.is_local)
    is_made = is_made_by_user(new) or (is_wrapped and new.is_transformed)
    if not (change.of_user or is_made or (is_wrapped and new.nature == "partial")):
        return ""
    if new.nature == "partial":
        return "local partial" if new.is_local else "partial"
    if new.transformed:
        return "transformed Module"
    if new.is_transformed and is_made:
        is_filtered = hasattr(eqx, f"filter_{new.maker.removeprefix('jax.')}")
        return "transformed, for Equinox" if is_filtered and not new.is_local else "transformed"
    if new.nature == "function" and not change.row.name:
        return "wrapped again"
    if not is_made and new.nature != "iterator":
        return _for_owner(change)
    return new.nature


def _for_owner(change: Change) -> str:
    # The state, which mostly comes along, says so.
    is_injected = any(row.path.endswith(".hyperparams") for row in change.description)
    modules = (change.holder, change.new.module)
    # A class may say anything of its module.
    is_optax = any(str(module).startswith("optax.") for module in modules)
    return "optimizer" if is_optax and not is_injected else "made by a library"


def _for_structure(change: Change) -> str:
    old, new = change.old, change.new
    if isinstance(old, ArrayPart) and isinstance(new, ArrayPart):
        is_length = len(old.shape) == len(new.shape) > 0 and old.shape[1:] == new.shape[1:]
        return "size" if is_length and old.shape != new.shape else ""
    if old is None or new is None:
        return "keys" if [part.kind for part in change.around[:1]] == ["dict"] else ""
    if old.nature != "container" or new.nature != "container":
        return "None at first" if old.is_node and old.kind == "None" else ""
    if old.kind != new.kind or old.key == new.key:
        return "order" if old.kind == new.kind else "container"
    below = [row.part.nature for row in _below(change)]
    return "length" if {*below} <= {"container", "number", "traced array"} else ""


def for_remade_parts(row: Row, changes: list[Change]) -> str:
    """Return what to do about objects that one call made, and that a node holds."""
    name = "parts" if any(is_made_by_user(change.new) for change in changes) else ""
    if changes[0].of_user:
        name = name or _for_owner(changes[0])
    return _say(name, changes[0], row)


def for_numbers(change: Change, row: Row) -> str:
    """Return what to do about numbers of which many differ in one container."""
    change = change._replace(row=row)
    name = _for_number(change) if _array(change) else "among others"
    return _say(name if change.is_users else "", change)


def for_unhashable(value: Any) -> str:
    """Return what to do about a static value that can't be hashed."""
    of_user = is_users_module(type(value).__module__)
    kind = " slice" if isinstance(value, slice) else ", the user's" if of_user else ""
    return REMEDIES[f"unhashable{kind}"]


# --- What a remedy names --------------------------------------------------------------------------


def _say(name: str, change: Change, row: Row | None = None) -> str:
    old, new, path = change.old, change.new, (row or change.row).name
    values: dict[str, Any] = {"path": path, "it": f"`{path}`" if path else "it", "zeros": ""}
    if isinstance(new, ArrayPart):
        values["dtype"] = getattr(old, "dtype", "")
        if not (new.weak_type or new.placement or new.dtype.startswith("key")):
            values["zeros"] = f", such as `jnp.zeros({new.shape}, dtype=jnp.{new.dtype})`"
    elif new is not None:
        maker = new.maker if new.is_local and not new.maker.endswith(">") else ""
        name_of, array = new.maker.removeprefix("jax."), _array(change)
        filtered = "Equinox's transformations"
        if hasattr(eqx, f"filter_{name_of}"):
            filtered = f"`eqx.filter_{name_of}`"
        values |= {
            "array": array.format(path),
            "made": array.format("..."),
            "once": f"make it once, outside of `{maker}`" if maker else _ONCE,
            "site": f" ({new.site})" if new.site else "",
            "kind": new.kind,
            "holder": next((part.kind for part in change.around if part.is_opaque), ""),
            "name": name_of,
            "transformed": new.transformed,
            "filtered": filtered,
        }
    return REMEDIES[name].format_map(values) if name else ""


def _below(change: Change) -> list[Row]:
    path = change.row.path
    return [row for row in change.description if any(each.path == path for each in row.around)]


def _array(change: Change) -> str:
    """Return what makes an array of a number, or of all numbers in a container; else nothing."""
    if change.row.part.nature != "container":
        dtype = _dtype(change.old, change.new)
        return f"jnp.asarray({{}}{f', dtype=jnp.{dtype}' if dtype else ''})"
    rows = _below(change)
    leaves = [row for row in rows if not row.part.is_node]
    if not all(row.part.nature == "number" for row in leaves):
        return ""
    # An array has one length at each depth.
    nodes = [change.row, *[row for row in rows if row.part.is_node]]
    lengths = {(len(row.around), row.part.text) for row in nodes}
    depths = {len(row.around) for row in leaves}
    is_list = all(row.part.kind in ("tuple", "list") for row in nodes)
    is_array = is_list and depths == {len(change.row.around) + len(lengths)}
    return "jnp.asarray({})" if is_array else "jax.tree.map(jnp.asarray, {})"


def _dtype(old: Any, new: Any) -> str | None:
    """Return the dtype for a number that varies; None for what is no number, or doesn't fit."""
    parts: Any = [part for part in (old, new) if not isinstance(part, ArrayPart | None)]
    numbers = [_CONVERTED[p.kind](p.text) for p in parts if p.kind in _CONVERTED and p.key is None]
    # A key of random numbers has a dtype that only JAX has.
    is_key = isinstance(old, ArrayPart) and old.dtype.startswith("key")
    if len(numbers) < len(parts) or not numbers or is_key:
        return None
    if isinstance(old, ArrayPart):
        dtype = jnp.dtype(old.dtype)
        if jnp.result_type(dtype, numbers[0]) == dtype and _fits(numbers[0], dtype):
            # Empty where a number has that dtype by itself.
            by_itself = old.weak_type and dtype == jnp.result_type(type(numbers[0]))
            return "" if by_itself else dtype.name
    # Without a dtype, the array would be of a weak type, unlike most others that may come here.
    dtype = jnp.result_type(*map(type, numbers))
    are_numbers = all(part.nature == "number" for part in parts)
    return dtype.name if are_numbers and all(_fits(n, dtype) for n in numbers) else None


_CONVERTED: dict[str, Any] = {**NUMBERS, "bool": "True".__eq__}


def _fits(number: Any, dtype: Any) -> bool:
    value = np.asarray(number)
    with np.errstate(all="ignore"):
        cast = value.astype(dtype)
    is_exact = cast == value or jnp.issubdtype(dtype, jnp.inexact)
    return bool(is_exact and np.isfinite(cast) == np.isfinite(value))
