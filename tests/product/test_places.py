"""A user's project gets its own lines named, whatever it is called and wherever it lies."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

import eqxjit
from tests.support.places import in_mlir, make_site_packages

PACKAGE = pathlib.Path(eqxjit.__file__).parent

SCRIPT = """
    import contextlib, io, logging, sys, traceback

    import equinox as eqx
    import eqxjit
    import jax
    import jax.numpy as jnp
    from eqxjit_models import apply, make

    logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")

    @eqxjit.filter_jit
    def step(model, x, action=None):
        return apply(model, x, action)

    def fails(*args):
        try:
            step(*args)
        except Exception:
            traceback.print_exc(file=sys.stdout)

    x = jnp.ones(3)
    for filtering in ("off", "quiet_remove_frames", "remove_frames"):
        jax.config.update("jax_traceback_filtering", filtering)
        for calls in (0, 4):
            step.clear_cache()
            for _ in range(calls):
                step(2.0, x)
            print("== errors:", filtering, calls)
            # The user's own, and JAX's for it; and in the middle of a warm call.
            fails(2.0, x, "raise")
            fails(2.0, x, "bool")
            fails(2.0, jnp.ones(4), "raise")
            fails(2.0, -x, "check")

    print("== explanations")
    with eqxjit.explain_retraces():
        for n in (3, 4, 3):
            step(make(), jnp.ones(n))
        step(2.0, x, iter("ab"))
    for trace in step.traces():
        print(trace.call_site, trace.reason, trace.differences)

    print("== warnings")
    for n in range(20):
        eqxjit.filter_jit(lambda x: x + 1)(x)
    for n in range(20):
        eqxjit.filter_jit(make())(x)

    print("== report")
    # How the table is laid out depends on how long its paths are.
    with contextlib.redirect_stdout(io.StringIO()), eqxjit.compile_report() as report:
        step(2.0, x, "unroll")
    print([(row.function, row.busiest_line) for row in report.rows])

    print("== names in JAX")
    lowered = eqxjit.filter_jit(apply).lower(2.0, x, None)
    print(lowered.lowered.as_text(debug_info=True))
"""

MODELS = """
    import equinox as eqx

    def apply(model, x, action):
        if action == "raise":
            raise ValueError("of the user's model")
        if action == "bool":
            return bool(x[0])
        if action == "check":
            x = eqx.error_if(x, x < 0, "negative")
        for _ in range(300 if action == "unroll" else 1):
            x = x * 2 + 1
        return x

    def make():
        return lambda x: x
"""


def project(folder):
    """A project whose package has a name like ours."""
    (folder / "eqxjit_models").mkdir(parents=True)
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    (folder / "eqxjit_models" / "__init__.py").write_text(textwrap.dedent(MODELS))
    return folder


def printed(folder, cwd, package=PACKAGE):
    """What the script prints, but for where the project and eqxjit lie, and for seconds."""
    paths = [str(package.parent), *filter(None, sys.path)]
    result = subprocess.run(
        [sys.executable, str(folder / "train.py")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUTF8": "1",
            "HOME": str(folder.anchor),
        },
        cwd=cwd,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    text = result.stdout
    # First the one of the two that may lie below the other.
    for path, name in ((package, "PACKAGE"), (folder, "PROJECT")):
        text = text.replace(str(path), name).replace(in_mlir(str(path)), name)
    return re.sub(r"\d+(\.\d+|e-\d+)+|<eqxjit>/\w+-\d+|0x[0-9a-f]+", "...", text)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """An empty working directory."""
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def expected(tmp_path_factory, elsewhere):
    """What is printed in a project with a name like any other."""
    return printed(project(tmp_path_factory.mktemp("somewhere") / "project"), elsewhere)


def test_all_kinds_of_messages_name_the_users_lines(expected):
    parts = dict(re.findall(r"^== (.*)\n((?:(?!== ).*\n)*)", expected, re.MULTILINE))
    assert len(parts) == 6 + 4
    frames = ["in fails", "in step", "in apply"]
    for name, text in parts.items():
        if name.startswith("errors"):
            for error in text.split("ValueError: of the user's model\n")[:-1]:
                assert all(frame in error for frame in frames), error
            assert text.count("ValueError: of the user's model\n") >= 2
            assert "tracing the function step at PROJECT/train.py:" in text
            assert "negative\n" in text
        assert "PROJECT/" in text, name
    assert "for the call at PROJECT/train.py:" in parts["explanations"]
    assert "made of the same code (PROJECT/train.py:" in parts["warnings"]
    assert "made of the same code (PROJECT/eqxjit_models/__init__.py:" in parts["warnings"]
    assert "PROJECT/eqxjit_models/__init__.py:12 (" in parts["report"]
    assert 'loc("PROJECT/eqxjit_models/__init__.py":' in parts["names in JAX"]
    assert "PACKAGE" not in parts["names in JAX"]


@pytest.mark.parametrize(
    "place",
    [
        "a b/\N{LATIN SMALL LETTER U WITH DIAERESIS}/eqxjit/_code",
        "site-packages/jax/equinox",
    ],
)
def test_a_project_of_any_name(place, tmp_path, elsewhere, expected):
    assert printed(project(tmp_path / place), elsewhere) == expected


def test_a_project_in_a_folder_of_packages(tmp_path, elsewhere, expected):
    """Beside an environment, whose folder of packages has the name of the project's."""
    make_site_packages(tmp_path / "lib")
    assert printed(project(tmp_path / "site-packages"), elsewhere) == expected


def test_paths_from_the_project_itself(tmp_path, expected):
    folder = project(tmp_path / "eqxjit")
    text = printed(folder, folder)
    ours = [line for line in expected.splitlines() if "for the call at" in line]
    assert ours
    for line in ours:
        assert line.replace("PROJECT/", "") in text


def test_a_project_beside_the_package(tmp_path, elsewhere, expected):
    """Whose path begins as the package's does, which is a link."""
    package = tmp_path / "src" / "eqxjit"
    package.parent.mkdir()
    package.symlink_to(PACKAGE)
    folder = project(tmp_path / "src" / "eqxjit2")
    text = printed(folder, elsewhere, package)
    # "PACKAGE2" is the project.
    assert text.replace("PACKAGE2", "PROJECT") == expected
