"""Messages name lines as their reader does: by a path from here, or by a notebook's cell."""

import sys
import sysconfig
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from eqxjit._places import is_users, is_users_module, location
from tests.support.places import in_mlir, make_site_packages
from tests.support.processes import run
from tests.support.sides import CALLS

X = jnp.arange(3.0)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Return the working directory."""
    folder = tmp_path / "home" / "project"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def test_paths_are_from_the_working_directory(here, monkeypatch):
    for path, shown in (
        (f"{here}/src/train.py", "src/train.py"),
        (f"{here}/../project/train.py", "train.py"),
        (f"{here}2/train.py", f"{here}2/train.py"),
        ("train.py", "train.py"),
        ("<stdin>", "<stdin>"),
    ):
        assert location(path, 3) == f"{shown}:3"
    monkeypatch.chdir(here.parent)
    assert location(str(here / "train.py"), 3) == "project/train.py:3"
    # Each file is below the root, so paths stay absolute.
    monkeypatch.chdir("/")
    assert location("/elsewhere/train.py", 3) == "/elsewhere/train.py:3"
    monkeypatch.chdir(here)
    here.rmdir()
    assert location(str(here / "train.py"), 3) == f"{here}/train.py:3"


@pytest.mark.parametrize("name", ["project", "a b/ü/eqxjit/_code", "packages/jax/equinox"])
def test_all_messages_name_lines_so(here, name, caplog, monkeypatch):
    """This holds for any name and place of the project."""
    source = (
        "def f(model, x):\n    for _ in range(300): x = x + 1\n    return x\n"
        "def make():\n    return lambda x: x\n"
        "def call(f, *args):\n    return f(*args)\n"
        "def define(filter_jit):\n    return filter_jit(lambda x: x)\n"
        "def fail(x):\n    return bool(x[0])\n"
    )
    here = here / name
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    folder = here / "src"
    names: dict = {}
    exec(compile(source, str(folder / "train.py"), "exec"), names)
    f = eqxjit.filter_jit(names["f"], max_traces=2)
    with eqxjit.compile_report() as report, eqxjit.explain_retraces():
        names["call"](f, names["make"](), X)
        names["call"](f, names["make"](), X)
        with pytest.raises(eqxjit.TooManyTracesError, match=r"the call at src/train\.py:7 "):
            names["call"](f, None, X)
        for _ in range(2):
            names["call"](names["define"](eqxjit.filter_jit), X)
    trace = f.traces()[1]
    assert str(trace.call_site) == "src/train.py:7"
    assert " at src/train.py:7: " in repr(trace)
    [difference] = trace.differences
    assert difference.new == "`make.<lambda>` at src/train.py:5"
    assert "a different object of the same code" in difference.remedy
    assert trace.arguments["model"] == "`make.<lambda>` at src/train.py:5"
    [row] = [row for row in report.rows if row.function == "f"]
    assert row.program.loops == ("src/train.py:2",)
    assert "for the call at src/train.py:7, in " in caplog.text
    assert "same code (src/train.py:9) was traced before" in caplog.text
    lowered = eqxjit.filter_jit(names["f"]).lower(None, X).lowered
    assert f'loc("{in_mlir(str(folder / "train.py"))}":2' in lowered.as_text(debug_info=True)
    for warm in range(2):
        fail = eqxjit.filter_jit(lambda x, warm=warm: names["fail"](x) if x.ndim else x)
        for _ in range(CALLS * warm):
            fail(X[0])
        with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
            fail(X)
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert (str(folder / "train.py"), 11) in [(f.filename, f.lineno) for f in frames]


def test_the_line_of_a_call_is_the_users(tmp_path):
    """A library's line in between would tell the user nothing."""
    names: dict = {}
    path = make_site_packages(tmp_path) / "library.py"
    exec(compile("def call(f, *args):\n    return f(*args)\n", str(path), "exec"), names)
    f = eqxjit.filter_jit(lambda x: x)
    names["call"](f, X)
    assert f.traces()[0].call_site.filename == __file__


CELLS = """
    import logging, sys
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    from IPython.core.interactiveshell import InteractiveShell
    {setting}
    shell = InteractiveShell.instance()
    for cell in [
        "import jax, jax.numpy as jnp, eqxjit",
        "@eqxjit.filter_jit\\ndef f(x, g):\\n    return g(x)\\n",
        "def make():\\n    return lambda x: x",
        "with eqxjit.explain_retraces():\\n"
        "    for _ in range(2):\\n        f(jnp.ones(3), make())",
    ]:
        result = shell.run_cell(cell, store_history=True)
        result.raise_error()
    print(shell.user_ns["f"].traces()[1])
"""

# `ipykernel` names cells by files that may not exist.
KERNEL = """
    from IPython.core import compilerop
    compilerop.code_name = lambda code, number=0: f"/tmp/ipykernel_1/{abs(hash(code))}.py"
"""


@pytest.mark.parametrize("setting", ["", pytest.param(KERNEL.strip(), marks=pytest.mark.slow)])
def test_cells_of_a_notebook(setting):
    pytest.importorskip("IPython")
    printed = run(CELLS.format(setting=setting))
    assert "for the call at Cell In[4], line 3, in " in printed
    assert "is a different `make.<lambda>` at Cell In[3], line 2" in printed
    assert "ipykernel" not in printed
    assert "<ipython" not in printed


# --- Whose a file is, told by the folders of packages -----------------------------------------


def test_what_is_the_users(monkeypatch):
    # Otherwise `__main__` would be pytest, which isn't the user's.
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
    """This also holds for folders where this interpreter installs nothing."""
    folder = make_site_packages(tmp_path).rename(tmp_path / name)
    assert not is_users(str(folder / "a_library" / "solve.py"))
    for users in ("", "eqxjit/jax", "equinox_models"):
        assert is_users(str(tmp_path / users / "train.py"))
    # This is an environment in the user's project.
    environment = tmp_path / "project" / ".venv" / "lib"
    environment.mkdir(parents=True)
    installed = make_site_packages(environment)
    assert not is_users(str(installed / "a_library.py"))
    assert is_users(str(tmp_path / "project" / "train.py"))
