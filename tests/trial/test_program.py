"""`python -m eqxjit --trial` prints its findings however a program is run and ends."""

import textwrap

import jax.numpy as jnp
import pytest

import eqxjit
from tests.support.processes import ROOT, python

PROGRAM = """
    import sys
    import equinox as eqx
    import jax.numpy as jnp

    @eqx.filter_jit
    def double(x):
        return 2 * x

    if __name__ == "__main__":
        for _ in range(10_000):
            x = double(jnp.ones(3))
        print("arguments:", sys.argv[1:])
"""


def run(tmp_path, program, *arguments, options=("--trial",), **environment):
    (tmp_path / "train.py").write_text(textwrap.dedent(program))
    return python("-m", "eqxjit", *options, *arguments, cwd=tmp_path, **environment)


def test_a_script_with_arguments(tmp_path):
    result = run(tmp_path, PROGRAM, "train.py", "--trial=no", "-m", "x.py")
    assert result.returncode == 0, result.stderr
    printed = result.stdout
    assert "arguments: ['--trial=no', '-m', 'x.py']" in printed
    assert "train.py: " in printed
    assert "equal, bit for bit  double (train.py:6)" in printed
    assert "under Equinox" not in printed
    assert "Under Equinox's filter_jit" in printed
    assert "train.py:12" in printed


def test_arguments_of_a_script_without_a_suffix_are_its_own(tmp_path):
    script = tmp_path / "train"
    script.write_text("import sys; print(sys.argv[1:])")
    result = python("-m", "eqxjit", str(script), "--trial=3", "--no-compare", "x.py")
    assert (result.returncode, result.stdout) == (0, "['--trial=3', '--no-compare', 'x.py']\n")


def test_a_module_and_a_page(tmp_path):
    page = tmp_path / "trial.html"
    options = f"--trial={page}", "-m"
    result = run(tmp_path, PROGRAM, "train", "--a=1", options=options)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "arguments: ['--a=1']\n"
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "equal, bit for bit" in text


def test_a_report_leaves_out_what_a_trial_traces():
    @eqxjit.filter_jit
    def double(x):
        return 2 * x

    with eqxjit.compile_report(print=False) as report, eqxjit.trial(print=False) as trial:
        double(jnp.ones(3))
    [compared] = trial.functions
    assert compared.compared == 1
    [row] = [row for row in report.rows if row.function == "double"]
    assert row.traces == 1
    assert len([span for span in report.spans if span.function == "double"]) == 3


def test_a_trial_is_silent_if_it_is_not_to_print(capsys):
    with eqxjit.trial(print=False):
        pass
    with eqxjit.trial():
        pass
    assert capsys.readouterr().out.count("this program: ") == 1


def test_a_program_without_warm_calls_says_so(tmp_path):
    result = run(tmp_path, "print(1)", "train.py")
    assert result.returncode == 0, result.stderr
    assert "no function under filter_jit was called" in result.stdout


def test_only_eqxjit_is_timed_without_a_comparison(tmp_path):
    result = run(tmp_path, PROGRAM, "train.py", options=("--trial", "--no-compare"))
    assert result.returncode == 0, result.stderr
    assert "not compared" in result.stdout
    assert "Under Equinox" not in result.stdout


# A shell that starts the tests in the background has them, and their children, ignore SIGINT.
INTERRUPTED = (
    "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "os.kill(os.getpid(), signal.SIGINT)"
)


@pytest.mark.parametrize(
    ("ending", "status", "message"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("raise KeyError('oh')", 1, "KeyError: 'oh'"),
        (INTERRUPTED, -2, "KeyboardInterrupt"),
    ],
)
def test_what_was_seen_is_printed_however_it_ends(tmp_path, ending, status, message):
    program = textwrap.dedent(PROGRAM) + f"    {ending}\n"
    result = run(tmp_path, program, "train.py")
    assert result.returncode in (status, 130 if status < 0 else status), result.stderr
    assert message in result.stderr
    assert "equal, bit for bit" in result.stdout


def test_status_1_tells_that_results_differ(tmp_path):
    program = """
        import equinox as eqx, jax.numpy as jnp
        traces = []

        @eqx.filter_jit
        def step(x):
            traces.append(1)
            return {"a": x + (len(traces) == 1)}

        for _ in range(3):
            step(jnp.ones(3))
    """
    result = run(tmp_path, program, "train.py")
    assert result.returncode == 1, result.stdout
    assert "output['a'][0]: np.float32(2.0) under eqxjit, np.float32(1.0) under" in result.stdout
    assert "DIFFERENT" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("native", ["0", "1"])
