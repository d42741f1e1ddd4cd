"""The options of `filter_jit`, checked once, when a function is wrapped."""

import dataclasses
import functools
import inspect
from collections.abc import Hashable, Mapping
from typing import Any, Literal, TypedDict, get_args

import jax

from .._spec.static_key import static_key

Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]


class JitOptions(TypedDict, total=False):
    """The options of `jax.jit` that `filter_jit` passes on."""

    keep_unused: bool
    device: Any
    backend: str | None
    inline: bool
    abstracted_axes: Any
    compiler_options: dict[str, Any] | None


# Upstream refuses these, since it decides them itself: what to do instead.
_BY_TYPE = "To trace a value, pass it as an array; to make it static, as anything else."
_PLACED = (
    "Place arrays by `jax.device_put` before the call, or by `eqx.filter_shard` before it or in "
    "the function."
)
_REFUSED = {
    "static_argnums": _BY_TYPE,
    "static_argnames": _BY_TYPE,
    "donate_argnums": "Use `donate=...` to donate arrays.",
    "in_shardings": _PLACED,
    "out_shardings": _PLACED,
}

DEFAULT_MAXSIZE = 1024


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one `filter_jit`, each as the argument of that name."""

    donate: Donate
    block: bool
    maxsize: int | None
    max_traces: int | None
    # Those of `jax.jit`, sorted by name: in any order they are the same options.
    jit_arguments: tuple[tuple[str, Any], ...]

    @functools.cached_property
    def key(self) -> Hashable:
        """Equal for options under which one program may serve: `==` takes 1 and True for one."""
        return static_key(self._chosen)

    @property
    def _chosen(self) -> tuple[Any, ...]:
        return (self.donate, self.block, self.maxsize, self.max_traces, self.jit_arguments)

    def __reduce__(self) -> tuple[type["Options"], tuple[Any, ...]]:
        # Without `key`, which may hold weak references.
        return Options, self._chosen


def check_options(
    donate: Any, block: Any, maxsize: Any, max_traces: Any, jit_arguments: Mapping[str, Any]
) -> Options:
    """Return the options; raise, as upstream does, for what none of them can be."""
    chosen = (donate, block, maxsize, max_traces, tuple(sorted(jit_arguments.items())))
    # Cached, because much code wraps where it calls, with the same options each time.
    check = _checked
    try:
        hash(chosen)
    except TypeError:
        # As `compiler_options`, a dict, are.
        check = _check
    return check(*chosen)


def _check(
    donate: Any, block: Any, maxsize: Any, max_traces: Any, arguments: tuple[tuple[str, Any], ...]
) -> Options:
    jit_arguments = dict(arguments)
    refused = [name for name in _REFUSED if name in jit_arguments]
    if refused:
        raise ValueError(
            f"`filter_jit` can't take {', '.join(f'`{name}`' for name in refused)}: arrays are "
            f"traced and all else is static. {' '.join({_REFUSED[name]: 0 for name in refused})}"
        )
    if not isinstance(donate, str) or donate not in get_args(Donate):
        ways = ", ".join(map(repr, get_args(Donate)))
        raise ValueError(f"`filter_jit(..., donate=...)` must be one of {ways}; got {donate!r}.")
    if block not in (True, False):
        raise ValueError(f"`filter_jit(..., block=...)` must be True or False; got {block!r}.")
    # A wrong bound would show at the thousandth call.
    for name, count in {"maxsize": maxsize, "max_traces": max_traces}.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
            raise TypeError(f"`{name}` must be None or an int, at least 1; got {count!r}.")
        if count is not None and count < 1:
            raise ValueError(f"`{name}` must be at least 1; got {count}.")
    for name in jit_arguments:
        if name not in inspect.signature(jax.jit).parameters:
            raise TypeError(
                f"`filter_jit` has no option `{name}`. It has `donate`, `block`, `maxsize` and "
                "`max_traces`, and those of `jax.jit`."
            )
    if jit_arguments:
        # So that a bad value is refused here, as by upstream, rather than at the first call.
        jax.jit(lambda: None, **jit_arguments)
    return Options(donate, bool(block), maxsize, max_traces, arguments)  # type: ignore[arg-type]


# Much code wraps where it calls, with the same options each time.
_checked = functools.lru_cache(maxsize=64, typed=True)(_check)
