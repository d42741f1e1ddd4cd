"""Tracebacks: the user's exception comes out as it was raised, and few of our frames show."""

import os
import tempfile
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from tests.support.places import JAX_FILES, OUR_FILES
from tests.support.sides import CALLS

MOST = 2

X = jnp.arange(1.0, 4.0)


class Own(Exception):
    """Can't be made of a text alone."""

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
    "JAX's own class": lambda: jax.errors.JaxRuntimeError("INTERNAL: deleted"),
}


class Failing(eqx.Module):
    """Raises what it is told to."""

    weight: jax.Array

    def __call__(self, x, failure):
        return self.weight * fails(x, failure)

    @eqxjit.filter_jit
    def step(self, x, failure):
        return self.weight * fails(x, failure)


class Failure:
    """Static, and equal to itself alone: an error that is raised for one shape."""

    def __init__(self, error):
        self.error = error


def fails(x, failure):
    if x.shape != X.shape:
        raise failure.error
    return x * 2


def new():
    return eqxjit.filter_jit(lambda x, failure: fails(x, failure))


def first(failure):
    return new(), (jnp.ones(2), failure)


def generic(failure):
    f = new()
    for _ in range(CALLS):
        raised(f, jnp.ones(2), failure)
    return f, (jnp.ones(2), failure)


def retrace(failure):
    f = new()
    for _ in range(CALLS):
        f(X, failure)
    return f, (jnp.ones(2), failure)


def retrace_behind_others(failure):
    f, arguments = retrace(failure)
    for n in range(4):
        for _ in range(CALLS):
            f(X, n)
    return f, arguments


def unspecialised(failure):
    f = eqxjit.filter_jit(lambda *x: fails(*x), maxsize=1)
    f(X, failure)
    return f, (jnp.ones(2), failure)


def method(failure):
    model = Failing(jnp.ones(()))
    for _ in range(CALLS):
        model.step(X, failure)
    return model.step, (jnp.ones(2), failure)


def module(failure):
    f = eqxjit.filter_jit(Failing(jnp.ones(())))
    for _ in range(CALLS):
        f(X, failure)
    return f, (jnp.ones(2), failure)


def nested(failure):
    inner = new()
    outer = eqxjit.filter_jit(lambda x, failure: inner(x, failure))
    for _ in range(CALLS):
        outer(X, failure)
    return outer, (jnp.ones(2), failure)


def in_jax_jit(failure):
    f = new()
    for _ in range(CALLS):
        f(X, failure)
    return jax.jit(lambda x: f(x, failure)), (jnp.ones(2),)


def frozen(failure):
    f = eqxjit.freeze(fails, failure=failure)
    for _ in range(CALLS):
        f(X)
    return f, (jnp.ones(2),)


def compiling_frozen(failure):
    return eqxjit.freeze(fails, failure=failure).compile, (jnp.ones(2),)


def saving(failure):
    return eqxjit.freeze(fails, failure=failure).save, (
        os.path.join(tempfile.gettempdir(), "never_written"),
        jnp.ones(2),
    )


def lower(failure):
    return new().lower, (jnp.ones(2), failure)


def lower_method(failure):
    return Failing(jnp.ones(())).step.lower, (jnp.ones(2), failure)


def installed(failure):
    upstream = eqx.filter_jit(lambda x, failure: fails(x, failure))

    def call(*args):
        with eqxjit.install():
            return upstream(*args)

    for _ in range(CALLS):
        call(X, failure)
    return call, (jnp.ones(2), failure)


def without_jit(failure):
    f, arguments = retrace(failure)

    def call(*args):
        with jax.disable_jit():
            return f(*args)

    return call, arguments


WAYS = {
    way.__name__: way
    for way in (
        first,
        generic,
        retrace,
        retrace_behind_others,
        unspecialised,
        method,
        module,
        nested,
        in_jax_jit,
        frozen,
        compiling_frozen,
        saving,
        lower,
        lower_method,
        installed,
        without_jit,
    )
}


def frames_of_ours(error):
    frames = traceback.extract_tb(error.__traceback__)
    return [
        (frame.filename, frame.name) for frame in frames if frame.filename.startswith(OUR_FILES)
    ]


