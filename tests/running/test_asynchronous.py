"""Which programs a call waits for: those that can raise once they run, and no others."""

import contextlib
import ctypes
import functools
import os
import random
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import lineax
import numpy as np
import pytest
from jax.experimental import io_callback

import eqxjit
from tests.support.devices import about_cpus
from tests.support.inside import blocks
from tests.support.sides import CALLS
from tests.support.threads import race
from tests.support.transformations import TRANSFORMATIONS, points

X = jnp.arange(1.0, 4.0)
SHAPE = jax.ShapeDtypeStruct((3,), jnp.float32)

#: Enough arithmetic for JAX to let a program run on while the call returns.
LARGE = jnp.eye(32)


def classed(function, x, **options):
    """Return whether a function's program can raise, which warm calls must not change."""
    f = eqxjit.filter_jit(function, **options)
    f(x + 0)
    (first,) = blocks(f)
    for _ in range(CALLS):
        f(x + 0)
    assert blocks(f) == [first]
    return first


def _solve(x, **options):
    operator = lineax.MatrixLinearOperator(jnp.diag(x) + 1)
    return lineax.linear_solve(operator, x, **options).value


def _matrix(x):
    return jnp.diag(x) + jnp.outer(x, x)


# --- The kinds --------------------------------------------------------------------------------


def callback(x):
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


RAISING = {
    "pure_callback": callback,
    "ordered io_callback": lambda x: io_callback(np.asarray, SHAPE, x, ordered=True),
    "debug.callback": lambda x: (jax.debug.callback(lambda x: None, x), x)[1],
    "debug.print": lambda x: (jax.debug.print("{}", x, ordered=True), x)[1],
    "error_if": lambda x: eqx.error_if(x, x < 0, "negative"),
    "a solve that throws": _solve,
    "noinline": lambda x: eqxi.noinline(lambda x: x * 2)(x),
}

HARMLESS = {
    "arithmetic": lambda x: x * 2,
    "a solve that doesn't throw": functools.partial(_solve, throw=False),
    "error_if switched off": lambda x: eqx.error_if(x, x < 0, "negative", on_error="off"),
    "error_if with NaN": lambda x: eqx.error_if(x, x < 0, "negative", on_error="nan"),
    "an error_if that is dead code": lambda x: (eqx.error_if(x, x < 0, "negative"), x)[1],
    "lu": lambda x: jax.scipy.linalg.lu(_matrix(x)),
    "qr": lambda x: jnp.linalg.qr(_matrix(x)),
    "svd": lambda x: jnp.linalg.svd(_matrix(x)),
    "eig": lambda x: jnp.linalg.eig(_matrix(x)),
    "cholesky": lambda x: jnp.linalg.cholesky(_matrix(x)),
    "schur": lambda x: jax.scipy.linalg.schur(_matrix(x)),
    "tridiagonal solve": lambda x: jax.lax.linalg.tridiagonal_solve(x, x + 2, x, x[:, None]),
    "fft": jnp.fft.fft,
    "top_k": lambda x: jax.lax.top_k(x, 2),
    "approx_max_k": lambda x: jax.lax.approx_max_k(x, 2),
    "random": lambda x: jax.random.normal(jax.random.key(0), x.shape) * x,
    "random rbg": lambda x: jax.random.normal(jax.random.key(0, impl="rbg"), x.shape) * x,
    "optimization barrier": jax.lax.optimization_barrier,
}

of_lapack = about_cpus("other devices lack some of LAPACK")


@pytest.mark.parametrize("kind", RAISING)
@pytest.mark.parametrize("donate", ["none", "all"])
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_program_that_can_raise_is_waited_for(kind, donate):
    assert classed(RAISING[kind], X, donate=donate)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=of_lapack) if k in ("eig", "schur") else k for k in HARMLESS],
)
def test_a_program_that_cannot_raise_is_not(kind):
    assert not classed(HARMLESS[kind], X)


