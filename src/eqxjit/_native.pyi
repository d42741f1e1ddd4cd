"""What `_fast/native.c` offers."""

from collections.abc import Callable
from typing import Any

#: What Python relies on, as a number.
INTERFACE: int

class Static:
    key: Any
    def __init__(self, key: Any, ask: bool = ..., /) -> None: ...

class Flags:
    number: int
    unread: bool
    must_wait: bool

class Fast:
    entry: Any
    def __init__(self, *parts: Any) -> None: ...

class JitFunction:
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

def setup(*parts: Any) -> None: ...
def run(call: Any, action: Callable[..., Any], /, *arrays: Any) -> Any: ...
def in_flight(entry: Any, /) -> Any: ...
def settle_small(leaves: list[Any], n_bytes: int, /) -> list[int]: ...
def connect(wrapper: JitFunction, otherwise: Callable[..., Any], /, *parts: Any) -> None: ...
def intercept(wrapper: JitFunction, interceptor: Callable[..., Any] | None, /) -> None: ...
