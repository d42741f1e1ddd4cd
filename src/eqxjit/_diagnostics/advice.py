"""Says what to do about a difference: every remedy is here, and `test_advice.py` follows each."""

import itertools
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp

from .._places import is_users, is_users_module
from .description import ArrayPart, Description, NodePart, Row, StaticPart

#: Where differences of several kinds come together, this part of a remedy doesn't help.
NOT_STATIC = "in a field that isn't static"
PAD = "If its size varies, pad it to a few sizes"
PLACE = "Put it there once, before the first call, by `jax.device_put` or `eqx.filter_shard`"
_UNLESS = ", unless a shape or control flow depends on it"
_ONCE = "once, at module level, outside `__init__`"
_BY_PARTS = ", which compares by its parts"
_PARTIAL = f", or use `eqx.Partial`{_BY_PARTS}"

# The types of Python's numbers, and what a dtype must be so that each of them fits it.
_NUMBERS: dict[str, tuple[type, type]] = {
    "int": (int, jnp.number),
    "float": (float, jnp.inexact),
    "complex": (complex, jnp.complexfloating),
}


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

    @property
    def holder(self) -> str:
        """The module of the innermost node around it that is no container; empty without one."""
        return next((row.part.module for row in self.row.around if row.part.module), "")

    @property
    def is_users(self) -> bool:
        """True where the code around it is the user's, who can put an array here, say."""
        return is_users_module(self.holder) if self.holder else self.of_user

    @property
    def is_remade(self) -> bool:
        """True for objects that look alike, but equal themselves alone."""
        old, new = self.old, self.new
        are_static = isinstance(old, StaticPart) and isinstance(new, StaticPart)
        return are_static and new.equals_itself_alone and old._replace(key=new.key) == new

    @property
    def owner(self) -> Row | None:
        """The outermost object of a library's class that holds it: the user made that."""
        rows = [row for row in self.row.around if row.part.module]
        made = [*itertools.takewhile(lambda row: not is_users_module(row.part.module), rows)]
        return made[-1] if made else None


def is_made_by_user(part: StaticPart) -> bool:
    """Return whether the user wrote the code of a callable, or the class of anything else."""
    return is_users(part.made_at.filename) if part.made_at else is_users_module(part.module)


def for_remade(change: Change) -> str:
    new: StaticPart = change.new
    # Only the author of a library could change it.
    if not (change.of_user or is_made_by_user(new)):
        return ""
    once = f"make it {_ONCE}"
    if new.kind == "partial":
        return f"Partials compare by identity: {once}{_PARTIAL * (not new.is_local)}"
    if new.transformed or (new.is_transformed and is_made_by_user(new)):
        return _transformed(new)
    if not is_made_by_user(new):
        return _make_owner_once([change], change.row.path.removesuffix(".__wrapped__"))
    if new.kind == "method":
        owner = f"make its class an `equinox.Module`{_BY_PARTS}"
        return f"A method of another object is another method: {once}, or {owner}"
    if new.made_at:
        return (
            f"It is another object of the same code ({new.site}): if it should be the same, {once}"
        )
    remedy = f"`{new.kind}` instances compare by identity: create one and reuse it"
    if change.old.key[:1] != change.new.key[:1]:
        return f"{remedy}, and define its class once"
    return f"{remedy}, or give its class an `__eq__` and a `__hash__`, as a frozen dataclass has"


def for_remade_parts(path: str, changes: list[Change]) -> str:
    """Return what to do about objects that one call made, and that `path` holds."""
    if any(is_made_by_user(change.new) for change in changes):
        return f"If they should be the same, make them, or `{path}`, {_ONCE}"
    return _make_owner_once(changes, path) if changes[0].of_user else ""


def _make_owner_once(changes: list[Change], path: str) -> str:
    remedy = f"If it should be the same, make `{path}` once, and pass that each time"
    first = changes[0]
    # The state, which mostly comes along, says so.
    is_injected = any(row.path.endswith(".hyperparams") for row in first.description)
    modules = [first.holder, *[change.new.module for change in changes]]
    if not is_injected and any(module.startswith("optax.") for module in modules):
        remedy += "; `optax.inject_hyperparams` makes a learning rate an array of its state"
    return remedy


def _transformed(part: StaticPart) -> str:
    name, module = part.maker.removeprefix("jax."), part.transformed
    is_filtered = hasattr(eqx, f"filter_{name}")
    if module:
        use = f"`eqx.filter_{name}`" if is_filtered else "Equinox's transformations"
        return (
            f"`jax.{name}` makes a function that isn't a pytree: the arrays of the {module} in it "
            f"are constants, and each is traced anew. Use {use}, or pass the {module} as an "
            "argument"
        )
    remedy = f"Each call of `jax.{name}` makes another function: make it {_ONCE}"
    return remedy + f", or use `eqx.filter_{name}`{_BY_PARTS}" * (is_filtered and not part.is_local)


