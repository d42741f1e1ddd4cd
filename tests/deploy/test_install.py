"""`eqxjit.install` replaces Equinox's `filter_jit`, for existing wrappers and for new ones."""

import contextlib
import copy
import functools
import gc
import sys
import textwrap
import types
import warnings
import weakref

import cloudpickle
import diffrax
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import lineax
import numpy as np
import optimistix
import pytest

import eqxjit
from tests.calls.test_donation import DONATE
from tests.support import processes
from tests.support.helpers import assert_same, warm
from tests.support.models import arrays
from tests.support.processes import ROOT, run
from tests.support.sides import CALLS
from tests.support.threads import race

# Wrapped in a partial, because `install` would replace the function itself in this module.
UPSTREAM = functools.partial(eqx.filter_jit)
X = jnp.arange(3.0)


# An installation changes these names and the wrappers' methods, and nothing else.
WRAPPER = type(UPSTREAM(lambda: None))
METHODS = {name: vars(WRAPPER)[name] for name in ("__call__", "lower", "__get__")}


@pytest.fixture(autouse=True)
def uninstalled():
    yield
    eqxjit.uninstall()
    assert eqx.filter_jit is eqx._jit.filter_jit is UPSTREAM.func
    assert {name: vars(WRAPPER)[name] for name in METHODS} == METHODS


def ours(wrapper):
    """Return eqxjit's wrapper of the same function, whose counters the tests read."""
    return eqxjit.filter_jit(wrapper.__wrapped__)


@pytest.fixture
def no_upstream(monkeypatch):
    """A context in which eqxjit is installed, and any call that upstream would serve fails."""

    @contextlib.contextmanager
    def context():
        def refused(wrapper, *args):
            raise AssertionError(f"upstream was called: {wrapper.fn}")

        with eqxjit.install(), monkeypatch.context() as patch:
            patch.setattr(eqx._jit, "_call", refused)
            yield

    return context


# --- Libraries ----------------------------------------------------------------------------------


def decay(t, y, rate):
    return -rate * y


def solve(y0=X, rate=0.7, controller=None, steps=100):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(decay),
        diffrax.Tsit5(),
        0.0,
        1.0,
        0.1,
        y0,
        args=jnp.asarray(rate),
        stepsize_controller=controller or diffrax.ConstantStepSize(),
        max_steps=steps,
    )


ADAPTIVE = diffrax.PIDController(rtol=1e-4, atol=1e-6)


def cube(y, value):
    return y**3 - value


def line(coefficients, points):
    return coefficients[0] * points + coefficients[1] - jnp.sin(points)


POINTS = jnp.linspace(0.0, 1.0, 8)
MATRIX = jnp.eye(3) + 0.1

CALLS_OF_LIBRARIES = {
    "adaptive steps": lambda: solve(controller=ADAPTIVE),
    "gradient": lambda: jax.grad(lambda rate: solve(rate=rate).ys.sum())(0.7),
    "filter_vmap": lambda: eqx.filter_vmap(lambda y: solve(y, controller=ADAPTIVE).ys)(POINTS),
    "root_find": lambda: optimistix.root_find(cube, optimistix.Newton(1e-5, 1e-5), X + 1, args=X),
    "least_squares": lambda: optimistix.least_squares(
        line, optimistix.LevenbergMarquardt(1e-5, 1e-5), jnp.zeros(2), args=POINTS
    ),
    "linear_solve": lambda: lineax.linear_solve(lineax.MatrixLinearOperator(MATRIX), X),
}


@pytest.mark.parametrize("call", CALLS_OF_LIBRARIES.values(), ids=CALLS_OF_LIBRARIES)
@pytest.mark.slow
def test_libraries_return_the_same(call, no_upstream):
    expected = arrays(call())
    with no_upstream():
        for _ in range(CALLS):
            assert_same(arrays(call()), expected)
    assert_same(arrays(call()), expected)


FAILING = {
    "diffeqsolve": lambda: solve(steps=2),
    "root_find": lambda: optimistix.root_find(
        lambda y, _: y**2 + 1, optimistix.Newton(1e-5, 1e-5), X, max_steps=3
    ),
    "linear_solve": lambda: lineax.linear_solve(lineax.MatrixLinearOperator(MATRIX * jnp.nan), X),
    "error_if, compiled": lambda: eqx.filter_jit(lambda x: eqx.error_if(x, x > 1, "large"))(X),
}


