"""What is installed, and what type checkers see of it."""

import doctest
import importlib
import importlib.metadata
import importlib.resources
import pathlib
import pickle
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

import eqxjit
from eqxjit.__main__ import main
from eqxjit._text import SWITCHES, switch
from tests.support.processes import ROOT, python

_DOWNSTREAM = pathlib.Path(__file__).parent / "downstream"


def test_only_runtime_dependencies_are_required():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {Requirement(text).name for text in project["dependencies"]} == {
        *("equinox", "jax", "jaxlib", "jaxtyping")
    }


def test_the_version_is_said_nowhere_but_in_the_metadata():
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]
    version = importlib.metadata.version("eqxjit")
    assert eqxjit.__version__ == version
    sources = pathlib.Path(eqxjit.__file__).parent.rglob("*.py")
    assert not [file.name for file in sources if version in file.read_text()]


AT_THE_TOP = {
    *("filter_jit", "fast_filter_jit", "currently_jitting", "freeze", "load", "pack", "Packed"),
    *("install", "uninstall", "compile_report", "explain_retraces", "native_enabled"),
    *("TooManyTracesError", "trial"),
}


def test_what_is_public():
    assert {*eqxjit.__all__} == AT_THE_TOP
    assert {name for name in dir(eqxjit) if name[0] != "_"} == {*AT_THE_TOP, "types"}
    assert not [name for name in TYPES if hasattr(eqxjit, name)]


TYPES = {name: value for name, value in vars(eqxjit.types).items() if name[0] != "_"}
PUBLIC_CLASSES = [eqxjit.Packed, eqxjit.TooManyTracesError, *TYPES.values()]


def test_what_is_public_says_where_it_is():
    assert len(PUBLIC_CLASSES) > 10
    for thing in [*(getattr(eqxjit, name) for name in AT_THE_TOP), *PUBLIC_CLASSES]:
        is_at_the_top = thing.__name__ in AT_THE_TOP
        assert thing.__module__ == ("eqxjit" if is_at_the_top else "eqxjit.types")
        assert pickle.loads(pickle.dumps(thing)) is thing
        # A pickle doesn't refer to a private module, which may move.
        assert b"eqxjit._" not in pickle.dumps(thing)


def test_what_a_user_meets_is_of_a_public_class():
    wrapped = eqxjit.filter_jit(len)
    lowered = wrapped.lower((1, 2))
    made = [wrapped, wrapped.__get__(()), lowered, lowered.compile(), eqxjit.freeze(len)]
    made += [wrapped.compile((1, 2)), wrapped.cache_info(), wrapped.traces()]
    with eqxjit.compile_report() as report:
        wrapped((1, 2, 3))
    made += [report, report.rows[0], report.spans[0]]
    with eqxjit.trial() as trial:
        wrapped((1, 2))
    made += [trial, trial.lines[0], trial.functions[0]]
    trace = wrapped.traces()[1]
    made += [trace, trace.seconds, trace.call_site, trace.differences[0]]
    made += [trace.program, trace.memory]
    assert {type(thing) for thing in made} == {*PUBLIC_CLASSES} - {
        eqxjit.Packed,
        eqxjit.TooManyTracesError,
        # Only large arrays have such a line.
        eqxjit.types.CapturedArray,
        eqxjit.types.MadeArray,
    }


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


@pytest.mark.parametrize("thing", PUBLIC_CLASSES)
def test_examples_of_methods_run(thing):
    """pytest doesn't find doctests of public classes, whose `__module__` isn't their file's."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for test in doctest.DocTestFinder().find(thing, module=False, globs={}):
        assert doctest.DocTestRunner(optionflags=flags).run(test).failed == 0


def test_info(capsys, monkeypatch):
    monkeypatch.setenv("EQXJIT_DEBUG", "1")
    main(["--info"])
    text = capsys.readouterr().out
    names = {re.split("[:=]", line)[0] for line in text.splitlines()}
    assert {"jax", "jaxlib", "equinox", "python", "platform", "device info"} < names
    assert f"eqxjit: {eqxjit.__version__}\n" in text
    assert f"back end: {'native' if eqxjit.native_enabled() else 'Python'}" in text
    assert "EQXJIT_DEBUG=1\n" in text


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("EQXJIT_NATVE", "did you mean `EQXJIT_NATIVE`?"),
        ("EQX_JIT_NATIVE", "did you mean `EQXJIT_NATIVE`?"),
        ("EQXJIT_EXPLAIN", "did you mean `EQXJIT_EXPLAIN_RETRACES`?"),
        ("EQXJIT_ZZZZZ", "eqxjit reads `EQXJIT_EXPLAIN_RETRACES`, `EQXJIT_NATIVE`, `EQXJIT_SPEC"),
    ],
)
def test_a_variable_that_does_nothing_is_pointed_out(name, hint):
    variables = {name: "0", "EQXJIT_SPECIALIZE": "1"}
    result = python("-c", "import eqxjit", **variables)
    assert result.stdout == ""
    said = f"eqxjit: The environment variable `{name}` has no effect: {hint}"
    assert result.stderr.startswith(said)
    assert result.stderr.count("has no effect") == 1


def test_the_variables_that_are_read_are_the_known_ones():
    sources = "".join([path.read_text() for path in (ROOT / "src").rglob("*.py")])
    assert {*re.findall(r'switch\("(\w+)"\)', sources)} == {*SWITCHES}
    pages = (ROOT / "docs" / "pages" / "stability.md").read_text()
    assert all(f"`{name}`" in pages for name in SWITCHES)


def test_the_values_of_switches(monkeypatch):
    values = {"1": True, "On": True, "yes": True, "0": False, "FALSE": False, "": None}
    for value, expected in values.items():
        monkeypatch.setenv("EQXJIT_ANY", value)
        assert switch("EQXJIT_ANY") is expected
    monkeypatch.delenv("EQXJIT_ANY")
    assert switch("EQXJIT_ANY") is None
    # An unknown value is an error, because it could be meant as either.
    monkeypatch.setenv("EQXJIT_ANY", "maybe")
    with pytest.raises(ValueError, match="`EQXJIT_ANY` is 'maybe'") as raised:
        switch("EQXJIT_ANY")
    assert all(f"`{value}`" in str(raised.value) for value in ("1", "on", "0", "off"))
