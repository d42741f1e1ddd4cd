"""Tracebacks: the user's exception comes out as it was raised; one error, few of our frames."""

import functools
import os
import tempfile
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from tests.support.places import OUR_FILES
from tests.support.sides import CALLS

MOST = 2

X = jnp.arange(1.0, 4.0)


class Own(Exception):
    """An exception that can't be created from a message alone."""

    def __init__(self, text, code, *, why):
        super().__init__(text)
        self.code = code
        self.why = why


class OwnValueError(ValueError):
    __slots__ = ("code",)

    def __init__(self, *, code):
        super().__init__(
            "_EquinoxRuntimeError: this only looks like Equinox's\n\n\n" + "-" * 20 + "\n"
        )
        self.code = code


class OwnRuntimeError(jax.errors.JaxRuntimeError):
    def __str__(self):
        raise RuntimeError("this text isn't for others to read")


class OwnInterrupt(BaseException):
    pass


ERRORS = {
    "two arguments": lambda: Own("the record was deleted", 3, why="it was old"),
    "a text like JAX's": lambda: RuntimeError("Array has been deleted with shape=float32[3]."),
    "a text like Equinox's": lambda: OwnValueError(code=1),
    "an unreadable text": lambda: OwnRuntimeError("text"),
    "a group": lambda: ExceptionGroup("group", [ValueError("deleted"), Own("o", 1, why="")]),
    "no Exception": lambda: OwnInterrupt("deleted"),
}


class Failing(eqx.Module):
    """A static object that raises a given error."""

    weight: jax.Array

    def __call__(self, x, failure):
        return self.weight * fails(x, failure)

    @eqxjit.filter_jit
    def step(self, x, failure):
        return self.weight * fails(x, failure)


class Failure:
    """A static object that compares by identity, and holds an error to raise for one shape."""

    def __init__(self, error):
        self.error = error


def fails(x, failure):
    if x.shape != X.shape:
        raise failure.error
    return x * 2


def new(failure, filter_jit=eqxjit.filter_jit, **options):
    return functools.partial(
        filter_jit(lambda x, failure: fails(x, failure), **options), failure=failure
    )


def warm(f):
    for _ in range(CALLS):
        f(X)
    return f


def retried(f):
    for _ in range(CALLS):
        raised(f, BAD)
    return f


def nested(failure):
    inner = new(failure).func
    return functools.partial(
        eqxjit.filter_jit(lambda x, failure: inner(x, failure)), failure=failure
    )


def under(context, f):
    def call(x):
        with context():
            return f(x)

    return call


def saving(failure):
    path = os.path.join(tempfile.gettempdir(), "never_written")
    return functools.partial(eqxjit.freeze(fails, failure=failure).save, path)


BAD = jnp.ones(2)
MODEL = Failing(jnp.ones(()))

WAYS = {
    "first": new,
    "generic": lambda failure: retried(new(failure)),
    "retrace": lambda failure: warm(new(failure)),
    "unspecialised": lambda failure: new(failure, maxsize=1),
    "method": lambda failure: warm(functools.partial(MODEL.step, failure=failure)),
    "Module": lambda failure: warm(functools.partial(eqxjit.filter_jit(MODEL), failure=failure)),
    "nested": lambda failure: warm(nested(failure)),
    "in jax.jit": lambda failure: jax.jit(warm(new(failure))),
    "frozen": lambda failure: warm(eqxjit.freeze(fails, failure=failure)),
    "compiling": lambda failure: eqxjit.freeze(fails, failure=failure).compile,
    "saving": saving,
    "lowering": lambda failure: functools.partial(new(failure).func.lower, failure=failure),
    "installed": lambda failure: warm(under(eqxjit.install, new(failure, eqx.filter_jit))),
    "without JIT": lambda failure: under(jax.disable_jit, warm(new(failure))),
}


def frames_of_ours(error):
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if frame.filename.startswith(OUR_FILES)]
    # Frames of generated code have source lines, too.
    assert all(frame.line for frame in frames)
    return [(frame.filename, frame.name) for frame in frames]


def raised(f, *args, **kwargs):
    try:
        f(*args, **kwargs)
    except BaseException as error:
        return error
    pytest.fail("nothing was raised")


@pytest.mark.parametrize("way", WAYS)
def test_few_frames_of_ours_show(way, filtering):
    error = Own("the user's", 1, why="")
    f = WAYS[way](Failure(error))
    error.__traceback__ = None
    assert raised(f, BAD) is error
    frames = frames_of_ours(error)
    assert len(frames) <= MOST, frames
    # All frames of the user's code are there.
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names[0] == "raised"
    assert names[-1] == "fails"


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("way", WAYS)
def test_an_exception_is_the_users_own_object(way, kind):
    error = ERRORS[kind]()
    cause, context = KeyError("cause"), KeyError("context")
    f = WAYS[way](Failure(error))
    error.__cause__, error.__context__ = cause, context
    error.add_note("a note")
    assert raised(f, BAD) is error
    # By default JAX leaves the rest as it is, and says in a note that it has removed frames.
    others = [note for note in error.__notes__ if "removed its internal frames" not in note]
    assert others == ["a note"]
    assert error.__cause__ is cause
    assert error.__context__ is context


@pytest.mark.parametrize("warm", [0, CALLS])
def test_errors_that_are_ours_are_one_and_short(warm):
    f = eqxjit.filter_jit(lambda x, n: eqx.error_if(x, x < 0, "negative"))
    for _ in range(warm):
        f(X, 1)
    deleted = X + 0
    deleted.delete()
    compiled = f.lower(X, 1).compile()
    calls = [(f, args) for args in ((-X, 1), (X, {1}), (deleted, 1), (X,), (X, 1, 2))]
    calls += [(compiled, args) for args in ((-X, 1), (X, 2), (jnp.ones(2), 1))]
    options = {"donates": "all"}, {"donate": "everything"}, {"static_argnums": [0]}
    calls += [(functools.partial(eqxjit.filter_jit, **wrong), (fails,)) for wrong in options]
    for fun, args in calls:
        error = raised(fun, *args)
        assert len(frames_of_ours(error)) <= MOST
        # For a bad argument, the text names it, and the cause is the error of Python or JAX.
        assert error.__context__ is None or error.__suppress_context__