def raised(f, *args, **kwargs):
    try:
        f(*args, **kwargs)
    except BaseException as error:
        return error
    pytest.fail("nothing was raised")


@pytest.mark.parametrize("way", WAYS)
def test_few_frames_of_ours_show(way, filtering):
    error = Own("the user's", 1, why="")
    f, args = WAYS[way](Failure(error))
    error.__traceback__ = None
    assert raised(f, *args) is error
    frames = frames_of_ours(error)
    assert len(frames) <= MOST, frames
    # The user's own are all there.
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names[0] == "raised"
    assert names[-1] == "fails"
    # JAX's are where it shows them. (`jax.export` always does.)
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    shows_jax = any(file.startswith(JAX_FILES) for file in files)
    if way != "saving":
        assert shows_jax == (filtering in ("off", "tracebackhide") and way != "without_jit")


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("way", WAYS)
def test_an_exception_is_the_users_own_object(way, kind):
    error = ERRORS[kind]()
    cause, context = KeyError("cause"), KeyError("context")
    f, args = WAYS[way](Failure(error))
    error.__cause__, error.__context__ = cause, context
    error.add_note("a note")
    assert raised(f, *args) is error
    # By default JAX leaves the rest as it is, and says in a note that it has removed frames.
    others = [note for note in error.__notes__ if "removed its internal frames" not in note]
    assert others == ["a note"]
    assert error.__cause__ is cause
    assert error.__context__ is context


@pytest.mark.parametrize("kind", ERRORS)
def test_an_exception_of_a_function_that_was_given_deleted_arrays(kind):
    """Tracing doesn't read them: what the user's function raises then is the user's."""
    error = ERRORS[kind]()
    deleted = jnp.ones(2)
    deleted.delete()
    for f, args in (WAYS[way](Failure(error)) for way in ("first", "retrace", "lower")):
        assert raised(f, *[deleted if arg is args[0] else arg for arg in args]) is error


def test_an_exception_of_a_node_is_the_users_own_object():
    error = Own("deleted", 1, why="")
    fail = False

    @jax.tree_util.register_pytree_node_class
    class Node:
        def tree_flatten(self):
            if fail:
                raise error
            return (X,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls()

    f = eqxjit.filter_jit(lambda node: 1)
    for _ in range(CALLS):
        fail = True
        assert raised(f, Node()) is error
        assert len(frames_of_ours(error)) <= MOST
        error.__traceback__ = None
        fail = False
        f(Node())


@pytest.mark.parametrize("warm", [0, CALLS])
def test_errors_that_are_ours_show_few_frames_too(warm):
    f = eqxjit.filter_jit(lambda x, n: eqx.error_if(x, x < 0, "negative"))
    for _ in range(warm):
        f(X, 1)
    deleted = X + 0
    deleted.delete()
    for args in ((-X, 1), (X, {1}), (deleted, 1), (X,)):
        assert len(frames_of_ours(raised(f, *args))) <= MOST
    compiled = f.lower(X, 1).compile()
    for args in ((-X, 1), (X, 2), (jnp.ones(2), 1)):
        assert len(frames_of_ours(raised(compiled, *args))) <= MOST


def test_an_exception_that_is_being_handled_keeps_its_traceback():
    f = new()
    handled = KeyError("the user's")
    try:
        raise handled
    except KeyError:
        before = handled.__traceback__
        for _ in range(CALLS):
            f(X, None)
            f.lower(X, None)
    assert handled.__traceback__ is before


def test_an_error_of_the_users_that_reads_like_jaxs():
    """Though it fits an argument, it isn't replaced by ours about that."""
    deleted = jnp.ones(3)
    deleted.delete()
    with pytest.raises(RuntimeError) as complaint:
        deleted.tolist()
    error = RuntimeError(str(complaint.value))

    @eqxjit.filter_jit
    def fail(x):
        raise error

    for _ in range(CALLS):
        with pytest.raises(RuntimeError) as caught:
            fail(deleted)
        assert caught.value is error