def sequential_callback(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(np.asarray, shape, x, vmap_method="sequential")


@jax.custom_jvp
def differentiable(x):
    return sequential_callback(x).sum()


@differentiable.defjvp
def _(x, t):
    return differentiable(*x), differentiable(*x) * t[0].sum()


@pytest.mark.parametrize("place", ["vmap", "scan", "cond", "while_loop", "grad", "shard_map"])
def test_a_callback_is_found_at_any_depth(place):
    transform = TRANSFORMATIONS[place]
    assert classed(lambda xs: transform(differentiable, xs), points())
    assert not classed(lambda xs: transform(lambda x: x.sum(), xs), points())


# --- Programs of warm functions ---------------------------------------------------------------


def _checks(what, x):
    return {
        "shape": x.shape != (3,),
        "dtype": x.dtype != jnp.float32,
        "x64": jax.config.jax_enable_x64,
    }[what]


@pytest.mark.parametrize("clear", [lambda: None, jax.clear_caches])
@pytest.mark.parametrize("what", ["shape", "dtype", "x64"])
@pytest.mark.parametrize("warm", [1, CALLS])
def test_another_program_of_a_warm_entry_is_classed_too(what, warm, clear):
    f = eqxjit.filter_jit(lambda x: callback(x) if _checks(what, x) else x * 2)
    other = {"shape": jnp.ones(2), "dtype": X.astype(jnp.int32)}.get(what, X)
    for _ in range(warm):
        f(X)
    assert blocks(f) == [False]
    clear()
    for _ in range(CALLS):
        with jax.enable_x64(True) if what == "x64" else contextlib.nullcontext():
            f(other)
        assert blocks(f) == [True]
        f(X)


@pytest.mark.parametrize("around", [jax.jit, jax.vmap, jax.checkpoint, "lower", "disable_jit"])
def test_what_was_traced_otherwise_is_classed_by_the_first_call(around):
    """JAX may reuse a trace from a transformation, from a lowering, or from a run without JIT."""
    checking = eqxjit.filter_jit(sequential_callback)
    plain = eqxjit.filter_jit(lambda x: x * 2)
    for f in (checking, plain):
        if around == "lower":
            f.lower(X).compile()
        elif around == "disable_jit":
            with jax.disable_jit():
                f(X)
        else:
            around(f)(X)
            around(f)(X)
        for _ in range(CALLS):
            f(X)
            assert blocks(f) == [f is checking]
            f(X[0])
        assert blocks(f) == [f is checking]


# --- Errors of programs that were first made otherwise ----------------------------------------


@jax.jit
def late(x):
    """Return `x` before it is ready, so that JAX runs later programs in the background."""
    work = jax.lax.fori_loop(0, 30, lambda _, m: jnp.tanh(m @ m), jnp.ones((300, 300)) * x[0])
    return x + 0 * work[0, 0]


def step(x):
    """Only its programs for three elements can raise."""
    return eqx.error_if(x, jnp.any(x < 0), "negative") if x.shape[-1] == 3 else x * 2


TWO, THREE, FOUR = jnp.ones(2), jnp.ones(3), jnp.ones(4)


def in_another_thread(action, *args):
    with ThreadPoolExecutor(1) as thread:
        thread.submit(action, *args).result()


def without_jit(f):
    with jax.disable_jit():
        f(THREE)


def with_an_error(f):
    with pytest.raises(eqx.EquinoxRuntimeError):
        f(late(-THREE))


# Actions on a function before its calls, alone or after a call with another shape.
BEFORE = {
    "nothing": lambda f: None,
    "a call": lambda f: f(THREE),
    "a call that fails": with_an_error,
    "compile": lambda f: f.compile(THREE),
    "compile two shapes": lambda f: (f.compile(TWO), f.compile(THREE)),
    "compile three shapes": lambda f: (f.compile(THREE), f.compile(TWO), f.compile(FOUR)),
    "compile, run that": lambda f: f.lower(THREE).compile()(THREE),
    "lower": lambda f: f.lower(THREE),
    "lower, compile": lambda f: f.lower(THREE).compile(),
    "lower two shapes, compile one": lambda f: (f.lower(THREE), f.lower(TWO).compile()),
    "compile in another thread": lambda f: in_another_thread(f.compile, THREE),
    "call in another thread": lambda f: in_another_thread(f, THREE),
    "compile, clear JAX's caches": lambda f: (f.compile(THREE), jax.clear_caches()),
    "call, clear JAX's caches": lambda f: (f(THREE), jax.clear_caches()),
    "compile, clear the function's": lambda f: (f.compile(THREE), f.clear_cache()),
    "make_jaxpr": lambda f: jax.make_jaxpr(f)(THREE),
    "eval_shape": lambda f: jax.eval_shape(f, THREE),
    "jax.jit": lambda f: jax.jit(lambda x: f(x))(THREE),
    "jax.jit of two shapes": lambda f: jax.jit(lambda x: (f(x), f(x[:2])))(THREE),
    "another filter_jit": lambda f: eqxjit.filter_jit(lambda x: f(x) + 1)(THREE),
    "upstream's filter_jit": lambda f: eqx.filter_jit(lambda x: f(x) + 1)(THREE),
    "vmap": lambda f: jax.vmap(f)(jnp.ones((2, 3))),
    "vmap, jitted": lambda f: jax.jit(jax.vmap(f))(jnp.ones((2, 3))),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(THREE),
    "linearize": lambda f: jax.linearize(f, THREE),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0, jnp.ones((2, 3))),
    "checkpoint": lambda f: jax.checkpoint(f)(THREE),
    "disable_jit": without_jit,
    "a second wrapper": lambda f: eqxjit.filter_jit(step)(THREE),
    "a second wrapper, compile": lambda f: eqxjit.filter_jit(step).compile(THREE),
}


