"""Says what to do about a difference: every remedy is here, and `test_advice.py` follows each."""

import itertools
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp

from .._places import is_users, is_users_module
from .description import NUMBERS, ArrayPart, Description, NodePart, Row, StaticPart

_BY_PARTS = ", which compares by its parts"
_UNLESS = ", unless a shape or control flow depends on it"
_SEPARATELY = "If it varies, pass `{array}` as a separate argument"
_OWNER = "If it should be the same, make {it} once, before the first call, and use that each time"

#: What there is to be done, by a name; a row of `test_advice.py` follows each.
REMEDIES = {
    # A number, or many in one container; the last ones where JAX doesn't look into what holds it.
    "argument": "If it varies, pass `{array}`" + _UNLESS,
    "field": "If it varies, make `{path}` an array, `{made}`" + _UNLESS,
    "static field": "If it varies, make `{path}` an array, `{made}`, in a field that isn't static"
    + _UNLESS,
    "argument of its own": _SEPARATELY + _UNLESS,
    "object": _SEPARATELY + ", or make `{holder}` an `equinox.Module` with such an array" + _UNLESS,
    "in a partial": _SEPARATELY + ", or use `eqx.Partial` with such an array" + _UNLESS,
    "among others": "If they vary, pass these numbers as one array of their own" + _UNLESS,
    # Another static value.
    "array": "An array in a static field is a constant: keep it in a field that isn't static",
    "iterator": "It is read while the function is traced, and never again: draw from it before the "
    "call, and pass the values as arrays",
    "label": "If the function computes nothing with it, as with a name, leave it out of the call",
    "slice": "If it varies, pass its start as an array and its length as a number, as "
    "`jax.lax.dynamic_slice_in_dim` takes them",
    # Another object that looks the same, or holds another number.
    "class": "`{kind}` instances compare by identity: create one and reuse it, and define its "
    "class once",
    "function": "It is another object of the same code{site}: if it should be the same, make it "
    "{once}",
    "instance": "`{kind}` instances compare by identity: create one and reuse it, or make its "
    "class an `equinox.Module` or a frozen dataclass, which compare by their parts",
    "local partial": "Partials compare by identity: make it {once}",
    "made by a library": _OWNER,
    "method": "A method of another object is another method: make that object once and reuse it, "
    "or make its class an `equinox.Module`" + _BY_PARTS,
    "optimizer": _OWNER
    + "; `optax.inject_hyperparams` makes a learning rate an array of its state",
    "partial": "Partials compare by identity: make it {once}, or use `eqx.Partial`" + _BY_PARTS,
    "parts": "If they should be the same, make them, or {it}, once, before the first call",
    "transformed": "Each call of `jax.{transformation}` makes another function: make it once, "
    "before the first call",
    "transformed, for Equinox": "Each call of `jax.{transformation}` makes another function: make "
    "it once, before the first call, or use `eqx.filter_{transformation}`" + _BY_PARTS,
    "transformed Module": "`jax.{transformation}` makes a function that isn't a pytree: the arrays "
    "of the {transformed} in it are constants, and each is traced again. Use {equinox}, or pass "
    "the {transformed} as an argument",
    "wrapped again": "Define and wrap it once, outside of loops and of the functions that call it, "
    "and pass what varies as arrays",
    # Another structure.
    "None at first": "If it is `None` at first only, pass from the start what it begins "
    "with{zeros}",
    "keys": "If its keys vary, have it hold all of them in each call",
    "length": "If its length varies, fill it up to a few lengths, or pass one array, "
    "`jnp.stack({path})`, padded to a few sizes",
    "order": "Insert its keys in the same order each time",
    "container": "Pass the same kind of container each time",
    # Another array.
    "placement": "Place it the same way from the first call on, by `jax.device_put` or "
    "`eqx.filter_shard`",
    "size": "If its size varies, pad it to a few sizes",
    "weak type": "A weak type comes from a Python number: give it a dtype when it is made, as in "
    "`jnp.asarray(..., dtype=jnp.{dtype})`",
    # What no call takes.
    "unhashable": "make it an array, a tuple or a frozen dataclass",
    "unhashable, of a class of the user's": "make it an array, a tuple or a frozen dataclass, or "
    "give its class an `__eq__` and a `__hash__`",
    "unhashable slice": "pass its start and its stop as numbers, or as a tuple of these",
}

