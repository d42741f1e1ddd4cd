"""Descriptions ignore errors of the user's objects, but not errors of signal handlers."""

import functools
import signal
import time

import jax.numpy as jnp
import pytest

import eqxjit

X = jnp.arange(3.0)


class Timeout(Exception):
    pass


def plain(signum, frame):
    raise Timeout


def any_arguments(*_):
    raise Timeout


def with_reset(signum, frame):
    # Timeout decorators do the same.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    raise Timeout


def by_another(signum, frame):
    any_arguments()


class Handler:
    def __call__(self, signum, frame):
        raise Timeout

    def method(self, signum, frame):
        raise Timeout


def with_more(more, signum, frame):
    raise Timeout


HANDLERS = {
    "function": plain,
    "any arguments": any_arguments,
    "reset": with_reset,
    "by another": by_another,
    "lambda": lambda signum, frame: plain(signum, frame),
    "instance": Handler(),
    "method": Handler().method,
    "partial": functools.partial(with_more, 1),
}


def wait():
    """Wait a moment at a time, so that a signal can interrupt."""
    end = time.perf_counter() + 5
    while time.perf_counter() < end:
        pass
    raise AssertionError("no signal came")


class SlowRepr:
    waits = True

    def __repr__(self):
        self.interrupt()
        return "slow"

    def interrupt(self):
        if self.waits:
            self.waits = False
            # The timer starts only now, because it might end too early.
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            wait()

    def __eq__(self, other):
        return type(other) is type(self)

    def __hash__(self):
        return 0


class SlowName(SlowRepr):
    __repr__ = object.__repr__

    def __getattr__(self, name):
        if name == "__wrapped__":
            self.interrupt()
        raise AttributeError(name)


@pytest.mark.parametrize("slow", [SlowRepr, SlowName])
@pytest.mark.parametrize("name", HANDLERS)
def test_what_a_signal_handler_raises_arrives(name, slow):
    before = signal.signal(signal.SIGALRM, HANDLERS[name])
    f = eqxjit.filter_jit(lambda x, slow: x + 1)
    try:
        with pytest.raises(Timeout):
            f(X, slow())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    other = slow()
    other.waits = False
    assert f(X, other)[0] == 1


class Refusing:
    """An object whose `repr` and attributes raise errors."""

    def __repr__(self):
        raise RuntimeError

    def __getattr__(self, name):
        raise KeyError(name)


class RefusingNumbers(Refusing):
    def __repr__(self):
        raise Timeout(signal.SIGALRM)


@pytest.mark.parametrize("kind", [Refusing, RefusingNumbers])
def test_what_the_users_objects_raise_is_not_the_calls(kind):
    f = eqxjit.filter_jit(lambda x, own: x + 1)
    assert f(X, kind())[0] == 1
    assert f.traces()[0].arguments["own"] == "object"


class Table:
    """A method of it refers to a dict whose keys JAX can't sort."""

    def __init__(self):
        self.rates = {0: 1.0, "rest": 0.5}

    def decay(self, x):
        return x * self.rates["rest"]


def halved(x, rates):
    return x * rates["rest"]


@pytest.mark.parametrize(
    "fun",
    [
        Table().decay,
        functools.partial(halved, rates={0: 1.0, "rest": 0.5}),
        lambda x, n=10**5000: x / (2 if n else 1),
        # Its absolute value is too large for a float.
        lambda x, z=complex(1e308, 1.7e308): x / (2 if z else 1),
    ],
    ids=["method", "partial", "long", "complex"],
)
def test_what_can_not_be_described_can_be_called(fun):
    assert eqxjit.filter_jit(fun)(X)[1] == 0.5