slow = pytest.mark.slow


def assert_raises_at_the_call(f):
    """Check that only the call with negative numbers raises."""
    for n_good in (1, CALLS):
        with pytest.raises(eqx.EquinoxRuntimeError):
            f(late(-THREE))
        for _ in range(n_good):
            np.testing.assert_array_equal(f(THREE), THREE)
            np.testing.assert_array_equal(f(TWO), 2 * TWO)


@pytest.mark.parametrize("is_good_first", [True, False])
@pytest.mark.parametrize(
    "others",
    ["none", "before and after", *(pytest.param(o, marks=slow) for o in ("before", "after"))],
)
@pytest.mark.parametrize("action", BEFORE)
def test_no_error_is_lost(action, others, is_good_first):
    """This holds whatever was traced, lowered, compiled or called before."""
    f = eqxjit.filter_jit(step)
    f.clear_cache()
    if "before" in others:
        f(TWO)
    BEFORE[action](f)
    if "after" in others:
        f(TWO)
    if is_good_first:
        f(THREE)
    assert_raises_at_the_call(f)


class Stepping(eqx.Module):
    weight: jax.Array

    @eqxjit.filter_jit
    def step(self, x):
        return step(x) * self.weight


WAYS = {
    "donated": lambda: eqxjit.filter_jit(step, donate="all"),
    "bound": lambda: eqxjit.filter_jit(eqx.Partial(lambda one, x: step(x) * one, jnp.ones(()))),
    "a method": lambda: Stepping(jnp.ones(())).step,
    "inlined": lambda: eqxjit.filter_jit(step, inline=True),
    "frozen": lambda: eqxjit.freeze(step),
    "within": lambda: eqxjit.filter_jit(eqxjit.filter_jit(step)),
    "of upstream's": lambda: eqxjit.filter_jit(eqx.filter_jit(step)),
}


