"""The checks of `.ci/run` one by one, on every Python: `nox -s tests-3.12`, `nox -s lint`."""

import re
from pathlib import Path

import nox

nox.options.sessions = ["tests-3.11", "lint"]

PYTHONS = ["3.11", "3.12", "3.13"]
# With each Python, beside the latest that installs; 0.10 is the last jax for Python 3.11.
OLDER = {"lowest": ["-c", ".ci/lowest.txt"], "jax-0.9": ["jax<0.10"], "jax-0.10": ["jax<0.11"]}

PRIVATE = sorted(
    set(
        re.findall(
            r"^ +(?:from|import) ((?:jax\._|jaxlib|equinox\._)\S+)",
            Path("src/eqxjit/_compat.py").read_text(),
            re.MULTILINE,
        )
    )
)


@nox.session(python=PYTHONS)
@nox.parametrize("specialize", ["1", "0"])
def tests(session: nox.Session, specialize: str) -> None:
    """Run the test suite, with and without specialised calls."""
    session.install("-e", ".[test]")
    session.run("pytest", "-m", "", *session.posargs, env={"EQXJIT_SPECIALIZE": specialize})


@nox.session(python=PYTHONS)
@nox.parametrize("versions", ["latest", *OLDER])
def versions(session: nox.Session, versions: str) -> None:
    """Run the test suite with these versions of jax and equinox; adds a row to README's table."""
    session.install("-e", ".[test]", *OLDER.get(versions, []))
    outcome = f"{session.create_tmp()}/outcome.xml"
    try:
        session.run("pytest", "-m", "", f"--junitxml={outcome}", *session.posargs)
    finally:
        session.run("python", ".ci/versions.py", outcome)


@nox.session(python="3.11")
@nox.parametrize("hidden", PRIVATE)
def private(session: nox.Session, hidden: str) -> None:
    """Run the test suite as if a private module of JAX or Equinox were gone."""
    session.install("-e", ".[test]")
    session.run("pytest", "-m", "", *session.posargs, env={"EQXJIT_TEST_WITHOUT": hidden})


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    """Check style, format and types."""
    session.install("-e", ".[test,bench,dev]")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("pyright")


@nox.session(python="3.11")
def docs(session: nox.Session) -> None:
    """Build the site, into docs/site."""
    session.install("-e", ".[docs]")
    session.run("python", "docs/build.py")


@nox.session(python="3.11")
def bench(session: nox.Session) -> None:
    """Run one benchmark: `nox -s bench -- calls --quick`."""
    session.install("-e", ".[bench]")
    session.run("python", "-m", "bench", *session.posargs)