@pytest.mark.parametrize("call", FAILING.values(), ids=FAILING)
@pytest.mark.slow
def test_libraries_raise_the_same(call, no_upstream):
    def raised():
        with pytest.raises(RuntimeError) as info:
            call()
        # The text before it is the stack of the call that traced.
        return type(info.value), str(info.value).rpartition("EquinoxRuntimeError: ")[2]

    expected = raised()
    assert expected[0] is eqx.EquinoxRuntimeError
    assert len(expected[1].split("-----")[0]) > 5
    with no_upstream():
        for _ in range(CALLS):
            assert raised() == expected


# --- What is redirected ---------------------------------------------------------------------------


def make(fun=lambda x, n=2: x * n, **options):
    """Return a new function, wrapped by Equinox."""

    @functools.wraps(fun)
    def function(*args, **kwargs):
        return fun(*args, **kwargs)

    return UPSTREAM(function, **options)


def test_filter_jit_is_ours_wherever_it_is_looked_up():
    importer, other = types.ModuleType("importer"), types.ModuleType("other")
    importer.filter_jit = importer.another_name = UPSTREAM.func
    other.filter_jit = make
    sys.modules |= {"importer": importer, "other": other, "no module": UPSTREAM.func}
    try:
        with eqxjit.install():
            for holder in (eqx, eqx._jit, importer):
                assert holder.filter_jit is eqxjit.filter_jit
            assert importer.another_name is eqxjit.filter_jit
            assert other.filter_jit is make
        assert importer.filter_jit is importer.another_name is UPSTREAM.func
    finally:
        for name in ("importer", "other", "no module"):
            del sys.modules[name]


class Model(eqx.Module):
    weight: jax.Array

    @UPSTREAM
    def step(self, x, n=1):
        return self.weight * x * n

    @staticmethod
    @UPSTREAM
    def helper(x):
        return x - 1

    @property
    @UPSTREAM
    def double(self):
        return self.weight * 2

    def __call__(self, x):
        return self.weight + x


def test_methods(no_upstream):
    model = Model(X)
    expected = model.step(X, 3), model.helper(X), model.double, eqx.filter_jit(model)(X)
    wrapped = UPSTREAM(model)
    before = model.step
    with no_upstream():
        for _ in range(CALLS):
            assert_same((model.step(X, 3), model.helper(X), model.double, wrapped(X)), expected)
            assert_same(Model.step(model, X, n=3), expected[0])
            assert_same(before(X, 3), expected[0])
        meanwhile = model.step
        assert type(meanwhile).__name__ == "BoundJitFunction"
        assert Model.step is vars(Model)["step"]
    assert_same((meanwhile(X, 3), model.step(X, 3)), (expected[0], expected[0]))
    assert type(model.step) is eqx.Partial


def test_what_a_wrapper_holds_is_passed_along(no_upstream):
    wrapped = UPSTREAM(Model(X))
    other = eqx.tree_at(lambda f: f.__wrapped__.weight, wrapped, X + 1)
    with no_upstream():
        for _ in range(CALLS):
            assert_same(wrapped(X), X + X)
            assert_same(other(X), X + 1 + X)
            assert_same(eqx.filter_jit(lambda f, x: f(x))(other, X), X + 1 + X)
        assert ours(wrapped).cache_info().traces == 1


