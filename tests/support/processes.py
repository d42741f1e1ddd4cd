"""Runs Python programs in processes of their own, for what is decided once per process."""

import os
import pathlib
import subprocess
import sys
import textwrap

#: The repository, or the part of it that was copied beside an installed wheel.
ROOT = pathlib.Path(__file__).parents[2]


def run(program: str, *arguments: str, stdin: str = "", **environment: str) -> str:
    """Run a program, check that it exits without an error, and return what it prints.

    **Arguments:**

    - `program`: Python source, with any indentation.
    - `*arguments`: the `sys.argv[1:]` of the program.
    - `stdin`: the standard input of the program.
    - `**environment`: environment variables, beside those of this process.
    """
    result = start(program, *arguments, stdin=stdin, **environment)
    assert result.returncode == 0, result.stderr[-4000:]
    # Objects that die at the exit raised no error.
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
    """Run `python` with these arguments, and with this process's import path."""
    # The process can import all that the tests' own process can, installed or not.
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
