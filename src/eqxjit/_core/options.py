"""The options of `filter_jit`. They are checked once, when a function is wrapped."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypedDict, get_args

import jax

Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]


class JitOptions(TypedDict, total=False):
    """The options of `jax.jit` that `filter_jit` passes on."""

    keep_unused: bool
    device: Any
    backend: str | None
    inline: bool
    abstracted_axes: Any
    compiler_options: dict[str, Any] | None


# Options of `jax.jit` that `filter_jit` sets itself or can't support, with what to do instead.
# Equinox rejects them, too.
_STATIC = "Everything but arrays is static. Pass a number that varies as an array."
_DONATE = 'Donate arrays by `donate="all"` or `donate="all-except-first"`.'
_INSTEAD = {
    "static_argnums": _STATIC,
    "static_argnames": _STATIC,
    "donate_argnums": _DONATE,
    "donate_argnames": _DONATE,
    "in_shardings": "Place the arguments by `jax.device_put` before the call.",
    "out_shardings": "Place the results by `eqx.filter_shard` within the function.",
}


class Options(NamedTuple):
    """The options of one `filter_jit`.

    - `donate`, `block`, `maxsize`, `max_traces`: the arguments of `filter_jit` with these names.
    - `jit_arguments`: the options of `jax.jit`, with their names. They are sorted, because their
        order makes no difference.
    """

    donate: Donate = "none"
    block: bool = False
    maxsize: int | None = 1024
    max_traces: int | None = None
    jit_arguments: tuple[tuple[str, Any], ...] = ()


# The options of `filter_jit` that are no options of `jax.jit`.
_OURS = Options._fields[:-1]
_WAYS_TO_DONATE = get_args(Donate)


def check_options(
    donate: Any, block: Any, maxsize: Any, max_traces: Any, jit_arguments: Mapping[str, Any]
) -> Options:
    """Return the options of a `filter_jit`.

    **Raises:**

    - `TypeError` or `ValueError`, if an option is unknown or has a value that isn't allowed.
    """
    if not isinstance(donate, str) or donate not in _WAYS_TO_DONATE:
        ways = ", ".join(map(repr, _WAYS_TO_DONATE))
        raise ValueError(f"`filter_jit(..., donate=...)` must be one of {ways}; got {donate!r}.")
    if block not in (True, False):
        raise ValueError(f"`filter_jit(..., block=...)` must be True or False; got {block!r}.")
    # Without this check, a wrong bound would show only after a thousand calls.
    for name, count in (("maxsize", maxsize), ("max_traces", max_traces)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
            raise TypeError(f"`{name}` must be None or an int, at least 1; got {count!r}.")
        if count is not None and count < 1:
            raise ValueError(f"`{name}` must be at least 1; got {count}.")
    for name, instead in _INSTEAD.items():
        if name in jit_arguments:
            raise ValueError(f"`filter_jit` can't take `{name}`. {instead}")
    if jit_arguments:
        _check_jit_arguments(jit_arguments)
    return Options(donate, bool(block), maxsize, max_traces, tuple(sorted(jit_arguments.items())))  # type: ignore[arg-type]


def _check_jit_arguments(jit_arguments: Mapping[str, Any]) -> None:
    """Raise an error if `jax.jit` rejects one of these options.

    Without this check, the first call would raise the error. Equinox, too, raises it where the
    function is wrapped.
    """
    try:
        jax.jit(lambda: None, **jit_arguments)
    except TypeError:
        known = [*inspect.signature(jax.jit).parameters]
        for name in jit_arguments:
            if name in known:
                continue
            similar = difflib.get_close_matches(name, [*_OURS, *known], 1)
            hint = f" Did you mean `{similar[0]}`?" if similar else ""
            raise TypeError(
                f"filter_jit() got an unexpected keyword argument {name!r}.{hint} It takes "
                f"{', '.join([f'`{each}`' for each in _OURS])} and options of `jax.jit`."
            ) from None
        raise
