"""What is installed, and what type checkers see of it."""

import ast
import doctest
import importlib
import importlib.metadata
import importlib.resources
import inspect
import pathlib
import pickle
import pkgutil
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

import eqxjit
from tests.support.processes import ROOT, run, start

_DOWNSTREAM = pathlib.Path(__file__).parent / "downstream"


def test_only_runtime_dependencies_are_required():
    required = map(Requirement, importlib.metadata.requires("eqxjit"))
    names = {requirement.name for requirement in required if requirement.marker is None}
    assert names == {"equinox", "jax", "jaxlib", "jaxtyping"}


def test_the_version_is_said_once():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert importlib.metadata.version("eqxjit") == version
    assert eqxjit.__version__ == version
    sources = pathlib.Path(eqxjit.__file__).parent.rglob("*.py")
    assert not [file.name for file in sources if version in file.read_text()]


def test_importing_does_not_look_up_the_version():
    program = """
        import importlib.metadata, jax, equinox

        importlib.metadata.version = None
        import eqxjit

        assert "__version__" not in vars(eqxjit)
        assert not hasattr(eqxjit, "__no_such_name__")
    """
    run(program)


PUBLIC_CLASSES = [name for name in eqxjit.__all__ if inspect.isclass(getattr(eqxjit, name))]


def test_all_public_names_are_listed():
    public = [name for name in dir(eqxjit) if not name.startswith("_")]
    assert sorted(public) == sorted(eqxjit.__all__)
    assert len(PUBLIC_CLASSES) > 10


@pytest.mark.parametrize("name", PUBLIC_CLASSES)
def test_a_public_class_says_where_it_is_public(name):
    kind = getattr(eqxjit, name)
    assert (kind.__module__, kind.__name__) == ("eqxjit", name)
    assert pickle.loads(pickle.dumps(kind)) is kind


def test_a_public_function_says_where_it_is_public():
    functions = {*eqxjit.__all__} - {*PUBLIC_CLASSES}
    for name in functions:
        function = getattr(eqxjit, name)
        assert pickle.loads(pickle.dumps(function)) is function
        assert function.__module__ == "eqxjit"
        # Not by way of a private module, which may move.
        assert b"eqxjit._" not in pickle.dumps(function)
    assert len(functions) > 6


def test_what_a_user_meets_is_of_a_public_class():
    wrapped = eqxjit.filter_jit(len)
    lowered = wrapped.lower((1, 2))
    made = [wrapped, wrapped.__get__(()), lowered, lowered.compile(), eqxjit.freeze(len)]
    with eqxjit.compile_report() as report:
        made += [wrapped.cache_info(), wrapped.traces()[0], wrapped.traces()[0].seconds, report]
    made += [eqxjit.install(), wrapped.traces()[0].call_site]
    eqxjit.uninstall()
    for thing in made:
        assert type(thing).__module__ == "eqxjit", type(thing)
        assert type(thing).__name__ in eqxjit.__all__


def test_errors_are_shown_by_their_public_name():
    program = """
        import eqxjit, jax.numpy as jnp

        f = eqxjit.filter_jit(lambda n: n, max_traces=1)
        f(1), f(2)
    """
    assert "\neqxjit.TooManyTracesError: " in start(program).stderr


def test_all_examples_are_run():
    """Those of public functions are collected where these are public."""
    names = [m.name for m in pkgutil.walk_packages(eqxjit.__path__, "eqxjit.")]
    names = [name for name in names if not name.endswith(("__main__", "_native"))]
    n_found = n_written = 0
    for module in (eqxjit, *map(importlib.import_module, names)):
        n_found += len([test for test in doctest.DocTestFinder().find(module) if test.examples])
        tree = ast.parse(inspect.getsource(module))
        kinds = (ast.FunctionDef, ast.ClassDef, ast.Module)
        docstrings = [ast.get_docstring(n) or "" for n in ast.walk(tree) if isinstance(n, kinds)]
        n_written += sum(">>>" in docstring for docstring in docstrings)
    assert n_found == n_written > 10


def test_it_is_marked_as_typed():
    assert importlib.resources.files("eqxjit").joinpath("py.typed").is_file()


@pytest.mark.parametrize(
    "checker",
    [
        ["mypy", "--strict", "--no-incremental"],
        ["pyright", "--pythonpath", sys.executable, "--project"],
    ],
    ids=lambda checker: checker[0],
)
@pytest.mark.slow
def test_type_checkers_see_the_own_signature(checker, tmp_path):
    # Errors that are wanted are marked in the file, and a mark without an error is one.
    result = subprocess.run(
        [sys.executable, "-m", *checker, str(_DOWNSTREAM)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"no issues found in 1 source file|0 errors, 0 warnings", result.stdout)
