"""What `_native.c` offers."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")

class Program:
    n_failed: int
    n_failed_late: int
    def __init__(self, instructions: tuple[tuple[Any, ...], ...], /) -> None: ...

class Match:
    def __init__(
        self,
        program: Program,
        own: Callable[[Any], Any] | None,
        numpy: type,
        own_all: Callable[[list[Any]], list[Any] | None] | None,
        fun_arrays: tuple[Any, ...],
        n_first: int,
        n_arrays: int,
        n_kept: int,
        /,
    ) -> None: ...
    def __call__(self, *arguments: Any) -> Any: ...

class Rebuild:
    def __init__(self, program: Program, /) -> None: ...
    def __call__(self, arrays: Any, kept: tuple[Any, ...] = ..., /) -> Any: ...

class Call:
    def __init__(
        self,
        match: Match,
        rebuild: Rebuild,
        jitted: Callable[..., Any],
        names: tuple[str | None, ...],
        defaults: tuple[Any, ...],
        n_positional: int,
        otherwise: Callable[..., Any],
        entry: Any,
        unclassified: Any,
        miss: type[Exception],
        retrace: Callable[..., Any],
        explain: Callable[..., Any],
        finish: Callable[..., Any],
        hits: Iterable[None],
        owner: Any,
        /,
    ) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class Held:
    def __init__(
        self,
        cls: type,
        reading: int,
        names: tuple[str, ...],
        elements: tuple[Any, ...],
        parts: tuple[tuple[int, Any], ...],
        died: list[Any],
        alive: weakref.ref[Any] | None,
        keeps: Any,
        /,
    ) -> None: ...
    def __call__(self, value: Any, /) -> bool: ...

class Delegate:
    target: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

def call_directly(cls: type[_T], /) -> type[_T]: ...

#: What Python relies on, as a number.
INTERFACE: int

def is_same(value: Any, expected: Any, /) -> bool: ...
def has_more_parts(constant: Any, n: int, /) -> bool: ...
def is_constant(value: Any, /) -> bool: ...
def in_flight(entry: Any, /) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None: ...
def plan(
    kinds: tuple[Any, ...],
    arities: tuple[int, ...],
    metadata: tuple[Any, ...],
    classes: tuple[Any, ...],
    leaves: tuple[Any, ...],
    leaf_kind: Any,
    kind_classes: dict[Any, type],
    dynamic: Any,
    missing: Any,
    array: type | None,
    is_array: Callable[[Any], bool] | None,
    shape_of: Callable[[type], tuple[int, tuple[str, ...], int]],
    head_of: Callable[[type, Any, int], tuple[int, int, Any, Any, Any]],
    static_of: Callable[[Any, bool], tuple[tuple[Any, ...], ...]] | None,
    /,
) -> tuple[list[tuple[Any, ...]], int]: ...