@pytest.mark.parametrize("donate", DONATE)
def test_donation(donate, no_upstream):
    # One array more than can be reused, so that JAX warns about it.
    def step(x, y, z):
        return x + 1, y + z.sum()

    def deleted_and_warned(f):
        args = [jnp.arange(3.0), jnp.arange(3.0), jnp.arange(4.0)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            f(*args)
        about = [w for w in caught if "donated buffers were not usable" in str(w.message)]
        return [arg.is_deleted() for arg in args], len(about)

    expected = deleted_and_warned(UPSTREAM(step, donate=donate))
    f = make(step, donate=donate)
    with no_upstream():
        assert deleted_and_warned(f) == expected
        assert [deleted_and_warned(f)[0] for _ in range(CALLS)] == [expected[0]] * CALLS


def test_lower(no_upstream):
    f = make()
    with no_upstream():
        compiled = f.lower(X, 3).compile()
        assert_same(compiled(X, 3), X * 3)
        assert ours(f).cache_info().traces == 1
        assert_same(f(X, 3), X * 3)
        assert ours(f).cache_info().traces == 1
    assert isinstance(f.lower(X, 3), eqx._compile_utils.Lowered)


def test_equinox_own_uses_go_on(no_upstream):
    f = make()

    def loop(x):
        return eqxi.while_loop(
            lambda v: v[0] < 3, lambda v: (v[0] + 1, f(v[1])), (0, x), kind="bounded", max_steps=4
        )[1]

    with no_upstream():
        for _ in range(CALLS):
            assert eqx.filter_eval_shape(f, X).shape == (3,)
            assert_same(eqx.filter_closure_convert(f, X)(X), X * 2)
            assert_same(eqxi.noinline(f)(X), X * 2)
            assert_same(eqx.filter_grad(lambda x: loop(x).sum())(X), X * 0 + 8)
            assert_same(eqx.filter_checkpoint(f)(X), X * 2)
    with eqxjit.install(), jax.disable_jit():
        assert_same(f(X), X * 2)


def test_a_wrapper_stays_the_pytree_that_it_was(no_upstream):
    f = make()
    g, structure, text = make(f.__wrapped__), jax.tree.structure(f), repr(f)
    with no_upstream():
        warm(f, X)
    assert jax.tree.structure(f) == structure
    assert repr(f) == text
    assert f == eqx.tree_at(lambda f: f.fn, f, f.fn)
    assert hash(f) == hash(copy.copy(f))
    assert g != f
    for twin in (copy.copy(f), copy.deepcopy(f), cloudpickle.loads(cloudpickle.dumps(f))):
        with no_upstream():
            assert_same(warm(twin, X), X * 2)
        assert_same(twin(X), X * 2)


def pickled(value):
    """Return a pickle by value, without the path of the tests' folder."""
    return cloudpickle.dumps(value).replace(str(ROOT).encode(), b"")


def test_nothing_of_eqxjit_is_left_in_a_wrapper_or_its_pickle(no_upstream):
    f, model = make(), Model(X)
    wrapped = UPSTREAM(model)
    for _ in range(2):
        with no_upstream():
            warm(f, X)
            wrapped(X), model.step(X)
            for each in (f, wrapped, vars(Model)["step"], f.__wrapped__):
                assert b"eqxjit" not in pickled(each)
        for each in (f, wrapped, vars(Model)["step"], f.__wrapped__):
            assert b"eqxjit" not in pickled(each)
        held = [*vars(f).values(), *vars(wrapped).values()]
        assert not any("eqxjit" in type(value).__module__ for value in held)


# --- What stays with upstream ---------------------------------------------------------------------


def with_options(x):
    return x * 2


def test_wrappers_with_options_go_on_using_upstreams():
    class Model:
        @functools.partial(UPSTREAM, inline=True)
        def method(self, x):
            return x * 2

    before = UPSTREAM(with_options, inline=True)
    with eqxjit.install():
        for f in (before, UPSTREAM(with_options, keep_unused=True)):
            for _ in range(CALLS):
                assert_same(f(X), X * 2)
            assert f.lower(X).compile()(X).tolist() == [0, 2, 4]
            assert f._cached._cache_size() == 1
        assert type(Model().method) is eqx.Partial
        assert_same(Model().method(X), X * 2)


@pytest.mark.parametrize("clear", [lambda: None, eqx.clear_caches])
def test_options_that_are_defaults_are_no_options(clear, no_upstream):
    f = make(inline=False)
    clear()
    with no_upstream():
        assert_same(warm(f, X), X * 2)


def test_unknown_wrappers_go_on_using_upstreams():
    """If Equinox's wrappers get a new field, it may be a new option."""
    program = """
        import equinox as eqx
        import equinox._jit
        import diffrax, jax.numpy as jnp

        eqx._jit._JitWrapper.__dataclass_fields__['block'] = None
        import eqxjit

        upstream, wrapper = eqx.filter_jit, vars(eqx._jit._JitWrapper).copy()
        with eqxjit.install():
            assert eqx.filter_jit is eqxjit.filter_jit
            assert vars(eqx._jit._JitWrapper) == wrapper
            diffrax.linear_interpolation(jnp.arange(3.0), jnp.arange(3.0))
            print(diffrax.linear_interpolation._cached._cache_size())
        assert eqx.filter_jit is upstream
    """
    assert run(program) == "1\n"


# --- Memory ---------------------------------------------------------------------------------------


def test_dropped_wrappers_are_freed():
    """This also holds for a wrapper to which its own function refers, by a closure."""

    def recursive():
        @UPSTREAM
        def f(x, n):
            return x if n == 0 else f(x + 1, n - 1)

        return f

    alive = []
    with eqxjit.install():
        for _ in range(3):
            f = recursive()
            assert_same(warm(f, X, 2), X + 2)
            alive += [weakref.ref(f), weakref.ref(f.__wrapped__)]
            del f
        gc.collect()
        assert {ref() for ref in alive} == {None}


# --- Installing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_it_lasts_until_all_have_ended_or_uninstall(order):
    handles = [eqxjit.install() for _ in range(3)]
    for i in order:
        assert eqx.filter_jit is eqxjit.filter_jit
        handles[i].uninstall()
        handles[i].uninstall()
    assert eqx.filter_jit is UPSTREAM.func
    with eqxjit.install():
        # Ending an installation twice doesn't end another installation.
        handles[0].uninstall()
        assert eqx.filter_jit is eqxjit.filter_jit
        eqxjit.install()
        eqxjit.uninstall()
        assert eqx.filter_jit is UPSTREAM.func


def test_what_another_tool_put_there_is_left_alone(monkeypatch):
    with eqxjit.install():
        monkeypatch.setattr(eqx, "filter_jit", make)
    assert eqx.filter_jit is make
    assert eqx._jit.filter_jit is UPSTREAM.func
    # What is there before an installation is replaced, and restored afterwards.
    with eqxjit.install():
        assert eqx.filter_jit is eqx._jit.filter_jit is eqxjit.filter_jit
    assert eqx.filter_jit is make
    monkeypatch.undo()
    eqx.filter_jit = UPSTREAM.func


def test_what_is_wrapped_meanwhile_goes_on():
    with eqxjit.install():
        f = eqx.filter_jit(donate="all")(lambda x: x + 1)
    assert type(f) is type(eqxjit.filter_jit(max))
    assert_same(f(X + 0), X + 1)


@pytest.mark.slow
def test_threads_that_call_while_others_install():
    functions = [make(lambda x, n=i: x * n) for i in range(4)]
    installing = [1, 2, 3]

    def call(i):
        while installing:
            i += 1
            n, size = i % 4, 1 + i % 3
            assert functions[n](np.ones(size, np.float32)).tolist() == [n] * size

    def install():
        try:
            for i in range(30):
                handles = [eqxjit.install() for _ in range(2)]
                assert eqx.filter_jit is eqxjit.filter_jit
                for handle in handles[:: 1 if i % 2 else -1]:
                    handle.uninstall()
        finally:
            installing.pop()

    race(lambda i: install() if i < 3 else call(i), 6)
    assert eqx.filter_jit is UPSTREAM.func


# --- python -m eqxjit -----------------------------------------------------------------------------

SCRIPT = """
    import multiprocessing
    import pickle
    import sys
    import threading

    import equinox as eqx
    from equinox import filter_jit

    import eqxjit


    class Here:
        pass


    def double(x):
        return 2 * x


    def fail():
        raise ValueError("as planned")


    def late():
        threading.main_thread().join()
        print("late:", type(pickle.loads(pickle.dumps(Here()))) is Here, flush=True)


    if __name__ == "__main__":
        whose = {eqx.filter_jit, filter_jit, eqxjit.filter_jit}
        print("ours" if len(whose) == 1 else "upstream's", flush=True)
        print(sys.argv[0], sys.argv[1:], flush=True)
        print(__name__, __file__ == sys.modules["__main__"].__file__, sys.path[0], flush=True)
        print(type(pickle.loads(pickle.dumps(Here()))) is Here, flush=True)
        if sys.argv[1:] == ["fail"]:
            fail()
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(double, [1, 2]), flush=True)
        threading.Thread(target=late).start()
        sys.exit(7)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("scripts") / "a_script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def python(*arguments, cwd):
    result = processes.python(*arguments, cwd=cwd)
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(["-x", "--help", "-m"], marks=pytest.mark.slow), ["fail"]],
    ids=" ".join,
)
def test_a_script_runs_as_under_python(script, arguments):
    name, folder = f"{script.parent.name}/a_script.py", script.parent.parent
    status, stdout, stderr = python(name, *arguments, cwd=folder)
    assert stdout.startswith(f"upstream's\n{name} {arguments}\n__main__ True {script.parent}")
    found = python("-m", "eqxjit", name, *arguments, cwd=folder)
    assert found == (status, stdout.replace("upstream's", "ours"), stderr)


def test_a_script_that_does_not_compile(tmp_path):
    (tmp_path / "script.py").write_text("def main(:\n")
    [status, _, stderr] = python("-m", "eqxjit", "script.py", cwd=tmp_path)
    assert (status, "", stderr) == python("script.py", cwd=tmp_path)


def test_a_module_runs_as_under_python(script):
    status, stdout, stderr = python("-m", "eqxjit", "-m", "a_script", "fail", cwd=script.parent)
    assert status == 1
    assert stdout.splitlines() == [
        "ours",
        f"{script} ['fail']",
        f"__main__ True {script.parent}",
        "True",
    ]
    assert stderr.endswith("ValueError: as planned\n")
    # The traceback has only frames of the module.
    assert (stderr.count("  File "), "frozen" in stderr) == (2, False)


@pytest.mark.parametrize(
    "ending", [pytest.param("raise SystemExit(3)", marks=pytest.mark.slow), "1 / 0"]
)
def test_a_script_is_reported_and_explained(ending, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import equinox as eqx, jax.numpy as jnp, os, sys\n"
        "power = eqx.filter_jit(lambda x, n: x ** n)\n"
        "power(jnp.ones(2), 2), power(jnp.ones(2), 3)\n"
        "os.chdir('/')\n"
        f"print(sys.argv[1:])\n{ending}\n"
    )
    plain = python("script.py", "--report", "x", cwd=tmp_path)
    name = "report.html" if "/" in ending else "report.json"
    arguments = ("--report", name, "--explain", "script.py", "--report", "x")
    status, stdout, stderr = python("-m", "eqxjit", *arguments, cwd=tmp_path)
    assert (status, stdout) == plain[:2]
    reason = "`n` was 2, is 3"
    assert f"static value changed: {reason}" in stderr
    assert stderr.endswith(plain[2].partition("\n")[2])
    assert reason in (tmp_path / name).read_text()
    # The table is printed before Python's own message, and the path of the page after it.
    table = stderr.index("In all, ")
    assert (
        table
        < stderr.index("<lambda>", table)
        < stderr.index(f"The report is in {tmp_path}/{name}.")
    )


def test_a_setting_that_comes_too_late_is_named(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "os.environ['JAX_ENABLE_X64'] = sys.argv[1]\n"
        "os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'\n"
        "import jax\n"
        "print(jax.config.jax_enable_x64, jax.device_count())\n"
    )
    status, stdout, stderr = python("-m", "eqxjit", "script.py", "1", cwd=tmp_path)
    assert (status, stdout) == (0, "False 2\n")
    [line] = stderr.splitlines()
    assert line.endswith("what it has set: JAX_ENABLE_X64. Set this outside of the program.")
    # The program finds what it has set.
    arguments = "-m", "eqxjit", "script.py", "1"
    result = processes.python(*arguments, cwd=tmp_path, JAX_ENABLE_X64="1")
    assert (result.stdout, result.stderr) == ("True 2\n", "")


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--report", "report.txt", "x.py"], 1, "saved as .html or .json"),
        (["--report", "no/report.html", "x.py"], 1, "No such file or directory: '/"),
        (["--version"], 0, f"eqxjit {eqxjit.__version__}\n"),
        (["--help"], 0, "runs a script, or a module"),
        ([], 2, "required"),
        (["--report", "x.py"], 2, "x.py is the FILE of `--report`"),
        (["nosuch.py"], 2, "No such file or directory: '/"),
        (["--trial", "nosuch.py"], 2, "No such file or directory: '/"),
        (["."], 2, "Is a directory: '/"),
    ],
    ids=[
        "format",
        "folder",
        "version",
        "help",
        "nothing",
        "no program",
        "no script",
        "no trial",
        "a folder",
    ],
)
def test_command_lines(arguments, status, text, tmp_path):
    (tmp_path / "x.py").touch()
    found, *shown = python("-m", "eqxjit", *arguments, cwd=tmp_path)
    assert found == status
    assert text in "".join(shown)
    # A program that never ran has no findings.
    assert not (status and shown[0])
    # Only an error of the program itself has a traceback.
    assert "Traceback" not in shown[1]
