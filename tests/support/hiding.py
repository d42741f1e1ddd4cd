"""Imports eqxjit as if a private module of JAX or Equinox were gone."""

import ast
import builtins
import os
import re

import pytest

#: The module that `nox -s private` hides from the whole suite; empty for none.
HIDDEN = os.environ.get("EQXJIT_TEST_WITHOUT", "")


#: Where `eqxjit._compat` looks for whether JAX is tracing.
LOOKED_AT_FOR_STAGING = (
    "jax._src.config",
    "jax._src.core",
    "jax._src.interpreters.partial_eval",
)


def needs(*modules: str, why: str):
    """Marks a test of what private modules are for: not run where one of them is hidden."""
    return pytest.mark.skipif(HIDDEN in modules, reason=f"{HIDDEN} is gone: {why}")


def is_private(name: str) -> bool:
    """Whether a name of JAX or Equinox, with the modules before it, isn't for others to use."""
    return name.startswith("jaxlib.") or bool(re.match(r"(jax|equinox)\..*?\b_(?!_)", name))


def imported_names(source: str) -> set[str]:
    """The modules that a file imports, and what it takes from them, as `module.name`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def import_without(hidden: str) -> None:
    """Hides a module, or one name in it, from `eqxjit._compat` alone: JAX itself needs its own."""
    real_import = builtins.__import__

    def without(name, globals=None, locals=None, fromlist=(), level=0):
        names = {name, *(f"{name}.{part}" for part in fromlist or ())}
        is_hidden = name.startswith(f"{hidden}.") or hidden in names
        if is_hidden and globals and globals.get("__name__") == "eqxjit._compat":
            raise ImportError(name)
        return real_import(name, globals, locals, fromlist, level)

    builtins.__import__ = without
    try:
        import eqxjit  # noqa: F401
    finally:
        builtins.__import__ = real_import
