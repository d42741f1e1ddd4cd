"""Whose a file is: told by the folders in which packages are, not by a word in its path."""

import sys
import sysconfig

import equinox as eqx
import jax
import numpy as np
import pytest

import eqxjit
from eqxjit._places import is_users, is_users_module
from tests.support.places import make_site_packages


def test_what_is_the_users(monkeypatch):
    # Or that of `python -m pytest`, which isn't.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/home/me/train.py", raising=False)
    stdlib = sysconfig.get_path("stdlib")
    installed = (jax, eqx, np, pytest, eqxjit)
    files = [module.__file__ for module in installed]
    for filename in (*files, f"{stdlib}/json/decoder.py", "<frozen zip>", "<eqxjit>/f-1"):
        assert not is_users(filename)
    for filename in (__file__, "train.py", "<stdin>", "/tmp/ipykernel_1/2.py", "/me/a\0b.py"):
        assert is_users(filename)
    for module in ("builtins", "json", "functools", "jax.numpy", "eqxjit.types", "sys"):
        assert not is_users_module(module)
    for module in (__name__, "__main__", "of nobody", None):
        assert is_users_module(module) == (module is not None)


@pytest.mark.parametrize("name", ["site-packages", "dist-packages"])
def test_packages_are_where_they_were_installed(name, tmp_path):
    """Also where this interpreter doesn't install any itself; a folder's name says nothing."""
    folder = make_site_packages(tmp_path).rename(tmp_path / name)
    assert not is_users(str(folder / "a_library" / "solve.py"))
    for users in ("", "eqxjit/jax", "equinox_models"):
        assert is_users(str(tmp_path / users / "train.py"))
    # An environment in the user's project.
    environment = tmp_path / "project" / ".venv" / "lib"
    environment.mkdir(parents=True)
    installed = make_site_packages(environment)
    assert not is_users(str(installed / "a_library.py"))
    assert is_users(str(tmp_path / "project" / "train.py"))
