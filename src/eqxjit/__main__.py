"""`python -m eqxjit script.py`: runs a script, or a module, with eqxjit installed.

Use it for a script that you can't edit. In the script and in the libraries that it uses,
`equinox.filter_jit` is eqxjit's. JAX and Equinox are imported before the script, so set variables
that they read at import, such as `JAX_ENABLE_X64`, outside of the script. If the script sets one,
a message at the end names it.

With `--report FILE` it also prints a table of what was traced and compiled, on the standard error,
and writes a page with the reasons (for `.html`) or a Chrome trace (for `.json`). With `--explain`
the log says why functions were traced again.

With `--trial` it compares results with those of Equinox's `filter_jit`, and prints how much faster
calls are and which lines take the time; `--trial=FILE.html` writes a page. The exit status is 1 if
results differ.
"""

import argparse
import contextlib
import importlib.machinery
import importlib.metadata
import os
import runpy
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax

from ._compat import why_back_end
from ._deploy.install import install
from ._diagnostics.log import explain_retraces
from ._reports.report import CompileReport, recording
from ._reports.trial import trial_of_program

_NAME = "python -m eqxjit"

# The prefixes of the variables that JAX, Equinox and eqxjit read when they are imported. XLA reads
# its own variables later.
_READ_AT_IMPORT = "JAX_", "EQX_", "EQXJIT_"


def main(argv: list[str]) -> None:
    """Install eqxjit, then run what the command line names. `argv` begins after `-m eqxjit`."""
    parser = _parser()
    # `argparse` would take the script for the value of an option whose value is optional, so the
    # option with a value has a different name. What follows the program is the program's.
    n_ours = 0
    while n_ours < len(argv) and argv[n_ours].startswith("-") and argv[n_ours] != "-m":
        n_ours += 2 if argv[n_ours] == "--report" else 1
    ours = [text.replace("--trial=", "--trial-page=", 1) for text in argv[:n_ours]]
    chosen = parser.parse_args([*ours, *argv[n_ours:]])
    page = chosen.trial_page
    # Checked now, because the program may run for hours.
    if page and not page.lower().endswith(".html"):
        parser.error(f"`--trial=FILE` writes a page of HTML, so FILE must end with .html: {page!r}")
    if chosen.no_compare and not (chosen.trial or page):
        parser.error("`--no-compare` is an option of `--trial`")
    if chosen.info:
        _show_info()
        return
    program = chosen.program
    if program is None:
        hint = f"; {chosen.report} is the FILE of `--report`" if chosen.report else ""
        parser.error(f"a script or a module is required{hint}")
    if program.lower().endswith(".html"):
        parser.error(f"{program!r} isn't a script; a page is written by `--trial=FILE`, with `=`")
    sys.argv = [program, *chosen.arguments]
    sys.excepthook = _show_error
    # The script is read before a report or a trial begins. If it can't be read, they print nothing.
    script = None if chosen.module else _compiled(program)
    with contextlib.ExitStack() as stack:
        stack.callback(_warn_of_changes, _settings(*_READ_AT_IMPORT))
        if chosen.explain:
            stack.enter_context(explain_retraces())
        if chosen.report is not None:
            stack.enter_context(_reported(chosen.report))
        install()
        if chosen.trial or page:
            name = os.path.basename(program)
            try:
                stack.enter_context(trial_of_program(name, page, not chosen.no_compare))
            except OSError as error:
                parser.error(f"can't write the page: {error}")
        if script is None:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            _run_script(*script)


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=_NAME,
        usage="%(prog)s [-h] [--version] [--info] [--report FILE] [--explain] "
        "[--trial[=FILE]] [--no-compare] (-m module | script) ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"eqxjit {importlib.metadata.version('eqxjit')}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    parser.add_argument("--info", action="store_true", help="print versions, devices and switches")
    parser.add_argument("--report", type=os.path.abspath, metavar="FILE", help="write a report")
    parser.add_argument("--explain", action="store_true", help="log why functions are traced again")
    parser.add_argument("--trial", action="store_true", help="compare with Equinox's filter_jit")
    parser.add_argument("--trial-page", type=os.path.abspath, help=argparse.SUPPRESS)
    parser.add_argument("--no-compare", action="store_true", help="in a trial, time only eqxjit")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module")
    parser.add_argument("program", nargs="?", help="a script, or a module; then its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


@contextlib.contextmanager
def _reported(path: str) -> Iterator[None]:
    """Save and print a report of what the `with` block compiles, even if the block raises."""
    with recording(CompileReport()) as report:
        try:
            # Also saved at the beginning, because otherwise a program might run for hours before
            # saving fails.
            report.save(path)
        except (OSError, ValueError) as error:
            sys.exit(f"{_NAME}: can't write the report: {error}")
        try:
            yield
        finally:
            report.save(path)
            # Printed on the standard error, apart from what the program prints.
            print(f"{report}\nThe report is in {path}.", file=sys.stderr)


def _show_error(kind: Any, error: BaseException, traceback: types.TracebackType | None) -> None:
    """Show an error as if Python itself had run the program."""
    # Leave out the frames of this file, and those of `runpy` and `importlib`, whose files are
    # called `<frozen ...>`.
    while traceback and traceback.tb_frame.f_code.co_filename.startswith((__file__, "<frozen ")):
        traceback = traceback.tb_next
    sys.__excepthook__(kind, error.with_traceback(traceback), traceback)


def _show_info() -> None:
    """Print the facts that a bug report should contain."""
    for name in ("eqxjit", "equinox", "jax", "jaxlib"):
        print(f"{name}: {importlib.metadata.version(name)}")
    print(f"back end: {why_back_end}")
    for name, value in _settings(*_READ_AT_IMPORT, "XLA_").items():
        print(f"{name}={value}")
    # Last, because JAX raises an error here if it finds no device.
    jax.print_environment_info()


def _settings(*prefixes: str) -> dict[str, str]:
    """Return the environment variables whose names begin with one of these prefixes."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


def _warn_of_changes(before: dict[str, str]) -> None:
    """Name the settings that the program has made too late."""
    after = _settings(*_READ_AT_IMPORT)
    changed = [name for name, value in after.items() if value != before.get(name)]
    if changed:
        print(
            f"{_NAME}: JAX and Equinox were imported before the program, so they haven't read what"
            f" it has set: {', '.join(changed)}. Set this outside of the program.",
            file=sys.stderr,
        )


def _compiled(path: str) -> tuple[importlib.machinery.SourceFileLoader, types.CodeType]:
    """Read and compile the file of a script; end with Python's own status if it can't be read."""
    path = os.path.abspath(path)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    try:
        return loader, loader.source_to_code(loader.get_data(path), path)
    except OSError as error:
        print(f"{_NAME}: can't run the script: {error}", file=sys.stderr)
        sys.exit(2)


def _run_script(loader: importlib.machinery.SourceFileLoader, code: types.CodeType) -> None:
    """Run a file as the main program, also for threads and exit handlers that outlive `main`."""
    # Not by `runpy.run_path`, which removes the module from `sys.modules` at the end of the file.
    if not sys.flags.safe_path:
        # As under `python script.py`, so that the script can import the modules in its folder.
        sys.path[0] = os.path.dirname(os.path.realpath(loader.path))
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(module).update(__file__=loader.path, __loader__=loader, __builtins__=__builtins__)
    exec(code, vars(module))


if __name__ == "__main__":
    main(sys.argv[1:])
