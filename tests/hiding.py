"""Imports eqxjit as if a private module of JAX or Equinox were gone."""

import builtins
import os

#: The module that `nox -s private` hides from the whole suite; empty for none.
HIDDEN = os.environ.get("EQXJIT_TEST_WITHOUT", "")


def import_without(hidden: str) -> None:
    """Hides a module from `eqxjit._compat` alone: JAX and Equinox themselves need theirs."""
    real_import = builtins.__import__

    def without(name, globals=None, locals=None, fromlist=(), level=0):
        is_hidden = name == hidden or name.startswith(f"{hidden}.")
        if is_hidden and globals and globals.get("__name__") == "eqxjit._compat":
            raise ImportError(name)
        return real_import(name, globals, locals, fromlist, level)

    builtins.__import__ = without
    try:
        import eqxjit  # noqa: F401
    finally:
        builtins.__import__ = real_import