def test_two_swapped_arrays_in_a_fast_path_are_found_on_an_example(tmp_path, native):
    # C code can't be patched, so its fast paths get arguments that make them swap results.
    program = """
        import sys
        from eqxjit import __main__, _compat
        from eqxjit._fast import make

        class Swapped:
            def __init__(self, jitted):
                self.jitted = jitted

            def __call__(self, *arrays):
                [(program, found)] = self.jitted(*arrays).items()
                shapes = [x.shape for x in found]
                pairs = [(i, j) for i in range(len(found)) for j in range(i)]
                for i, j in pairs:
                    if shapes[i] == shapes[j] and found[i].dtype == found[j].dtype:
                        found[i], found[j] = found[j], found[i]
                        break
                return {program: found}

            def __getattr__(self, name):
                return getattr(self.jitted, name)

        if _compat.native is None:
            init = make.PythonFast.instantiate
            def instantiate(self, handler, otherwise):
                jitted, self.entry.jitted = self.entry.jitted, Swapped(self.entry.jitted)
                try:
                    return init(self, handler, otherwise)
                finally:
                    self.entry.jitted = jitted
            make.PythonFast.instantiate = instantiate
        else:
            fast = make.native.Fast
            class Native:
                Fast = staticmethod(lambda entry, f, *rest: fast(entry, Swapped(f), *rest))
                __getattr__ = lambda self, name: getattr(_compat.native, name)
            make.native = Native()
        __main__.main(["--trial", "-m", "bench.examples.replay_buffer", "--steps", "400"])
    """
    path = tmp_path / "mutant.py"
    path.write_text(textwrap.dedent(program))
    result = python(str(path), cwd=ROOT, EQXJIT_NATIVE=native)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "DIFFERENT" in result.stdout
    assert "learn: output[0].layers[" in result.stdout


def test_a_page_has_the_suffix_of_one_and_may_be_empty(tmp_path):
    path = tmp_path / "short.py"
    path.write_text("print(1)")
    wrong = python("-m", "eqxjit", f"--trial={tmp_path / 'page.txt'}", str(path))
    assert wrong.returncode == 2
    assert "must end with .html" in wrong.stderr
    assert wrong.stdout == ""
    apart = python("-m", "eqxjit", "--trial", str(tmp_path / "page.html"), str(path))
    assert apart.returncode == 2
    assert "with `=`" in apart.stderr
    right = python("-m", "eqxjit", f"--trial={tmp_path / 'page.html'}", str(path))
    assert (right.returncode, right.stdout) == (0, "1\n"), right.stderr
    assert "<table" in (tmp_path / "page.html").read_text()


CLOSED = "sys.stdout.close()"

# Some programs write a log, too, by an object that has only the methods that Python needs.
REPLACED = """
    class Tee:
        def write(self, text):
            sys.__stdout__.write(text)

        def flush(self):
            sys.__stdout__.flush()

    sys.stdout = Tee()
"""


# Nor does it write after its file is closed.
FAILING = REPLACED + "Tee.write = lambda self, text: sys.stdin.write(text)"


@pytest.mark.parametrize(
    ("ending", "where"), [(CLOSED, "stderr"), (REPLACED, "stdout"), (FAILING, "stderr")]
)
def test_a_program_may_close_or_replace_its_standard_output(tmp_path, ending, where):
    program = textwrap.dedent(PROGRAM) + textwrap.dedent(ending)
    result = run(tmp_path, program, "train.py")
    assert result.returncode == 0, result.stderr
    assert "calls compared" in getattr(result, where)
    assert (result.stdout + result.stderr).count(" after start-up.") == 1


def test_a_report_is_printed_once_on_an_output_that_cannot_be_flushed(tmp_path):
    program = textwrap.dedent(PROGRAM) + textwrap.dedent(REPLACED) + "del Tee.flush"
    # Python itself ends such a program with a status of its own.
    result = run(tmp_path, program, "train.py")
    assert result.stdout.count(" after start-up.") == 1
    assert " after start-up." not in result.stderr


def test_without_a_line_there_is_no_advice(tmp_path):
    program = """
        import time

        import jax.numpy as jnp

        x, end = jnp.ones(3), time.monotonic() + 0.3
        while time.monotonic() < end:
            x = jnp.sin(x)
    """
    # No line of an installed file is the user's.
    (tmp_path / "site-packages").mkdir()
    result = run(tmp_path / "site-packages", program, "train.py")
    assert "operations of JAX" in result.stdout
    assert "call them in a jitted function" not in result.stdout


def test_a_page_that_cannot_be_written_is_an_error_at_once(tmp_path):
    (tmp_path / "train.py").write_text("print('ran')")
    page = tmp_path / "nowhere" / "page.html"
    result = python("-m", "eqxjit", f"--trial={page}", str(tmp_path / "train.py"))
    assert result.returncode == 2
    assert "can't write the page" in result.stderr
    assert result.stdout == ""


def test_the_sampler_reads_source_without_warnings(tmp_path):
    program = r"""
        import time

        import eqxjit
        import jax.numpy as jnp

        double = eqxjit.filter_jit(lambda x: 2 * x)
        double(jnp.ones(3)), double(jnp.ones(3))
        end = time.monotonic() + 0.5
        text = "it's" * 100_000
        while time.monotonic() < end:
            text.replace("1\d", 'it\'s')
    """
    result = run(tmp_path, program, "train.py", PYTHONWARNINGS="always")
    # Python itself warns once, when it compiles the program.
    assert "train.py:12 (" in result.stdout
    assert "<unknown>" not in result.stderr
