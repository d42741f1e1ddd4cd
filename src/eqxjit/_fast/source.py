"""Generated source: its names, and how it is compiled so that tracebacks and debuggers show it."""

import itertools
import keyword
import linecache
import re
import string
import unicodedata
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from .._places import GENERATED_FOLDER

_LINE_LENGTH = 88

# The end of a path says most.
_LONGEST_NAME = 22

NUL = "\0"

_serial = itertools.count()

#: A metaclass may refuse a class's.
NAME = vars(type)["__name__"]


def define(name: str, title: str, source: str, namespace: dict[str, Any]) -> Any:
    """Return the function of a name that source defines; tracebacks call the source by a title."""
    # Names may hold anything, Python's compiler takes no NUL.
    filename = f"{GENERATED_FOLDER}/{title.replace(NUL, '?')}-{next(_serial)}"
    # Not into the function's globals, because the circle would keep it until garbage collection.
    definitions: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), namespace, definitions)
    function = definitions[name]
    # No modification time: `linecache.checkcache` then leaves the entry alone.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(function.__code__, linecache.cache.pop, filename, None)
    return function


def indented(lines: Iterable[str], levels: int = 1) -> list[str]:
    return [f"{'    ' * levels}{line}" if line else "" for line in lines]


def wrapped(head: str, items: list[str], tail: str) -> list[str]:
    """Return a bracketed list of items as source: on one line, or an item a line.

    A single item in parentheses gets the comma that makes it a tuple.
    """
    if not items:
        head = head.rstrip(", ")
    is_tuple = head.endswith("(") and not head[-2:-1].isidentifier()
    comma = "," if len(items) == 1 and is_tuple and tail.startswith(")") else ""
    line = f"{head}{', '.join(items)}{comma}{tail}"
    if len(line) <= _LINE_LENGTH:
        return [line]
    return [head.rstrip(), *indented(f"{item}," for item in items), tail]


def filled(template: str, parts: Mapping[str, Any]) -> str:
    """Return a template of source with names and code in the place of what is in braces.

    A list goes over several lines: alone those of a block, within brackets an item each.
    """
    lines: list[str] = []
    for line in template.splitlines():
        code = line.lstrip()
        level = (len(line) - len(code)) // 4
        fields = [name for _, name, _, _ in string.Formatter().parse(code) if name]
        listed = [name for name in fields if type(parts[name]) is list]
        if not listed:
            block = [code.format_map(parts)]
        elif code == f"{{{listed[0]}}}":
            block = parts[listed[0]]
        else:
            head, tail = code.split(f"{{{listed[0]}}}")
            block = wrapped(head.format_map(parts), parts[listed[0]], tail.format_map(parts))
        lines += indented(block, level)
    return "\n".join(lines) + "\n"


def can_be_written(name: str) -> bool:
    """Return whether source can have an attribute or a parameter of this name."""
    # Python reads `µ` (micro) as `μ` (mu).
    is_read_so = unicodedata.normalize("NFKC", name) == name
    return name.isidentifier() and not keyword.iskeyword(name) and is_read_so


class Constants:
    """A source of names, none of them twice, and the values of those that are constants."""

    def __init__(self, taken: Iterable[str] = ()):
        #: The constants by name: the globals of the generated function.
        self.namespace: dict[str, Any] = {}
        self._taken = {*taken}
        self._by_id: dict[int, str] = {}
        # The last number of each name, because a tree may have thousands of leaves of one name.
        self._numbers: dict[str, int] = {}

    def variable(self, hint: str) -> str:
        """Return a name like the hint, made an identifier, and numbered where it is taken."""
        base = re.sub(r"\W+", "_", hint, flags=re.ASCII)[-_LONGEST_NAME:].strip("_") or "value"
        if base[0].isdigit() or keyword.iskeyword(base):
            base = f"_{base}"
        name = base
        while name in self._taken:
            number = self._numbers[base] = self._numbers.get(base, 1) + 1
            name = f"{base}_{number}"
        self._taken.add(name)
        return name

    def named(self, value: Any) -> str:
        name = NAME.__get__(value) if isinstance(value, type) else value.__name__
        return self.constant(name, value)

    def constant(self, hint: str, value: Any) -> str:
        """Return the name of a constant; the same one for the same object."""
        name = self._by_id.get(id(value))
        if name is None:
            name = self._by_id[id(value)] = self.variable(hint)
            self.namespace[name] = value
        return name
