"""The types of the functions and classes that `_fast/native.c` defines."""

from collections.abc import Callable
from typing import Any

#: The version of what Python relies on in `native.c`.
INTERFACE: int

class Static:
    """Stands for a static object in a spec."""

    key: Any
    ask: bool
    def __init__(self, key: Any, ask: bool = ..., /) -> None: ...

class Flags:
    """The base class of `Program`, with the fields that each warm call reads."""

    number: int
    unread: bool
    must_wait: bool

class Log:
    """The base class of `Log` in `_reports`, with the fields that each logged call reads."""

    clock: Callable[[], float]
    mode: Any
    called: Any
    times: Any
    latest: Any
    begun: float
    offset: float
    logs_until: float
    thread: int
    is_inside: bool
    has_compiled: bool

class Fast:
    """The fast path of an entry."""

    entry: Any
    hits: int
    hits_before: int
    def __init__(
        self,
        entry: Any,
        jitted: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: tuple[Any, ...],
        outs: dict[int, Any],
        n_statics: int,
        n_arrays: int,
        n_fun: int,
        /,
    ) -> None: ...

class JitFunction:
    """The base class of wrappers."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

def setup(*parts: Any) -> None: ...
def call_in_flight(call: Any, jitted: Callable[..., Any], /, *arrays: Any) -> Any: ...
def in_flight(entry: Any = ..., /) -> Any: ...
def copy_small(leaves: list[Any], n_bytes: int, n_bytes_left: int, /) -> list[int]: ...
def connect(
    wrapper: JitFunction,
    otherwise: Callable[..., Any],
    handler: Any = ...,
    fun_arrays: tuple[Any, ...] = ...,
    fun_statics: tuple[Any, ...] = ...,
    names: tuple[str | None, ...] = ...,
    fasts: list[Any] = ...,
    /,
) -> None: ...
def match(
    wrapper: JitFunction, /, *args: Any, **kwargs: Any
) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]] | None: ...
def intercept(
    wrapper: JitFunction, interceptor: Callable[..., Any] = ..., log: Log = ..., /
) -> None: ...
