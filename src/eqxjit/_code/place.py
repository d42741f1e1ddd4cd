"""Finds where the function under a wrapper is defined, and whether the user wrote it."""

import inspect
import types
from typing import Any, NamedTuple

from .._interruptions import unless_it_raises
from .call_site import CallSite
from .files import is_users, is_users_module


class Place(NamedTuple):
    """The definition of the function under a wrapper.

    - `module`, `qualname`: of the function, or of the class of whatever else is called. (A Python
        function's file says more than its module.)
    - `site`: the line of a Python function; None for anything else.
    - `code_hash`: tells functions apart whose lines have one name, as in a session.
    """

    module: str
    qualname: str
    site: CallSite | None
    code_hash: int = 0

    @property
    def is_users(self) -> bool:
        """True where the user wrote what is there."""
        return is_users(self.site.filename) if self.site else is_users_module(self.module)


def place_of(fun: Any, home: types.FunctionType | None) -> Place:
    """Return where a function is defined; `home` is the Python function below it, if any."""
    # Decorators have one code for all that they decorate. An object of the user's answers for
    # attributes as it likes.
    unwrapped: Any = unless_it_raises(lambda: home and inspect.unwrap(home), None)
    code = unless_it_raises(lambda: unwrapped and unwrapped.__code__, None)
    if code is None:
        kind = type(fun)
        return Place(kind.__module__, kind.__qualname__, None)
    site = CallSite(code.co_filename, code.co_firstlineno)
    return Place("", code.co_qualname, site, hash(code))
