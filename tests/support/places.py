"""Whose a file is, and what messages call it, wherever the tests and the package lie."""

import os
import pathlib

import equinox as eqx
import jax

import eqxjit
from eqxjit._places import location
from tests.support.processes import ROOT

#: How paths begin of files of ours, and of generated code.
OUR_FILES = (os.path.join(os.path.dirname(eqxjit.__file__), ""), "<eqxjit>/")

#: The same for JAX's, and for Equinox's.
JAX_FILES = os.path.join(os.path.dirname(jax.__file__), "")
EQUINOX_FILES = os.path.join(os.path.dirname(eqx.__file__), "")


def shown(file: str) -> str:
    """What messages call a file, from the working directory."""
    return location(file, 1).removesuffix(":1")


def in_mlir(file: str) -> str:
    """A path as the text of a lowered program has it."""
    return "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:02X}"
        for byte in os.fsencode(file)
    )


def names_ours(text: str) -> bool:
    """Whether a text, or that of a lowered program, names a file of ours."""
    return any(file in text or in_mlir(file) in text for file in OUR_FILES)


def without_root(text: str) -> str:
    """A text without the path of the checkout, in which any word may be."""
    return text.replace(str(ROOT), "").replace(in_mlir(str(ROOT)), "")


def make_site_packages(parent: pathlib.Path) -> pathlib.Path:
    """A folder into which a package was installed."""
    folder = parent / "site-packages"
    folder.mkdir(parents=True)
    return folder