def for_opened(part: NodePart) -> str:
    """Return what to do about a callable that compares by identity, and was made again."""
    if part.opened == "partial":
        return f"Partials compare by identity: make it once{_PARTIAL}"
    if not is_users_module(part.module):
        return "Make it once, outside of loops and of the functions that call it"
    name = part.text.rpartition("another ")[2]
    return f"Make the {name} once and reuse it, or make its class an `equinox.Module`{_BY_PARTS}"


def for_held(path: str, part: NodePart) -> str:
    """Return what to do about a value in a callable that compares by identity."""
    if part.opened == "partial":
        use = f"use `eqx.Partial` with `jnp.asarray({path})`"
        return f"Pass `{path}` to the call, as an array, or {use}{_UNLESS}"
    if not is_users_module(part.module):
        return ""
    return f"Make its class an `equinox.Module` with `{path}` as an array{_UNLESS}"


def are_numbers(change: Change) -> bool:
    parts = (change.old, change.new)
    return all(isinstance(part, StaticPart) and part.kind in _NUMBERS for part in parts)


def for_numbers(change: Change, holder: Row) -> str:
    """Return what to do about many numbers in one list."""
    if not change.is_users:
        return ""
    if any(row.part.is_opaque for row in change.row.around):
        return f"If they vary, pass `jnp.asarray({holder.path})` as a separate argument{_UNLESS}"
    if change.row.is_field:
        return f"If they vary, make `{holder.path}` an array, {NOT_STATIC}{_UNLESS}"
    return f"If they vary, pass `jnp.asarray({holder.path})`{_UNLESS}"


def for_function(part: StaticPart | None, of_user: bool) -> str:
    """Return what to do about a function that was made again."""
    if part and part.is_transformed and (part.transformed or of_user or not part.is_local):
        return _transformed(part)
    if not of_user:
        return ""
    return (
        "Define and wrap it once, outside of loops and of the functions that call it, and pass "
        "what varies as arrays"
    )


def for_static(change: Change) -> str:
    if change.is_remade:
        return for_remade(change)
    dtype = _dtype(change.old, change.new)
    # The user can't make it an array everywhere.
    if dtype is None or not change.is_users:
        return ""
    path = change.row.path
    argument = f", dtype=jnp.{dtype}" if dtype else ""
    opaque = [row for row in change.row.around if row.part.is_opaque]
    if opaque:
        # An array in it couldn't be hashed.
        remedy = f"pass `jnp.asarray({path}{argument})` as a separate argument"
        # In a static field a Module couldn't hold arrays either.
        if len(opaque) == 1 and not opaque[0].is_field:
            remedy += f", or make `{opaque[0].part}` an `equinox.Module` with such an array"
        return f"If it varies, {remedy}{_UNLESS}"
    if not change.holder:
        return f"If it varies, pass `jnp.asarray({path}{argument})`{_UNLESS}"
    where = f", {NOT_STATIC}" if change.row.is_field else ""
    return f"If it varies, make `{path}` an array, `jnp.asarray(...{argument})`{where}{_UNLESS}"


def _dtype(old: ArrayPart | StaticPart, new: StaticPart) -> str | None:
    """Return the dtype for a number that varies; None for what is no number, or doesn't fit."""
    if isinstance(old, ArrayPart):
        # A key of random numbers has a dtype that only JAX has.
        if old.dtype.startswith("key"):
            return None
        dtype = jnp.dtype(old.dtype)
        if new.kind == "bool":
            return dtype.name
        kind, widest = _NUMBERS.get(new.kind, (None, bool))
        if kind and jnp.issubdtype(dtype, widest) and _fits(new, dtype):
            # Empty where a number has that dtype by itself.
            return "" if old.weak_type and dtype == jnp.result_type(kind) else dtype.name
    numbers = [part for part in (old, new) if isinstance(part, StaticPart)]
    if not _NUMBERS.keys() >= {part.kind for part in numbers}:
        return None
    # Without a dtype, the array would be of a weak type, unlike most others that may come here.
    dtype = jnp.result_type(*[_NUMBERS[part.kind][0] for part in numbers])
    return dtype.name if all(_fits(part, dtype) for part in numbers) else None


def _fits(part: StaticPart, dtype: jnp.dtype) -> bool:
    if part.module != "builtins" or part.key is not None:
        # A class of the user's, of that name; or a number that is too large to be written out.
        return False
    number = _NUMBERS[part.kind][0](part.text)
    kind, limits = (int, jnp.iinfo) if jnp.issubdtype(dtype, jnp.integer) else (float, jnp.finfo)
    least, most = kind(limits(dtype).min), kind(limits(dtype).max)
    return all(least <= v <= most or not math.isfinite(v) for v in (number.real, number.imag))


def for_shape(change: Change, old: ArrayPart, new: ArrayPart) -> str:
    is_length = len(old.shape) == len(new.shape) > 0 and old.shape[1:] == new.shape[1:]
    return PAD if is_length and change.is_users else ""


def for_weak_type(change: Change, old: ArrayPart) -> str:
    # The user's array, whoever's function it goes to.
    if change.holder and not change.is_users:
        return ""
    return (
        "A weak type comes from a Python number: give it a dtype when it is made, as in "
        f"`jnp.asarray(..., dtype=jnp.{old.dtype})`"
    )
