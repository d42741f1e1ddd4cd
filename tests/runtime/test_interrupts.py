"""Signal handlers, finalizers and profilers' hooks at any point inside ours: they call, or raise.

Each test runs one call many times on fresh wrappers. At its n-th event inside our files (a call, a
return, one of C's) a profiler's hook acts, and then all must work as if it had never been.
"""

import contextlib
import functools
import gc
import itertools
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from tests.support.inside import entries, in_progress
from tests.support.places import OUR_FILES
from tests.support.profile import PROFILE

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

X = jnp.arange(3.0)


#: How many points of each kind of call; all of them where nobody waits.
POINTS = {"fast": 35, "thorough": 1_000_000}[PROFILE]

#: Longer than any call; a deadlock takes forever.
TIMEOUT = 60


class Model(eqx.Module):
    weight: jax.Array
    static: object = eqx.field(static=True, default=1)


class Hook:
    """Acts once, at the n-th event inside our files, and counts them."""

    def __init__(self, n, act):
        self.n, self.act, self.count, self.place = n, act, 0, ""

    def __call__(self, frame, event, arg):
        code = frame.f_code
        if code.co_filename.startswith(OUR_FILES):
            self.count += 1
            if self.count == self.n:
                sys.setprofile(None)
                self.place = f"event {self.n}: {event} in {code.co_qualname}, {frame.f_lineno}"
                self.act()

    def during(self, call, x):
        """What a call raises under this hook, if anything."""
        sys.setprofile(self)
        try:
            call(x)
        except BaseException as error:
            # Not the error: its context has tracebacks, which hold all that was on the stack.
            return type(error)
        finally:
            sys.setprofile(None)


def returns_its_model(model, x):
    return model, x * model.static


def warmed(times):
    f = eqxjit.filter_jit(functools.partial(returns_its_model))
    for _ in range(times):
        f(Model(X), X)
    return f


#: A wrapper, and the call that is disturbed.
CALLS_OF_EVERY_KIND = {
    "first": (0, lambda f, x: f(Model(x), x)),
    "second, which specialises": (1, lambda f, x: f(Model(x), x)),
    "specialised": (3, lambda f, x: f(Model(x), x)),
    "retrace": (3, lambda f, x: f(Model(x), jnp.ones(4))),
    "other structure": (3, lambda f, x: f(Model(x, 2), x)),
    "under vmap": (3, lambda f, x: jax.vmap(lambda x: f(Model(x), x)[1])(x[None])),
    "lowered and compiled": (0, lambda f, x: f.lower(Model(x), x).compile()(Model(x), x)),
}

if eqxjit.native_enabled():
    # No Python of ours runs in them.
    for kind in ("second, which specialises", "specialised"):
        del CALLS_OF_EVERY_KIND[kind]

every_kind = pytest.mark.parametrize("kind", CALLS_OF_EVERY_KIND)


def disturbed(kind, act):
    """Each of the points of a call, disturbed: the wrapper, the hook, the error, the array."""
    yield from disturbed_calls(*CALLS_OF_EVERY_KIND[kind], act)


def disturbed_calls(n_warm, call, act):
    for _ in range(2):
        # Twice, as JAX does more the first time.
        counting = Hook(0, None)
        counting.during(functools.partial(call, warmed(n_warm)), X + 1)
    assert counting.count >= 4
    for n in range(1, counting.count + 1, max(1, counting.count // POINTS)):
        f = warmed(n_warm)
        hook = Hook(n, functools.partial(act, f))
        x = X + n
        alive = weakref.ref(x)
        error = hook.during(functools.partial(call, f), x)
        del x
        if not hook.place:
            # A few events are of garbage that is collected.
            assert n > 0.9 * counting.count
            return
        yield f, hook, error, alive


@pytest.fixture(scope="module")
def another_thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def assert_works(f, hook, alive, another_thread):
    """The wrapper, this thread, and others that want the same locks."""
    for shape in (3, 3, 3, 5):
        model, out = f(Model(X), jnp.ones(shape))
        assert out.tolist() == [1.0] * shape, hook.place
        assert type(model) is Model
    # Nothing here can raise: an interrupted look at a program isn't taken for a failed one.
    assert not any(entry.blocks for entry in entries(f)), hook.place
    in_turn = (lambda: f(Model(X), jnp.ones(6)), f.cache_info, f.traces, f.clear_cache)
    for action in in_turn:
        another_thread.submit(action).result(TIMEOUT)
    if alive() is not None:
        gc.collect()
    assert alive() is None, hook.place
    assert not in_progress(f), hook.place


class Unexpected(Exception):
    """An error that no code knows of."""


def values(outs):
    """Those that are known: under a trace of JAX's they are tracers."""
    return [out.tolist() for out in outs if not isinstance(out, jax.core.Tracer)]


@every_kind
@pytest.mark.parametrize("errors", [[KeyboardInterrupt], [Unexpected, MemoryError, RecursionError]])
def test_an_error_at_any_point(kind, errors, another_thread):
    in_turn = itertools.cycle(errors)

    def act(_):
        raise next(in_turn)

    for f, hook, raised, alive in disturbed(kind, act):
        # None where there is a way without what failed: an explanation that can't be given, say.
        if raised not in errors:
            print("VANISHED", kind, hook.place, raised)
        assert_works(f, hook, alive, another_thread)


@every_kind
def test_another_jitted_function_at_any_point(kind, another_thread):
    other = warmed(3)
    outs = []

    def act(_):
        # Warm, traced anew, and wrapped anew.
        outs.append(other(Model(X), X)[1])
        outs.append(other(Model(X), jnp.ones(3 + len(outs)))[1])
        outs.append(eqxjit.filter_jit(lambda x: x)(X))

    for f, hook, raised, alive in disturbed(kind, act):
        assert raised is None, hook.place
        assert len(outs) == 3, hook.place
        assert {*map(str, values([outs[0], outs[2]]))} <= {str(X.tolist())}, hook.place
        outs.clear()
        assert_works(f, hook, alive, another_thread)


@every_kind
def test_the_same_function_at_any_point(kind, another_thread):
    outs = []

    def act(f):
        with contextlib.suppress(RecursionError):
            # JAX's: a function that is being traced can't be traced for the same shapes.
            outs.append(f(Model(X), X)[1])
        outs.append(f(Model(X, 3), X)[1] / 3)

    for f, hook, raised, alive in disturbed(kind, act):
        assert raised in (None, RecursionError), hook.place
        assert len(outs) > 0, hook.place
        assert {*map(str, values(outs))} <= {str(X.tolist())}, hook.place
        outs.clear()
        assert_works(f, hook, alive, another_thread)
