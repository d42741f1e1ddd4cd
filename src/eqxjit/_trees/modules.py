"""Classes of Modules: which there are, and whether their objects can be read past Equinox."""

import dataclasses
import functools
import inspect
from typing import NamedTuple

import equinox as eqx

_MODULE_METACLASS = type(eqx.Module)


def is_module_class(kind: type) -> bool:
    """Return whether a class is one of Modules, which Equinox never frees."""
    return issubclass(type(kind), _MODULE_METACLASS)


def keeps_fields_plainly(cls: type) -> bool:
    """Return whether a class is one of Modules, with its fields in their `__dict__`."""
    return is_module_class(cls) and _module_keeps_fields_plainly(cls)


class FieldNames(NamedTuple):
    """The names of a Module's fields, each kind in the order of the registry."""

    dynamic: tuple[str, ...]
    static: tuple[str, ...]


# Of classes of Modules only: the cache would keep others alive.
@functools.lru_cache(maxsize=1024)
def field_names(cls: type) -> FieldNames:
    """Return the names of the fields of a class of Modules."""
    fields = dataclasses.fields(cls)
    static = tuple([field.name for field in fields if field.metadata.get("static", False)])
    return FieldNames(tuple([field.name for field in fields if field.name not in static]), static)


@functools.lru_cache(maxsize=1024)
def _module_keeps_fields_plainly(cls: type) -> bool:
    if cls.__getattribute__ is not eqx.Module.__getattribute__:
        return False
    if inspect.getattr_static(cls, "__dict__") is not inspect.getattr_static(
        eqx.Module, "__dict__"
    ):
        return False
    # A property of the same name would be what `setattr` writes to.
    return not any(
        hasattr(inspect.getattr_static(cls, field.name, None), "__set__")
        for field in dataclasses.fields(cls)
    )


# Of classes of Modules only, as above.
@functools.lru_cache(maxsize=1024)
def dynamic_fields(cls: type) -> list[str]:
    """Return the fields of a class of Modules that may hold arrays."""
    fields = dataclasses.fields(cls)
    return [field.name for field in fields if not field.metadata.get("static", False)]
