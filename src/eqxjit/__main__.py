"""`python -m eqxjit script.py`: runs a script, or a module, with eqxjit installed.

For a script that can't be edited: it runs as under `python script.py`, and `equinox.filter_jit` is
eqxjit's in it and in the libraries that it uses. JAX and Equinox are imported before it: a variable
that they read at import, such as `JAX_ENABLE_X64`, must be set outside of the script.

With `--report FILE` it also writes what was traced and compiled, when and why: a page for `.html`,
a Chrome trace for `.json`. With `--explain` the log says why functions were traced again.

`python -m eqxjit --info` runs nothing: it prints versions, devices, the back end and the switches
that are set.
"""

import argparse
import contextlib
import importlib.machinery
import importlib.metadata
import logging
import os
import pathlib
import platform
import runpy
import sys
import types
from typing import NoReturn

import jax

from ._compat import why_back_end
from ._deploy.install import install
from ._diagnostics.log import explain_retraces
from ._diagnostics.report import CompileReport, check_report_path, recording

_SWITCHES = ("EQXJIT_", "EQX_ON_ERROR", "JAX_", "XLA_FLAGS")

_OUR_FILES = (__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap")


def main(argv: list[str]) -> None:
    """Install eqxjit, then run what the command line names; `argv` begins after `-m eqxjit`."""
    parser = argparse.ArgumentParser(
        prog="python -m eqxjit",
        usage="%(prog)s [-h] [--info] [--report FILE] [--explain] (-m module | script) ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--info", action="store_true", help="print what eqxjit runs on")
    parser.add_argument("--report", type=pathlib.Path, metavar="FILE", help="write a report there")
    parser.add_argument("--explain", action="store_true", help="log why functions are traced again")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module")
    parser.add_argument("program", nargs="?", help="a script, or a module; then its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.info:
        _show_info()
        return
    program, report = chosen.program, chosen.report and chosen.report.absolute()
    if program is None:
        parser.error("a script or a module is required")
    if report is not None:
        try:
            check_report_path(report)
        except ValueError as error:
            parser.error(str(error))
        if not report.parent.is_dir():
            parser.error(f"no such folder: {str(chosen.report.parent)!r}")
    if not chosen.module and not os.path.exists(program):
        parser.error(f"can't open file {program!r}: no such file")
    if not chosen.module and os.path.isdir(program) and not _has_main(program):
        parser.error(f"can't find '__main__' module in {program!r}")
    sys.argv = [program, *chosen.arguments]
    install()
    with contextlib.ExitStack() as stack:
        if chosen.explain:
            stack.enter_context(explain_retraces())
        if report is not None:
            recorded = CompileReport()
            stack.enter_context(recording(recorded))
            stack.callback(_save, recorded, report)
        try:
            _run(program, chosen.module)
        except BaseException as error:
            _raise_without_our_frames(error)


def _show_info() -> None:
    """Print what a report of a bug should have."""
    try:
        devices = ", ".join(f"{device} ({device.device_kind})" for device in jax.devices())
    except RuntimeError as error:
        # JAX finds no device of the platform that was asked for.
        devices = f"none: {error}"
    switches = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(_SWITCHES)]
    info = {
        **{name: importlib.metadata.version(name) for name in ("eqxjit", "jax", "jaxlib")},
        "equinox": importlib.metadata.version("equinox"),
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "devices": devices,
        "back end": why_back_end(),
        "switches": ", ".join(switches) or "none",
    }
    for name, value in info.items():
        print(f"{name:<10} {value}")


def _save(report: CompileReport, path: pathlib.Path) -> None:
    """Write the report, however the program ended."""
    try:
        report.save(path)
    except OSError as error:
        logging.getLogger("eqxjit").warning("The report can't be written: %s.", error)


def _has_main(path: str) -> bool:
    """Return whether a path is that of a folder, or of a zip file, that can be run."""
    return importlib.machinery.PathFinder.find_spec("__main__", [path]) is not None


def _run(program: str, is_module: bool) -> None:
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif _has_main(program):
        runpy.run_path(program, run_name="__main__")
    else:
        _run_script(program)


def _run_script(path: str) -> None:
    """Run a file as the main program, also for threads and exit handlers that outlive this.

    `runpy.run_path` would take the module away at the end of the file.
    """
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    path = os.path.abspath(path)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    code = loader.source_to_code(loader.get_data(path), path)
    module = types.ModuleType("__main__")
    vars(module).update(__file__=path, __loader__=loader, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _raise_without_our_frames(error: BaseException) -> NoReturn:
    # Raising adds a frame for each function that is left: they are dropped as Python prints it.
    show = sys.excepthook

    def show_from_script(
        kind: type[BaseException], error: BaseException, frames: types.TracebackType | None
    ) -> None:
        while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OUR_FILES):
            frames = frames.tb_next
        show(kind, error.with_traceback(frames), frames)

    sys.excepthook = show_from_script
    raise error


if __name__ == "__main__":
    main(sys.argv[1:])
