"""Compiles generated source so that tracebacks and debuggers show it, as for code in a file."""

import itertools
import linecache
import weakref
from collections.abc import Iterable
from typing import Any

#: Where generated files seem to be: in a folder, as those of a package are.
GENERATED_FOLDER = "<eqxjit>"

_LINE_LENGTH = 88

_serial = itertools.count()


def define(name: str, title: str, source: str, namespace: dict[str, Any]) -> Any:
    """Return the function that generated source defines.

    **Arguments:**

    - `name`: the function's name in the source.
    - `title`: what tracebacks call the source, made unique.
    - `source`: Python source that defines the function.
    - `namespace`: its globals. It isn't changed, and doesn't refer to the function, so that the
        function is freed as soon as nothing else does.
    """
    filename = f"{GENERATED_FOLDER}/{title}-{next(_serial)}"
    definitions: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), namespace, definitions)
    function = definitions[name]
    # No modification time: `linecache.checkcache` then leaves the entry alone.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(function.__code__, linecache.cache.pop, filename, None)
    return function


def indented(lines: Iterable[str], levels: int = 1) -> list[str]:
    """Return lines of source, some levels deeper."""
    return [f"{'    ' * levels}{line}" if line else "" for line in lines]


def wrapped(head: str, items: list[str], tail: str) -> list[str]:
    """Return a bracketed list of items as source: on one line, or an item a line.

    A single item in parentheses gets the comma that makes it a tuple.
    """
    is_call = head.endswith("(") and head[-2:-1].isidentifier()
    comma = "," if len(items) == 1 and tail.startswith(")") and not is_call else ""
    line = f"{head}{', '.join(items)}{comma}{tail}"
    if len(line) <= _LINE_LENGTH:
        return [line]
    return [head, *indented(f"{item}," for item in items), tail]