_LABELS = ("datetime", "pathlib", "uuid")


class Change(NamedTuple):
    """A part that differs between two calls: what it was and is, None where it is absent."""

    # Of the latter call; of the former if it is absent there.
    row: Row
    # Of type `Part | None`, which each remedy narrows.
    old: Any
    new: Any
    # The latter call's.
    description: Description
    # Of the function.
    of_user: bool
    # Whether it is in a model that differs in other ways, too: another model is meant.
    is_resized: bool = False

    @property
    def path(self) -> str:
        return self.row.name

    @property
    def around(self) -> list[Any]:
        return [row.part for row in self.row.around]

    @property
    def holder(self) -> str:
        """The module of the innermost node around it that is no container; empty without one."""
        return next((part.module for part in self.around if part.module or part.nature), "")

    @property
    def is_users(self) -> bool:
        """True where the code around it is the user's, who can put an array here, say."""
        return is_users_module(self.holder) if self.holder else self.of_user

    @property
    def is_remade(self) -> bool:
        """True for objects of one code, or one class, that equal themselves alone."""
        old, new = self.old, self.new
        if not isinstance(new, (StaticPart, NodePart)) or type(old) is not type(new):
            return False
        if new.nature not in ("function", "instance", "method", "partial", "iterator"):
            return False
        # A function may hold something else.
        is_alike = old.text == new.text or new.nature == "iterator" or not self.path
        of_one = (old.nature, old.kind, old.made_at) == (new.nature, new.kind, new.made_at)
        return of_one and (is_alike or isinstance(new, NodePart))

    @property
    def owner(self) -> Row | None:
        """The outermost object of a library's class that holds it: the user made that."""
        rows = [row for row in self.row.around if row.part.module]
        made = [*itertools.takewhile(lambda row: not is_users_module(row.part.module), rows)]
        return made[-1] if made else None


def is_made_by_user(part: StaticPart | NodePart) -> bool:
    """Return whether the user wrote the code of a callable, or the class of anything else."""
    return is_users(part.made_at.filename) if part.made_at else is_users_module(part.module)


def for_change(change: Change, category: str) -> str:
    """Return what to do about a part that differs; empty if there is nothing."""
    old, new = change.old, change.new
    if category in _OF_ARRAYS:
        name = _OF_ARRAYS[category](change)
    elif isinstance(new, StaticPart) and not isinstance(old, NodePart | None):
        name = _for_static(change)
    elif change.is_remade:
        name = _for_remade(change)
    else:
        name = _for_structure(change)
    return _say(name, change) if name else ""


def _for_size(change: Change) -> str:
    old, new = change.old.shape, change.new.shape
    is_length = len(old) == len(new) > 0 and old[1:] == new[1:]
    return "size" if is_length and change.is_users and not change.is_resized else ""


def _for_weak_type(change: Change) -> str:
    # The user's array, whoever's function it goes to.
    return "" if change.holder and not change.is_users else "weak type"


_OF_ARRAYS = {
    "shape": _for_size,
    "dtype": lambda change: "",
    "weak type": _for_weak_type,
    "sharding or device": lambda change: "placement",
}


def _for_static(change: Change) -> str:
    new: StaticPart = change.new
    if change.is_remade:
        return _for_remade(change)
    # The user can't make it something else everywhere.
    if not change.is_users:
        return ""
    if new.nature in ("array", "slice"):
        return new.nature
    is_label = new.kind in ("str", "bytes") or new.module.partition(".")[0] in _LABELS
    if is_label and not change.holder and isinstance(change.old, StaticPart):
        return "label"
    return "" if _dtype(change.old, new) is None else _where(change)


