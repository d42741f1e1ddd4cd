"""The function under a wrapper without its arrays, and the table of its entries."""

import functools
import inspect
import types
from collections.abc import Hashable, Sequence
from typing import Any

from .._compat import MISSING
from .._fast.signature import Signature
from .._places import CallSite, Place, place_of, stub_at
from .._spec.tree import Spec, combine, split
from .._text import short
from .errors import with_argument_errors
from .options import Options
from .table import Table, home_of, names_of, tables_of

#: Attributes of a wrapper, by which picklers find out if they take it by name or by value.
STAND_INS = ("__eqxjit_name__", "__eqxjit_content__")


class Function:
    """A function under `filter_jit`, taken apart when it is wrapped; a wrapper's copies share it.

    - `spec`, `statics`: its spec and its static objects.
    - `options`: how it is jitted.
    - `signature`: its parameters.
    - `keeps_arrays`: whether its arrays are never donated; it then shares no table.
    - `attributes`: what a wrapper takes over from it, as with `functools.update_wrapper`.
    """

    def __init__(
        self,
        fun: Any,
        spec: Spec,
        statics: Sequence[Any],
        options: Options,
        table: Table | None = None,
    ):
        self.spec = spec
        self.statics = tuple(statics)
        self.options = options
        self.keeps_arrays = table is not None
        # Found at the first call, because much is wrapped that is never called.
        self._table = table
        self._home = home_of(fun)

        def define() -> tuple[Signature, Place]:
            return Signature(fun, *names_of(fun)), place_of(fun, self._home)

        self.signature: Signature
        if table is None:
            # Much code wraps where it calls, and reading a signature takes longer than such a call.
            self.signature, self._place = tables_of(self._home).get(spec, define)
        else:
            # A frozen function's spec holds its arrays, which nothing else is to hold.
            self.signature, self._place = table.signature, table.place
        self.attributes = {
            attribute: getattr(fun, attribute)
            # Copied when it is wrapped: a wrapper lets its user set them.
            for attribute in functools.WRAPPER_ASSIGNMENTS
            # Equinox's unflatten fills in a mark where a Module has no such attribute.
            if getattr(fun, attribute, MISSING) is not MISSING
        }

    def __repr__(self) -> str:
        # It stands for the function in the structure of a wrapper, which JAX shows in its errors.
        return f"<{self.signature.qualname}{inspect.Signature(self.signature.parameters)}>"

    @property
    def table(self) -> Table:
        """The table of its entries, shared by all that wrap the function so."""
        if self._table is None:
            tables, signature = tables_of(self._home), self.signature

            def make() -> Table:
                return Table(signature, self.options, self._place, tables.number)

            key = self.spec, self.options.key, signature.name, signature.qualname
            self._table = tables.get(key, make)
        return self._table

    def stand_ins(self, content: Any) -> tuple[Any, Any]:
        """Return two functions that stand for a wrapper's name and content when it is pickled."""
        code = stub_at(CallSite("<eqxjit>", 1))
        made: list[Any] = [types.FunctionType(code, {}, name) for name in STAND_INS]
        for stand_in in made:
            stand_in.__module__ = self.attributes["__module__"]
            stand_in.__qualname__ = f"{self.signature.qualname}.{stand_in.__name__}"
        made[1].content = content
        # The same ones each time, in any thread: picklers compare them by identity.
        return vars(self).setdefault("_stand_ins", tuple(made))

    def combine(self, arrays: Sequence[Any]) -> Any:
        return combine(self.spec, iter(arrays), iter(self.statics))

    @property
    def _key(self) -> Hashable:
        # Frozen functions hold arrays by identity.
        return self.options.key, self.spec

    # Copies of a wrapper that JAX unflattens compare by this, as metadata of a pytree node.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and (other is self or other._key == self._key)

    def __hash__(self) -> int:
        return hash(self._key)


def take_apart(fun: Any, options: Options) -> tuple[Function, tuple[Any, ...]]:
    """Return a function as `filter_jit` sees it: without its arrays, and these."""
    if not callable(fun):
        hint = ""
        if isinstance(fun, (classmethod, property)):
            hint = f" Put `@{type(fun).__name__}` above `@filter_jit`."
        elif inspect.ismodule(fun):
            hint = " Name the function in the module."
        raise TypeError(f"`filter_jit` takes a callable; got {short(fun)}.{hint}")

    def take() -> tuple[Function, tuple[Any, ...]]:
        spec, arrays, statics = split(fun)
        return Function(fun, spec, statics, options), tuple(arrays)

    return with_argument_errors(take, lambda: [("fun", fun)])
