"""The options of `filter_jit`, checked once, when a function is wrapped."""

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


# Upstream refuses these, since it decides them itself.
_REFUSED = "static_argnums", "static_argnames", "donate_argnums", "in_shardings", "out_shardings"


class Options(NamedTuple):
    """The options of one `filter_jit`, each as the argument of that name."""

    donate: Donate = "none"
    block: bool = False
    maxsize: int | None = 1024
    max_traces: int | None = None
    # Those of `jax.jit`, sorted by name: in any order they are the same options.
    jit_arguments: tuple[tuple[str, Any], ...] = ()


_WAYS_TO_DONATE = get_args(Donate)


def check_options(
    donate: Any, block: Any, maxsize: Any, max_traces: Any, jit_arguments: Mapping[str, Any]
) -> Options:
    """Return the options; raise, as upstream does, for what none of them can be."""
    if not isinstance(donate, str) or donate not in _WAYS_TO_DONATE:
        ways = ", ".join(map(repr, _WAYS_TO_DONATE))
        raise ValueError(f"`filter_jit(..., donate=...)` must be one of {ways}; got {donate!r}.")
    if block not in (True, False):
        raise ValueError(f"`filter_jit(..., block=...)` must be True or False; got {block!r}.")
    # A wrong bound would show at the thousandth call.
    for name, count in (("maxsize", maxsize), ("max_traces", max_traces)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
            raise TypeError(f"`{name}` must be None or an int, at least 1; got {count!r}.")
        if count is not None and count < 1:
            raise ValueError(f"`{name}` must be at least 1; got {count}.")
    refused = [f"`{name}`" for name in _REFUSED if name in jit_arguments]
    if refused:
        raise ValueError(
            f"`filter_jit` can't take {', '.join(refused)}: arrays are traced and all else is "
            "static. Pass what varies as an array; donate arrays by `donate=...`; place them by "
            "`jax.device_put` before the call, or by `eqx.filter_shard`."
        )
    if jit_arguments:
        # So that a bad one is refused here, as by upstream, rather than at the first call.
        jax.jit(lambda: None, **jit_arguments)
    return Options(donate, bool(block), maxsize, max_traces, tuple(sorted(jit_arguments.items())))  # type: ignore[arg-type]