def _where(change: Change) -> str:
    """Return the remedy for numbers by what holds them."""
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
    new: StaticPart | NodePart = change.new
    is_own = is_made_by_user(new)
    # A library's that the user wraps: only its author could change another one.
    is_of_names = not new.is_local and (new.is_transformed or new.nature == "partial")
    is_wrapped = not change.path and is_of_names
    if not (change.of_user or is_own or is_wrapped):
        return ""
    if new.nature == "iterator":
        return "iterator"
    if new.nature == "function" and not (change.path or new.is_transformed):
        return "wrapped again"
    if new.nature == "partial":
        return "local partial" if new.is_local else "partial"
    if new.transformed or (new.is_transformed and (is_own or is_wrapped)):
        return _for_transformed(new)
    if not is_own:
        return _for_owner(change)
    if new.nature == "instance" and change.old.key != new.key:
        return "class"
    return new.nature


def _for_owner(change: Change) -> str:
    # The state, which mostly comes along, says so.
    is_injected = any(row.path.endswith(".hyperparams") for row in change.description)
    is_optax = any(module.startswith("optax.") for module in (change.holder, change.new.module))
    return "optimizer" if is_optax and not is_injected else "made by a library"


def _for_transformed(part: Any) -> str:
    if part.transformed:
        return "transformed Module"
    is_filtered = hasattr(eqx, f"filter_{part.maker.removeprefix('jax.')}")
    return "transformed, for Equinox" if is_filtered and not part.is_local else "transformed"


def _for_structure(change: Change) -> str:
    old, new = change.old, change.new
    if not change.is_users or change.is_resized:
        return ""
    if old is None or new is None:
        holder = change.row.around[:1]
        return "keys" if holder and holder[0].part.key == "dict" else ""
    if isinstance(old, NodePart) and old.text == "None":
        return "None at first"
    if not (isinstance(old, NodePart) and isinstance(new, NodePart)):
        return ""
    if not (old.is_container and new.is_container):
        return ""
    if old.key == new.key or isinstance(old.key, str):
        return "order" if isinstance(new.key, str | None) else ""
    if old.key[0] != new.key[0]:
        return "container"
    below = [row.part for row in _below(change.description, change.row)]
    is_data = all(isinstance(part, ArrayPart) or _is_number(part) for part in below)
    return "length" if is_data else ""


def for_remade_parts(row: Row, changes: list[Change]) -> str:
    """Return what to do about objects that one call made, and that a node holds."""
    if any(is_made_by_user(change.new) for change in changes):
        return _say("parts", changes[0], row)
    return _say(_for_owner(changes[0]), changes[0], row) if changes[0].of_user else ""


def for_numbers(changes: list[Change], row: Row) -> str:
    """Return what to do about numbers of which many differ in one container."""
    change = changes[0]._replace(row=row)
    if not change.is_users:
        return ""
    return _say(_where(change) if _array(change) else "among others", change)


def for_unhashable(value: Any) -> str:
    """Return what to do about a static value that can't be hashed, or compared."""
    if isinstance(value, slice):
        return REMEDIES["unhashable slice"]
    of_user = is_users_module(type(value).__module__)
    return REMEDIES["unhashable, of a class of the user's" if of_user else "unhashable"]


# --- What a remedy names --------------------------------------------------------------------------


def _say(name: str, change: Change, row: Row | None = None) -> str:
    new = change.new
    path = (row or change.row).name
    values: dict[str, Any] = {"path": path, "it": f"`{path}`" if path else "it"}
    if isinstance(new, (StaticPart, NodePart)):
        values |= _of_static(change, new)
    if isinstance(new, ArrayPart):
        is_plain = not (new.weak_type or new.placement or new.dtype.startswith("key"))
        zeros = f", such as `jnp.zeros({new.shape}, dtype=jnp.{new.dtype})`"
        values |= {"zeros": zeros if is_plain else "", "dtype": getattr(change.old, "dtype", "")}
    return REMEDIES[name].format_map({"zeros": "", **values})


