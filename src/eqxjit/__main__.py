"""`python -m eqxjit script.py`: runs a script, or a module, with eqxjit installed.

For a script that can't be edited: `equinox.filter_jit` is eqxjit's in it and in the libraries that
it uses. JAX and Equinox are imported before it: a variable that they read at import, such as
`JAX_ENABLE_X64`, must be set outside of the script.

With `--report FILE` it also prints a table of what was traced and compiled, on the standard error,
and writes a page with the reasons (for `.html`) or a Chrome trace (for `.json`). With `--explain`
the log says why functions were traced again.
"""

import argparse
import contextlib
import importlib.machinery
import importlib.metadata
import os
import re
import runpy
import sys
import types
from typing import Any

import jax

from ._compat import why_back_end
from ._deploy.install import install
from ._diagnostics.log import explain_retraces
from ._reports.report import CompileReport, recording


def main(argv: list[str]) -> None:
    """Install eqxjit, then run what the command line names; `argv` begins after `-m eqxjit`."""
    parser = argparse.ArgumentParser(
        prog="python -m eqxjit",
        usage="%(prog)s [-h] [--version] [--info] [--report FILE] [--explain] "
        "(-m module | script) ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"eqxjit {importlib.metadata.version('eqxjit')}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    parser.add_argument("--info", action="store_true", help="print versions, devices and switches")
    parser.add_argument("--report", type=os.path.abspath, metavar="FILE", help="write a report")
    parser.add_argument("--explain", action="store_true", help="log why functions are traced again")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module")
    parser.add_argument("program", nargs="?", help="a script, or a module; then its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.info:
        _show_info()
        return
    program = chosen.program
    if program is None:
        parser.error("a script or a module is required")
    sys.argv = [program, *chosen.arguments]
    sys.excepthook = _show_error
    with contextlib.ExitStack() as stack:
        if chosen.explain:
            stack.enter_context(explain_retraces())
        if chosen.report is not None:
            report = stack.enter_context(recording(CompileReport()))
            try:
                # Now, too, because a program may run for hours before this fails.
                report.save(chosen.report)
            except (OSError, ValueError) as error:
                sys.exit(f"{parser.prog}: can't write the report: {error}")
            # However the program ends.
            stack.callback(_finish_report, report, chosen.report)
        install()
        if chosen.module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            try:
                loader, code = _compiled(program)
            except OSError as error:
                sys.exit(f"{parser.prog}: can't run the script: {error}")
            _run(loader, code)


def _finish_report(report: CompileReport, path: str) -> None:
    """Save and print a report, apart from what the program prints."""
    report.save(path)
    print(f"{report}\nThe report is in {path}.", file=sys.stderr)


def _show_error(kind: Any, error: BaseException, traceback: types.TracebackType | None) -> None:
    """Show an error as if Python itself had run the program."""
    # The frames of `runpy` and `importlib` are called `<frozen ...>`.
    while traceback and traceback.tb_frame.f_code.co_filename.startswith((__file__, "<frozen ")):
        traceback = traceback.tb_next
    sys.__excepthook__(kind, error.with_traceback(traceback), traceback)


def _show_info() -> None:
    """Print what a report of a bug should have."""
    for name in ("eqxjit", "equinox", "jax", "jaxlib"):
        print(f"{name}: {importlib.metadata.version(name)}")
    print(f"back end: {why_back_end}")
    for name in filter(re.compile("EQXJIT_|EQX_|JAX_|XLA_").match, os.environ):
        print(f"{name}={os.environ[name]}")
    # Last, because it raises where JAX finds no device.
    jax.print_environment_info()


def _compiled(path: str) -> tuple[importlib.machinery.SourceFileLoader, types.CodeType]:
    """Read and compile the file of a script."""
    path = os.path.abspath(path)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    return loader, loader.source_to_code(loader.get_data(path), path)


def _run(loader: importlib.machinery.SourceFileLoader, code: types.CodeType) -> None:
    """Run a script as the main program, also for threads and exit handlers that outlive `main`."""
    # Not by `runpy.run_path`, which takes the module away at the end of the file.
    if not sys.flags.safe_path:
        # As Python does for `python script.py`: the script imports what lies beside it.
        sys.path[0] = os.path.dirname(os.path.realpath(loader.path))
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(module).update(__file__=loader.path, __loader__=loader, __builtins__=__builtins__)
    exec(code, vars(module))


if __name__ == "__main__":
    main(sys.argv[1:])
