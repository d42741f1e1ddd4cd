"""`python -m eqxjit script.py`: runs a script, or a module, with eqxjit installed.

For a script that can't be edited: it runs as under `python script.py`, and `equinox.filter_jit` is
eqxjit's in it and in the libraries that it uses. JAX and Equinox are imported before it: a variable
that they read at import, such as `JAX_ENABLE_X64`, must be set outside of the script; one that the
script sets is named in the log.

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
from typing import Any, NoReturn

import jax

from ._code.call_site import call_site
from ._compat import why_back_end
from ._deploy.install import install
from ._diagnostics.log import explain_retraces
from ._diagnostics.report import CompileReport, check_report_path, recording

_logger = logging.getLogger("eqxjit")

_SWITCHES = (
    *("EQXJIT_NATIVE", "EQXJIT_SPECIALIZE", "EQXJIT_DEBUG", "EQXJIT_EXPLAIN_RETRACES"),
    *("EQX_ON_ERROR", "JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_DISABLE_JIT", "JAX_DEBUG_NANS"),
    *("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS"),
)

_OWN_FILES = (__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap")


def main(argv: list[str]) -> None:
    """Install eqxjit, then run what the command line names; `argv` begins after `-m eqxjit`."""
    parser = argparse.ArgumentParser(
        prog="python -m eqxjit",
        usage="%(prog)s [-h] [--info] [--report FILE] [--explain] (-m module | script) ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--info", action=_ShowInfo, help="print what eqxjit runs on")
    parser.add_argument("--report", type=_report_path, metavar="FILE", help="write a report there")
    parser.add_argument("--explain", action="store_true", help="log why functions are traced again")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module")
    parser.add_argument("program", help="a script, or the name of a module; then its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    program: str = chosen.program
    if not chosen.module and not os.path.exists(program):
        parser.error(f"can't open file {program!r}: no such file")
    if not chosen.module and os.path.isdir(program) and not _has_main(program):
        parser.error(f"can't find '__main__' module in {program!r}")
    sys.argv = [program, *chosen.arguments]
    sys.addaudithook(_log_late_variables)
    install()
    with contextlib.ExitStack() as stack:
        if chosen.explain:
            stack.enter_context(explain_retraces())
        if chosen.report is not None:
            report = CompileReport()
            stack.enter_context(recording(report))
            stack.callback(_save, report, chosen.report.absolute())
        try:
            _run(program, chosen.module)
        except BaseException as error:
            _raise_without_own_frames(error)


class _ShowInfo(argparse.Action):
    """An option that prints what eqxjit runs on, and ends the program, as `--help` does."""

    def __init__(self, option_strings: list[str], dest: str, help: str | None = None):
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for name, value in _info().items():
            print(f"{name:<10} {value}")
        parser.exit()


def _info() -> dict[str, str]:
    """Return what a report of a bug should have."""
    packages = ("eqxjit", "jax", "jaxlib", "equinox")
    switches = [
        f"{name}={value}" for name, value in sorted(os.environ.items()) if name in _SWITCHES
    ]
    return {
        **{name: importlib.metadata.version(name) for name in packages},
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "devices": _devices(),
        "back end": why_back_end(),
        "switches": ", ".join(switches) or "none",
    }


def _devices() -> str:
    try:
        devices = jax.devices()
    except RuntimeError as error:
        # JAX finds no device of the platform that was asked for.
        return f"none: {error}"
    return ", ".join(f"{device} ({device.device_kind})" for device in devices)


def _report_path(text: str) -> pathlib.Path:
    path = pathlib.Path(text)
    try:
        check_report_path(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder: {str(path.parent)!r}.")
    return path


def _save(report: CompileReport, path: pathlib.Path) -> None:
    """Write the report, however the program ended."""
    try:
        report.save(path)
    except OSError as error:
        _logger.warning("The report can't be written: %s.", error)


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


def _log_late_variables(event: str, arguments: tuple[Any, ...]) -> None:
    """Warn of a variable that the script sets and JAX has already read: an audit hook."""
    # Everything that is audited comes by here.
    if event != "os.putenv":
        return
    name, value = map(os.fsdecode, arguments)
    if name.startswith(("JAX_", "EQX_")) and os.environ.get(name) != value:
        _logger.warning(
            "%s: `%s` is set when JAX and Equinox have already read it. Set it outside of the "
            "script: `%s=%s python -m eqxjit ...`.",
            # The script's line, past `os.environ`.
            call_site(),
            name,
            name,
            value,
        )


def _run_script(path: str) -> None:
    """Run a file as the main program, which it stays: threads and exit handlers outlive this.

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


def _raise_without_own_frames(error: BaseException) -> NoReturn:
    # Raising adds a frame for each function that is left: they are dropped as Python prints it.
    show = sys.excepthook

    def show_from_script(
        kind: type[BaseException], error: BaseException, frames: types.TracebackType | None
    ) -> None:
        while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OWN_FILES):
            frames = frames.tb_next
        show(kind, error.with_traceback(frames), frames)

    sys.excepthook = show_from_script
    raise error


if __name__ == "__main__":
    main(sys.argv[1:])
