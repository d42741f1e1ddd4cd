"""Runs Python programs in processes of their own, for what is decided once per process."""

import os
import pathlib
import subprocess
import sys
import textwrap

#: The repository, or what of it was copied beside an installed wheel.
ROOT = pathlib.Path(__file__).parents[2]


def run(program: str, *arguments: str, stdin: str = "", **environment: str) -> str:
    """What a program prints; it must exit without an error.

    **Arguments:**

    - `program`: Python source, indented as one likes.
    - `*arguments`: its `sys.argv[1:]`.
    - `stdin`: what it reads.
    - `**environment`: environment variables, beside those of this process.
    """
    result = start(program, *arguments, stdin=stdin, **environment)
    assert result.returncode == 0, result.stderr[-4000:]
    # By what is collected at the exit.
    assert "Exception ignored" not in result.stderr, result.stderr[-4000:]
    return result.stdout


def start(
    program: str, *arguments: str, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """As `run`, but the program may fail: returns its exit status, stdout and stderr."""
    return python("-c", textwrap.dedent(program), *arguments, stdin=stdin, **environment)


def python(
    *arguments: str, stdin: str = "", cwd: pathlib.Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What came of `python` with these arguments, which finds what is imported here."""
    # Importable wherever the tests' own process finds them, installed or not.
    paths = [str(ROOT), *filter(None, sys.path)]
    return subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
