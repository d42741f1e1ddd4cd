"""Tells whose a file is, and how messages show it, wherever tests and package are installed."""

import os
import pathlib

import equinox as eqx
import jax

import eqxjit
from eqxjit._places import location
from tests.support.processes import ROOT

#: How the paths of our files, and of generated code, begin.
OUR_FILES = (os.path.join(os.path.dirname(eqxjit.__file__), ""), "<eqxjit>/")

#: The same for the files of JAX and of Equinox.
JAX_FILES = os.path.join(os.path.dirname(jax.__file__), "")
EQUINOX_FILES = os.path.join(os.path.dirname(eqx.__file__), "")


def shown(file: str) -> str:
    """Return a file's path as messages show it, relative to the working directory."""
    return location(file, 1).removesuffix(":1")


def in_mlir(file: str) -> str:
    """Return a path as the text of a lowered program writes it."""
    return "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:02X}"
        for byte in os.fsencode(file)
    )


def names_ours(text: str) -> bool:
    """Return whether a text, or the text of a lowered program, names a file of eqxjit."""
    return any(file in text or in_mlir(file) in text for file in OUR_FILES)


def without_root(text: str) -> str:
    """Return a text without the path of the checkout, which may contain any word."""
    return text.replace(str(ROOT), "").replace(in_mlir(str(ROOT)), "")


def make_site_packages(parent: pathlib.Path) -> pathlib.Path:
    """Create a folder with an installed package."""
    folder = parent / "site-packages"
    folder.mkdir(parents=True)
    return folder
