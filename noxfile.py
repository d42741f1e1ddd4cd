"""The checks of `.ci/run` one by one, on every Python: `nox -s tests-3.12`, `nox -s lint`."""

import sysconfig
from pathlib import Path

import nox

nox.options.sessions = ["tests-3.11", "lint"]

PYTHONS = ["3.11", "3.12", "3.13"]
# With each Python, beside the latest that installs; 0.10 is the last jax for Python 3.11.
OLDER = {"lowest": ["-c", ".ci/lowest.txt"], "jax-0.9": ["jax<0.10"], "jax-0.10": ["jax<0.11"]}

# What carries out specialised calls.
BACK_ENDS = {
    "native": {},
    "python": {"EQXJIT_NATIVE": "0"},
    "none": {"EQXJIT_SPECIALIZE": "0"},
}


@nox.session(python=PYTHONS)
@nox.parametrize("back_end", BACK_ENDS)
def tests(session: nox.Session, back_end: str) -> None:
    """Run the test suite: specialised calls in C, in generated Python, and none."""
    session.install("-e", ".[test]")
    session.run("pytest", "-m", "", *session.posargs, env=BACK_ENDS[back_end])


@nox.session(python=PYTHONS)
def wheel(session: nox.Session) -> None:
    """Build the wheel for this platform, and test it."""
    session.install("build")
    folder = session.create_tmp()
    session.run("python", "-m", "build", "--wheel", "--outdir", folder)
    [wheel] = Path(folder).glob("*.whl")
    session.install(f"{wheel}[test]")
    session.run("python", "-P", "-c", "import eqxjit; assert eqxjit.native_enabled()")
    session.run("python", "-P", "-m", "pytest", "tests", *session.posargs)


@nox.session(python="3.11")
def sanitizers(session: nox.Session) -> None:
    """Run the tests of the native back end with AddressSanitizer and UndefinedBehaviorSanitizer."""
    flags = "-g -O1 -Werror -Wall -Wextra -Wno-cast-function-type -Wno-missing-field-initializers"
    checks = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
    session.install("-e", ".[test]", env={"CFLAGS": f"{flags} {checks}", "LDFLAGS": checks})
    libraries = [
        session.run("gcc", f"-print-file-name={name}.so", silent=True, external=True)
        for name in ("libasan", "libubsan")
    ]
    env = {
        "LD_PRELOAD": " ".join(str(library).strip() for library in libraries),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "PYTHONMALLOC": "malloc",
    }
    files = ["tests/fast", "tests/statics", "tests/calls", "tests/trial"]
    session.run("pytest", "-n0", *files, env=env)


@nox.session
def analyze(session: nox.Session) -> None:
    """Analyse the native back end by clang-tidy."""
    session.install("clang-tidy")
    # Python's macros are full of the second and third. A type can't have parentheses, and no libc
    # but Microsoft's has `memcpy_s`.
    checks = (
        "-*,clang-analyzer-*,bugprone-*,cert-*,performance-*,-bugprone-easily-swappable-parameters,"
        "-bugprone-signed-bitwise,-bugprone-multi-level-implicit-pointer-conversion,"
        "-bugprone-macro-parentheses,"
        "-clang-analyzer-security.insecureAPI.DeprecatedOrUnsafeBufferHandling"
    )
    session.run(
        "clang-tidy",
        f"--checks={checks}",
        "--warnings-as-errors=*",
        "src/eqxjit/_fast/native.c",
        "--",
        f"-isystem{sysconfig.get_path('include')}",
    )


@nox.session(python=PYTHONS)
@nox.parametrize("versions", ["latest", *OLDER])
def versions(session: nox.Session, versions: str) -> None:
    """Run the test suite with these versions of jax and equinox; adds a row to README's table."""
    session.install("-e", ".[test]", *OLDER.get(versions, []))
    outcome = f"{session.create_tmp()}/outcome.xml"
    try:
        session.run("pytest", f"--junitxml={outcome}", *session.posargs)
    finally:
        session.run("python", ".ci/versions.py", outcome)


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


@nox.session(python="3.11")
def records(session: nox.Session) -> None:
    """Make all records of the benchmarks anew, and write their figures; on a quiet machine."""
    session.install("-e", ".[bench,peers]")
    session.run("python", "-m", "bench", "all")
