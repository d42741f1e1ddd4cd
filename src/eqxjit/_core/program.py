"""One program: what one trace became, and what a call has to know of it."""

import itertools
from typing import Any, NamedTuple

from .._compat import may_raise, native
from .._spec.static_key import CONSTANTS
from .._spec.tree import Spec

# C reads the fields of a program without a look-up.
_Base: type = object if native is None else native.Flags

_numbers = itertools.count()


class Program(_Base):
    """What one trace became.

    The traced function returns it to JAX as the key of its arrays, so that each output comes with
    the program that made it. JAX keeps it exactly as long as the program, also as a part of outer
    programs. It holds nothing of the user's, because JAX may keep it for good.

    - `number`: the program's number, unique in this process.
    - `unread`: whether nobody knows yet if the program can raise.
    - `must_wait`: whether each call waits until the program has run, because it can raise.
    """

    __slots__ = ("__weakref__",) if native else ("__weakref__", "must_wait", "number", "unread")

    number: int
    unread: bool
    must_wait: bool

    def __init__(self, must_wait: bool):
        self.number = next(_numbers)
        self.unread = True
        self.must_wait = must_wait

    def __repr__(self) -> str:
        # JAX writes it into the program's text, by which its persistent cache finds programs.
        return "program"

    def read(self, lowered: Any) -> None:
        """Note whether the program can raise, from JAX's lowering of it.

        Two threads may both do so, with the same result. Without a lowering (`None`) the program
        counts as one that can.
        """
        if lowered is None or may_raise(lowered.compiler_ir("stablehlo")):
            self.must_wait = True
        self.unread = False


#: What a traced function returns to JAX: the program, and all arrays of the user's output.
Output = dict[Program, list[Any]]


class Out(NamedTuple):
    """What a program returns besides arrays.

    - `spec`: the spec of the output, as `split` returns it.
    - `statics`: the static objects of the output, with `None` for each that came in.
    - `slots`: for each of them, the index of the static object that came in (see
        `Call.all_statics`); -1 for one that the trace made.
    """

    spec: Spec
    statics: tuple[Any, ...]
    slots: tuple[int, ...]

    def is_as(self, other: "Out") -> bool:
        """Return whether the other may stand for it."""
        if self.slots != other.slots or self.spec != other.spec:
            return False
        pairs = zip(self.statics, other.statics, strict=True)
        # Equal constants serve, because specs tell them apart by their types.
        return all(a is b or type(a) in CONSTANTS for a, b in pairs)
