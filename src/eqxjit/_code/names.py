"""The names of a generated function: its variables, and the constants that it refers to."""

import keyword
import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any


def as_read(name: str) -> str:
    """Return Python's name for an identifier in source: `µ` (micro) is `μ` (mu) to it."""
    return unicodedata.normalize("NFKC", name)


def can_be_written(name: str) -> bool:
    """Return whether source can have an attribute or a parameter of this name."""
    return name.isidentifier() and not keyword.iskeyword(name) and as_read(name) == name


# The end of a path says most.
_LONGEST_NAME = 22


class Constants:
    """A source of names, none of them twice, and the values of those that are constants.

    - `namespace`: the constants by name: the globals of the generated function.
    """

    __slots__ = ("_by_id", "_numbers", "_taken", "namespace", "tick")

    def __init__(self, taken: Iterable[str] = ()):
        #: Called for each name: what writes source for too long can be stopped so.
        self.tick: Callable[[], None] = lambda: None
        self.namespace: dict[str, Any] = {}
        self._taken = {as_read(name) for name in taken}
        self._by_id: dict[int, str] = {}
        #: The last number of each name.
        self._numbers: dict[str, int] = {}

    def helper(self, verb: str, kind: type) -> str:
        """Return a name for a function that does something to objects of a class."""
        return self.variable(f"{verb}_{kind.__name__[: _LONGEST_NAME - len(verb) - 2]}s")

    def variable(self, hint: str) -> str:
        """Return a name like the hint, made an identifier, and numbered where it is taken."""
        self.tick()
        base = re.sub(r"\W+", "_", as_read(hint)).strip("_")
        while len(base) > _LONGEST_NAME and "_" in base:
            base = base.split("_", 1)[1].lstrip("_")
        name = base = base[-_LONGEST_NAME:] or "value"
        if base[0].isdigit() or keyword.iskeyword(base):
            name = base = f"_{base}"
        while name in self._taken:
            number = self._numbers[base] = self._numbers.get(base, 1) + 1
            name = f"{base}_{number}"
        self._taken.add(name)
        return name

    def named(self, value: Any) -> str:
        """Return the name of a class or a function, which it has itself."""
        return self.constant(value.__name__, value)

    def key(self, hint: str, key: Any) -> str:
        """Return the source of a dict's key."""
        return repr(key) if type(key) in (str, int) else self.constant(hint, key)

    def constant(self, hint: str, value: Any) -> str:
        """Return the name of a constant; the same one for the same object."""
        name = self._by_id.get(id(value))
        if name is None:
            name = self._by_id[id(value)] = self.variable(hint)
            self.namespace[name] = value
        return name
