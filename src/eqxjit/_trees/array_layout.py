"""The order of the flat arrays of a call."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

_Flat = TypeVar("_Flat", list[Any], tuple[Any, ...])


class ArrayLayout(NamedTuple):
    """The order in which JAX is given all arrays of a call.

    It is upstream's, in which JAX reuses donated ones: those of the first argument, the function's
    own, and the rest.

    - `n_first`: the number of those of the first argument; 0 where it makes no difference.
    - `n_fun`: the number of the function's own.
    """

    n_first: int
    n_fun: int

    def flat(self, fun: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        """Return what belongs to the function's arrays and to the arguments' in one list."""
        return [*arguments[: self.n_first], *fun, *arguments[self.n_first :]]

    def of_fun(self, flat: _Flat) -> _Flat:
        """Return what belongs to the function's arrays."""
        return flat[self.n_first : self.n_first + self.n_fun]

    def of_arguments(self, flat: _Flat) -> _Flat:
        """Return what belongs to the arguments' arrays."""
        return flat[: self.n_first] + flat[self.n_first + self.n_fun :]
