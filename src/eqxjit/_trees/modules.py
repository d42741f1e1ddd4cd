"""Classes of Modules: which there are, and whether their objects can be read past Equinox."""

import dataclasses
import functools
import inspect
from typing import Any

import equinox as eqx

_MODULE_METACLASS = type(eqx.Module)


def is_module_class(kind: type) -> bool:
    """Return whether a class is one of Modules, which Equinox never frees."""
    return issubclass(type(kind), _MODULE_METACLASS)


# Of classes of Modules only: the caches here would keep others alive.
@functools.lru_cache(maxsize=1024)
def dynamic_fields(cls: type) -> list[str]:
    """Return the fields of a class of Modules that may hold arrays."""
    return [field.name for field in dataclasses.fields(cls) if not _is_static(field)]


@functools.lru_cache(maxsize=1024)
def static_fields(cls: type) -> list[str]:
    """Return the other fields of a class of Modules."""
    return [field.name for field in dataclasses.fields(cls) if _is_static(field)]


def _is_static(field: dataclasses.Field[Any]) -> bool:
    return field.metadata.get("static", False)


def keeps_fields_plainly(cls: type) -> bool:
    """Return whether a class is one of Modules, with its fields in their `__dict__`."""
    return is_module_class(cls) and _module_keeps_fields_plainly(cls)


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
