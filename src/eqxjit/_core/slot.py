"""The base of what users call: a slot holds what a call runs, with no frame of ours in between."""

from typing import TYPE_CHECKING, Any

from .._code.files import trim
from .._compat import Delegate


def _call(instance: "CallableBySlot", /, *args: Any, **kwargs: Any) -> Any:
    """Call an instance, for those who look `__call__` up on its type."""
    try:
        return instance.__call__(*args, **kwargs)
    except BaseException:
        trim()
        raise


class TypeNamedForChex(type):
    """A metaclass whose classes chex takes for jitted functions, by a word in their names."""

    def __repr__(cls) -> str:
        return f"<class '{cls.__module__}.{cls.__qualname__}', a PjitFunction>"


class _TypeOfCallables(TypeNamedForChex):
    """A metaclass by which `type(f).__call__(f, x)` works, where the class holds the slot."""

    # CPython calls instances, and makes them, without asking this.
    def __getattribute__(cls, name: str) -> Any:
        return _call if name == "__call__" else type.__getattribute__(cls, name)


class CallableBySlot(Delegate, metaclass=_TypeOfCallables):
    """A callable whose slot `__call__`, also `target`, is filled anew as calls get faster."""

    __slots__ = ()

    if not TYPE_CHECKING:
        __call__ = Delegate.target
