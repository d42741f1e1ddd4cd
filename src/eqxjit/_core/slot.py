"""The base of what users call: a slot holds what a call runs, with no frame of ours in between."""

from .._compat import Delegate


class TypeNamedForChex(type):
    """A metaclass whose classes chex takes for jitted functions, by a word in their names."""

    def __repr__(cls) -> str:
        return f"<class '{cls.__module__}.{cls.__qualname__}', a PjitFunction>"


class CallableBySlot(Delegate, metaclass=TypeNamedForChex):
    """A callable whose slot `target`, which a call runs, is filled anew as calls get faster."""

    __slots__ = ()