def _of_static(change: Change, new: Any) -> dict[str, Any]:
    maker = new.maker if new.is_local and not new.maker.endswith(">") else ""
    opaque = [part for part in change.around if part.is_opaque]
    transformation = new.maker.removeprefix("jax.")
    is_filtered = hasattr(eqx, f"filter_{transformation}")
    return {
        "array": _array(change),
        "made": _array(change, "..."),
        "once": f"once, outside of `{maker}`" if maker else "once, before the first call",
        "site": f" ({new.site})" if isinstance(new, StaticPart) and new.site else "",
        "kind": new.kind,
        "holder": opaque[0].kind if opaque else "",
        "transformation": transformation,
        "transformed": new.transformed,
        "equinox": f"`eqx.filter_{transformation}`" if is_filtered else "Equinox's transformations",
    }


def _below(description: Description, row: Row) -> list[Row]:
    return [each for each in description if any(a.path == row.path for a in each.around)]


def _is_number(part: Any) -> bool:
    return isinstance(part, StaticPart) and part.nature == "number"


def _array(change: Change, of: str = "") -> str:
    """Return what makes an array of a number, or of all numbers in a container; else nothing."""
    of = of or change.path
    rows = _below(change.description, change.row)
    leaves = [row for row in rows if not isinstance(row.part, NodePart)]
    nodes = [change.row, *[row for row in rows if isinstance(row.part, NodePart)]]
    if not rows:
        dtype = _dtype(change.old, change.new)
    elif all(_is_number(row.part) for row in leaves):
        # An array has one length at each depth.
        lengths = {(len(row.around), str(row.part)) for row in nodes}
        depths = {len(row.around) for row in leaves}
        is_list = all(isinstance(row.part.key, tuple) for row in nodes)
        if not is_list or depths != {len(change.row.around) + len(lengths)}:
            return f"jax.tree.map(jnp.asarray, {of})"
        dtype = None
    else:
        return ""
    return f"jnp.asarray({of}, dtype=jnp.{dtype})" if dtype else f"jnp.asarray({of})"


def _dtype(*parts: Any) -> str | None:
    """Return the dtype for a number that varies; None for what is no number, or doesn't fit."""
    old, new = parts[0], parts[-1]
    if isinstance(old, ArrayPart):
        # A key of random numbers has a dtype that only JAX has.
        if old.dtype.startswith("key"):
            return None
        dtype = jnp.dtype(old.dtype)
        if new.kind == "bool":
            return dtype.name
        kinds = {"int": jnp.number, "float": jnp.inexact, "complex": jnp.complexfloating}
        if _is_number(new) and jnp.issubdtype(dtype, kinds[new.kind]) and _fits(new, dtype):
            # Empty where a number has that dtype by itself.
            by_itself = old.weak_type and dtype == jnp.result_type(NUMBERS[new.kind])
            return "" if by_itself else dtype.name
        parts = (new,)
    if not all(map(_is_number, parts)):
        return None
    # Without a dtype, the array would be of a weak type, unlike most others that may come here.
    dtype = jnp.result_type(*{NUMBERS[part.kind] for part in parts})
    return dtype.name if all(_fits(part, dtype) for part in parts) else None


def _fits(part: StaticPart, dtype: jnp.dtype) -> bool:
    number = NUMBERS[part.kind](part.text)
    kind, limits = (int, jnp.iinfo) if jnp.issubdtype(dtype, jnp.integer) else (float, jnp.finfo)
    least, most = kind(limits(dtype).min), kind(limits(dtype).max)
    return all(least <= v <= most or not math.isfinite(v) for v in (number.real, number.imag))