@pytest.mark.parametrize("action", ["compile", "compile two shapes", "jax.jit", "vmap"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_no_error_is_lost_however_it_is_jitted(way, action):
    f = WAYS[way]()
    call = lambda x: f(x + 0)  # noqa: E731 - a copy, because it may be donated
    call.compile = f.compile
    f(TWO + 0)
    BEFORE[action](call)
    f(TWO + 0)
    assert_raises_at_the_call(call)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_no_error_is_lost_after_any_actions(seed):
    """This holds for calls of the function, and for calls of its transformations."""
    draw = random.Random(seed)
    f = eqxjit.filter_jit(step)
    for _ in range(draw.randint(1, 5)):
        BEFORE[draw.choice([*BEFORE])](f)
        if draw.random() < 0.5:
            f(draw.choice([TWO, FOUR]))
    if draw.random() < 0.3:
        for transformed in (lambda x: jax.vmap(f)(x[None]), jax.grad(lambda x: f(x).sum())):
            with pytest.raises(eqx.EquinoxRuntimeError):
                transformed(late(-THREE))
    assert_raises_at_the_call(f)


def test_no_error_is_lost_while_other_threads_compile():
    actions = ["a call", "compile", "jax.jit", "vmap", "lower", "make_jaxpr"]
    for turn in range(4):
        f = eqxjit.filter_jit(step)
        jax.clear_caches()

        def work(i, f=f, turn=turn):
            BEFORE[actions[(i + turn) % len(actions)]](f)
            f(TWO)
            assert_raises_at_the_call(f)

        race(work, 4)


def _named(name, fun):
    fun.__name__ = fun.__qualname__ = name
    return fun


@pytest.mark.parametrize("order", [["raises", "harmless"], ["harmless", "raises"]])
@pytest.mark.parametrize("first", ["lower", "compile", "jax.jit", "vmap", "nothing"])
def test_functions_of_one_name_are_not_mixed_up(first, order):
    """JAX's events identify functions only by name."""
    raises = eqxjit.filter_jit(_named("one", sequential_callback))
    harmless = eqxjit.filter_jit(_named("one", lambda x: x * 2))
    functions = [{"raises": raises, "harmless": harmless}[which] for which in order]
    for f in functions:
        BEFORE[first](f)
    for _ in range(CALLS):
        for f in functions:
            f(THREE)
        assert [blocks(f) for f in (raises, harmless)] == [[True], [False]]


@pytest.mark.parametrize("outer_raises", [True, False])
def test_functions_of_one_name_within_each_other(outer_raises):
    inner = eqxjit.filter_jit(_named("one", lambda x: x if outer_raises else step(x)))
    outer = eqxjit.filter_jit(
        _named("one", lambda x: step(inner(x)) if outer_raises else inner(x) + 0)
    )
    assert_raises_at_the_call(outer)
    np.testing.assert_array_equal(inner(THREE), THREE)
    assert blocks(outer) == [True]


# --- Waiting, as it can be seen ---------------------------------------------------------------


def _returns_before_it_is_done(call, times=10):
    """Return whether a call returns before its long computation is done, at least once."""
    return any(not call().is_ready() for _ in range(times))


def heavy(x):
    for _ in range(8):
        x = x @ x / 1000
    return x


HEAVY = jnp.ones((500, 500))


@pytest.fixture
def dispatches_asynchronously():
    """Skip a test if JAX itself doesn't return before a program is done."""
    if os.environ.get("JAX_CPU_ENABLE_ASYNC_DISPATCH") == "0":
        pytest.skip("JAX is told to be synchronous")
    if not _returns_before_it_is_done(lambda: jax.jit(heavy)(HEAVY)):
        pytest.skip("JAX 0.8.0 can run all programs inline, once a callback has raised")


@pytest.mark.usefixtures("dispatches_asynchronously")
def test_a_harmless_program_is_dispatched_asynchronously():
    f = eqxjit.filter_jit(lambda x, n: {"y": heavy(x), "n": n})
    assert _returns_before_it_is_done(lambda: f(HEAVY, 3)["y"])
    for _ in range(CALLS):
        f(HEAVY, 3)["y"].block_until_ready()
    assert _returns_before_it_is_done(lambda: f(HEAVY, 3)["y"])


@pytest.mark.usefixtures("dispatches_asynchronously")
def test_a_first_call_does_not_wait_for_a_harmless_program():
    f = eqxjit.filter_jit(heavy)
    # Each call is traced and compiled.
    new_shapes = iter([jax.block_until_ready(jnp.ones((500 + i, 500 + i))) for i in range(10)])
    assert _returns_before_it_is_done(lambda: f(next(new_shapes)))


def test_upstream_and_block_wait():
    theirs = eqx.filter_jit(heavy)
    ours = eqxjit.filter_jit(heavy, block=True)
    nested = eqxjit.filter_jit(block=True)(lambda x: eqxjit.filter_jit(heavy)(x))
    for f in (theirs, ours, nested):
        assert not _returns_before_it_is_done(lambda f=f: f(HEAVY), CALLS)
    assert blocks(ours) == blocks(nested) == [True]


# --- Foreign calls ------------------------------------------------------------------------------

# Foreign calls make waiting visible on a CPU. JAX runs a program with a host callback synchronously
# there, but a program with a foreign call and enough arithmetic asynchronously.
_SOURCE = r"""
#include <chrono>
#include <cstring>
#include <thread>
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;

static ffi::Error Check(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  if (x.typed_data()[0] < 0)
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "a negative number");
  std::memcpy(y->typed_data(), x.typed_data(), x.size_bytes());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    check, Check,
    ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
"""
_TARGET = "TopK_check"  # It begins like an operation of XLA that can't fail.


def foreign(x, name=_TARGET):
    """Return `x`, or fail at runtime, after a while, if its first element is negative."""
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call(name, result, vmap_method="broadcast_all")(x)


@pytest.fixture(scope="module")
def foreign_call(tmp_path_factory):
    """Compile the foreign function, and register it with JAX."""
    source = tmp_path_factory.mktemp("foreign") / "check.cc"
    source.write_text(_SOURCE)
    command = ["g++", "-std=c++17", "-w", "-shared", "-fPIC", "-I", jax.ffi.include_dir()]
    library = source.with_suffix(".so")
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    handler = jax.ffi.pycapsule(ctypes.CDLL(str(library)).check)
    jax.ffi.register_ffi_target(_TARGET, handler, platform="cpu")


def checked(x):
    return x @ x @ x + foreign(x)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
@about_cpus("the handler of the foreign call is registered for them")
@pytest.mark.usefixtures("foreign_call", "dispatches_asynchronously")
class TestForeignCalls:
    """Without waiting, their errors would be raised only where the result is used."""

    def test_jax_does_not_wait_for_them(self):
        f = jax.jit(checked)
        f(LARGE).block_until_ready()
        result = f(-LARGE)
        with pytest.raises(jax.errors.JaxRuntimeError, match="a negative number"):
            result.block_until_ready()

    @pytest.mark.parametrize(
        "make",
        [
            lambda jit: jit(lambda x: checked(x)),
            lambda jit: jit(lambda x: checked(x), donate="all"),
            lambda jit: jit(lambda x: eqx.filter_jit(checked)(x)),
            lambda jit: jit(lambda x: checked(x)).lower(LARGE).compile(),
            lambda jit: jit(eqx.Partial(lambda weight, x: checked(x) * weight, LARGE)),
            # The checked output may be any of several outputs.
            lambda jit: lambda x: jit(lambda x: [x, checked(x), x + 1])(x)[0],
        ],
    )
    def test_they_are_waited_for(self, make):
        f = make(eqxjit.filter_jit)
        for _ in range(CALLS):
            assert f(LARGE + 0).is_ready()
            with pytest.raises(jax.errors.JaxRuntimeError, match="a negative number"):
                f(-LARGE)

    def test_an_unknown_target_is_found_in_what_was_lowered(self):
        f = eqxjit.filter_jit(lambda x: foreign(x, "a_target_that_nobody_registered"))
        assert "a_target_that_nobody_registered" in f.lower(X).as_text()
        with pytest.raises(jax.errors.JaxRuntimeError):
            f(X)

    def test_under_an_eager_transformation(self):
        f = eqxjit.filter_jit(lambda x: checked(x))
        returned = []

        def calls(x):
            returned.append(f(jax.lax.stop_gradient(x)))
            return x.sum()

        for around in (lambda x: jax.vmap(calls)(x[None]), jax.grad(calls)):
            for _ in range(CALLS):
                around(LARGE)
                returned.clear()
                with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="a negative"):
                    around(-LARGE)
                # The call itself raised the error.
                assert returned == []
