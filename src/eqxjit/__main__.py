"""`python -m eqxjit script.py`: runs a script, or a module, with eqxjit installed.

For a script that can't be edited: `equinox.filter_jit` is eqxjit's in it and in the libraries that
it uses. JAX and Equinox are imported before it: a variable that they read at import, such as
`JAX_ENABLE_X64`, must be set outside of the script.

With `--report FILE` it also writes what was traced and compiled, when and why: a page for `.html`,
a Chrome trace for `.json`. With `--explain` the log says why functions were traced again.
"""

import argparse
import contextlib
import importlib.machinery
import importlib.metadata
import os
import pathlib
import platform
import runpy
import sys
import types
from typing import Any

import jax

from ._compat import why_back_end
from ._deploy.install import install
from ._diagnostics.log import explain_retraces
from ._diagnostics.report import CompileReport, check_report_path, recording

_SWITCHES = ("EQXJIT_", "EQX_ON_ERROR", "JAX_", "XLA_FLAGS")


def main(argv: list[str]) -> None:
    """Install eqxjit, then run what the command line names; `argv` begins after `-m eqxjit`."""
    parser = argparse.ArgumentParser(
        prog="python -m eqxjit",
        usage="%(prog)s [-h] [--info] [--report FILE] [--explain] (-m module | script) ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--info", action="store_true", help="print versions, devices and switches")
    parser.add_argument("--report", type=_report_path, metavar="FILE", help="write a report there")
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
    if not chosen.module and not os.path.isfile(program):
        parser.error(f"can't open file {program!r}: no such file")
    sys.argv = [program, *chosen.arguments]
    sys.excepthook = _without_our_frames(sys.excepthook)
    install()
    with contextlib.ExitStack() as stack:
        if chosen.explain:
            stack.enter_context(explain_retraces())
        if chosen.report is not None:
            report = CompileReport()
            stack.enter_context(recording(report))
            # However the program ends.
            stack.callback(report.save, chosen.report)
        if chosen.module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            _run_script(program)


def _report_path(text: str) -> pathlib.Path:
    # The script may change the directory.
    path = pathlib.Path(text).absolute()
    try:
        check_report_path(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder: {str(path.parent)!r}")
    return path


def _without_our_frames(hook: Any) -> Any:
    """Return an `excepthook` that shows an error as if Python itself had run the program."""

    def show(kind: Any, error: BaseException, traceback: types.TracebackType | None) -> None:
        # Those of `runpy` and `importlib` are called `<frozen ...>`.
        while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(
            (__file__, "<frozen ")
        ):
            traceback = traceback.tb_next
        hook(kind, error.with_traceback(traceback), traceback)

    return show


def _show_info() -> None:
    """Print what a report of a bug should have."""
    for name in ("eqxjit", "jax", "jaxlib", "equinox"):
        print(f"{name:<10} {importlib.metadata.version(name)}")
    switches = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(_SWITCHES)]
    print(f"python     {platform.python_version()} ({sys.executable})")
    print(f"platform   {platform.platform()}")
    print(f"back end   {why_back_end}")
    print(f"switches   {', '.join(switches) or 'none'}")
    try:
        devices = ", ".join(f"{device} ({device.device_kind})" for device in jax.devices())
    except (AssertionError, ImportError, OSError, RuntimeError) as error:
        # JAX finds no device of the platform that was asked for, or no plugin.
        devices = f"none: {type(error).__name__}: {error}"
    print(f"devices    {devices}")


def _run_script(path: str) -> None:
    """Run a file as the main program, also for threads and exit handlers that outlive this."""
    # Not by `runpy.run_path`, which takes the module away at the end of the file.
    if not sys.flags.safe_path:
        # As Python does for `python script.py`: the script imports what lies beside it.
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    path = os.path.abspath(path)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(module).update(__file__=path, __loader__=loader, __builtins__=__builtins__)
    exec(loader.source_to_code(loader.get_data(path), path), vars(module))


if __name__ == "__main__":
    main(sys.argv[1:])
