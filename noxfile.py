"""The checks of `.ci/run` one by one, on every Python: `nox -s tests-3.12`, `nox -s lint`."""

import nox

nox.options.sessions = ["tests-3.11", "lint"]


@nox.session(python=["3.11", "3.12", "3.13"])
@nox.parametrize("specialize", ["1", "0"])
def tests(session: nox.Session, specialize: str) -> None:
    """Run the test suite, with and without specialised calls."""
    session.install("-e", ".[test]")
    session.run("pytest", *session.posargs, env={"EQXJIT_SPECIALIZE": specialize})


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """Run the test suite against the lowest supported versions."""
    session.install("-e", ".[test]", "-c", ".ci/lowest.txt")
    session.run("pytest", *session.posargs)


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    """Check style, format and types."""
    session.install("-e", ".[test,bench,dev]")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("pyright")


@nox.session(python="3.11")
def bench(session: nox.Session) -> None:
    """Run one benchmark: `nox -s bench -- calls --quick`."""
    session.install("-e", ".[bench]")
    session.run("python", "-m", "bench", *session.posargs)
