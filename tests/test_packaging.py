"""What is installed, and what type checkers see of it."""

import importlib.metadata
import importlib.resources
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

_ROOT = pathlib.Path(__file__).parent.parent
_DOWNSTREAM = pathlib.Path(__file__).parent / "downstream"


def test_only_runtime_dependencies_are_required():
    required = map(Requirement, importlib.metadata.requires("eqxjit"))
    names = {requirement.name for requirement in required if requirement.marker is None}
    assert names == {"equinox", "jax", "jaxlib", "jaxtyping"}


def test_the_version_is_said_once():
    version = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert importlib.metadata.version("eqxjit") == version
    sources = importlib.resources.files("eqxjit").iterdir()
    assert not [file.name for file in sources if file.is_file() and version in file.read_text()]


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
