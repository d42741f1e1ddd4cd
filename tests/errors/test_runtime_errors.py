"""`eqx.error_if` under the wrapper: what is raised, where, and with which text."""

import contextlib
import itertools
import logging
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from tests.support.devices import drain
from tests.support.places import EQUINOX_FILES, JAX_FILES
from tests.support.processes import run, start
from tests.support.sides import CALLS, both
from tests.support.transformations import TRANSFORMATIONS, points

# `error_if` is jitted itself. With an equal message it would reuse the trace of another test, and
# show that test's stack.
_serial = itertools.count()

#: What JAX raises for a failed callback: the first from Python, the second from its C++ fast path.
JAX_ERRORS = (jax.errors.JaxRuntimeError, ValueError)

GOOD, BAD = jnp.array(1.0), jnp.array(-1.0)


def _message():
    return f"number {next(_serial)} is negative"


def _raised(f, *args, **kwargs):
    with pytest.raises(eqx.EquinoxRuntimeError) as caught:
        f(*args, **kwargs)
    return caught.value


def _stack(error):
    """Return the functions in the stack inside of JIT that the error's text shows."""
    text = str(error).partition("Below is the stack inside of JIT:")[2]
    return re.findall(r'File ".*", line \d+, in (\S+)', text)


class Stepping(eqx.Module):
    scale: jax.Array
    message: str

    @eqxjit.filter_jit
    def step(self, x, n):
        return check(x * self.scale, self.message) * n


def _result(x, n, message):
    return {"y": eqx.error_if(x, x < 0, message) * n, "n": n}["y"]


WAYS = {
    "a function": lambda jit, message: jit(lambda x, n: _result(x, n, message)),
    "donating": lambda jit, message: jit(lambda x, n: _result(x, n, message), donate="all"),
    "a bound function": lambda jit, message: jit(
        eqx.Partial(lambda one, x, n: _result(x * one, n, message), jnp.ones(()))
    ),
    "a method": lambda jit, message: Stepping(jnp.ones(()), message).step,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("warm", [0, 1, CALLS])
@both
def test_error_if_raises_at_the_call(filter_jit, warm, way):
    message = _message()
    f = WAYS[way](filter_jit, message)
    for _ in range(warm):
        assert f(GOOD + 0, 2) == 2
    for _ in range(CALLS):
        error = _raised(f, BAD + 0, 2)
        assert type(error) is eqx.EquinoxRuntimeError
        assert f"equinox.EquinoxRuntimeError: {message}\n" in str(error)
        assert error.__cause__ is None
        assert error.__suppress_context__
        assert f(GOOD + 0, 2) == 2


def check(x, message):
    return eqx.error_if(x, x < 0, message)


PLACES = ["eqxjit.filter_jit", "vmap", "scan", "while_loop", "custom_vjp"]


@pytest.mark.parametrize("place", PLACES)
@both
def test_an_error_from_any_depth(filter_jit, place):
    message, transform = _message(), TRANSFORMATIONS[place]
    f = filter_jit(lambda xs: transform(lambda x: (check(x, message) ** 2).sum(), xs))
    for _ in range(CALLS):
        f(points())
        assert message in str(_raised(f, -points()))


@both
def test_an_error_under_a_transformation_of_the_wrapper(filter_jit):
    message = _message()
    f = filter_jit(lambda x: check(x, message))
    mapped = lambda x: jax.vmap(f)(jnp.stack([GOOD, x])).sum()  # noqa: E731
    for _ in range(CALLS):
        for transformed in (mapped, jax.grad(lambda x: f(x) ** 2), jax.grad(mapped)):
            transformed(GOOD)
            assert message in str(_raised(transformed, BAD))
        assert message in str(_raised(f, BAD))


# --- The stack inside of JIT --------------------------------------------------------------------


def _caller(f, x):
    """Stands for the frames outside, which the stack inside of JIT must leave out."""
    return f(x)


def test_the_text_is_upstreams_on_every_call():
    texts = {}
    for filter_jit in (eqx.filter_jit, eqxjit.filter_jit):
        message = _message()

        @filter_jit
        def jitted(x, message=message):
            return check(x, message)

        texts[filter_jit] = [
            str(_raised(_caller, jitted, BAD)).replace(message, "...") for _ in range(CALLS)
        ]
    first, *later = texts[eqx.filter_jit]
    assert texts[eqxjit.filter_jit] == [first] * CALLS
    # Equinox trims the stack only in the call that traced.
    assert all(len(text) > len(first) and "_caller" in text for text in later)


@pytest.mark.parametrize("warm", [0, 1, CALLS])
@both
def test_the_stack_reaches_out_to_the_outermost_jitted_function(filter_jit, warm):
    """This also holds for Equinox's wrapper inside ours, and if a good call was traced first."""
    message = _message()

    @filter_jit
    def inner(x):
        return check(x, message)

    @eqxjit.filter_jit
    def outer(x):
        return _caller(inner, x)

    for _ in range(warm):
        _caller(outer, GOOD)
    for _ in range(CALLS):
        assert _stack(_raised(_caller, outer, BAD)) == ["outer", "_caller", "inner", "check"]


# --- Nothing but the error ----------------------------------------------------------------------


@both
def test_nothing_is_printed_or_logged(filter_jit, capfd, caplog):
    message = _message()
    f = filter_jit(lambda x: check(x, message))
    caplog.set_level(logging.WARNING)
    for x in (BAD, BAD, BAD, GOOD, BAD, GOOD, BAD, BAD):
        if x is BAD:
            _raised(f, x)
        else:
            f(x)
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")
    assert caplog.records == []


UNCAUGHT = """
    import sys, equinox, eqxjit, jax.numpy as jnp
    filter_jit = {"equinox": equinox, "eqxjit": eqxjit}[sys.argv[1]].filter_jit

    @filter_jit
    def f(x):
        return equinox.error_if(x, x < 0, "negative")

    for _ in range(4):
        f(jnp.array(1.0))
    f(jnp.array(-1.0))
"""


def test_an_uncaught_error_prints_its_own_text_only():
    results = [start(UNCAUGHT, name) for name in ("eqxjit", "equinox")]
    assert [(result.returncode, result.stdout) for result in results] == [(1, "")] * 2
    # From the type of the error on, the texts are equal except for Equinox's longer stack.
    before, _, ours = results[0].stderr.partition("\nEquinoxRuntimeError: ")
    theirs = results[1].stderr.partition("\nEquinoxRuntimeError: ")[2]
    assert ours.splitlines()[0] == theirs.splitlines()[0]
    ends = [text.partition("\nequinox.EquinoxRuntimeError")[2] for text in (ours, theirs)]
    assert ends[0] == ends[1] != ""
    # The text before it has the frames of the user's code, and none of JAX's.
    frames = re.findall(r'File "(.*)", line', before)
    assert frames[0] == "<string>"
    assert not [frame for frame in frames if frame.startswith((JAX_FILES, EQUINOX_FILES))]
    assert results[0].stderr.count("Traceback (most recent call last)") == 1


# --- EQX_ON_ERROR -------------------------------------------------------------------------------

ON_ERROR = """
    import equinox, eqxjit, jax, jax.numpy as jnp
    from tests.support.inside import blocks

    def check(x):
        return equinox.error_if(x, x < 0, "negative")

    def outcome(f, x):
        try:
            return str(f(x))
        except Exception as error:
            return str(error).rpartition("Error: ")[2].splitlines()[0]

    for name, module in {"equinox": equinox, "eqxjit": eqxjit}.items():
        f = module.filter_jit(lambda x: check(x) * 2)
        nested = module.filter_jit(lambda x: module.filter_jit(check)(x) * 2)
        print("BEGIN", name)
        for x in (1.0, -1.0) * 4:
            x = jnp.array(x)
            print("OUTCOMES", outcome(f, x), outcome(nested, x))
        # Where `jax.jit` returns a plain function, neither implementation can lower.
        print("LOWERED", outcome(lambda x: type(f.lower(x)).__name__, x))
        print("END")
    print("BLOCKS", blocks(f))
"""


@pytest.mark.parametrize(
    ("value", "outcome", "blocks"),
    [
        pytest.param("raise", "negative negative", True, marks=pytest.mark.slow),
        pytest.param("nan", "nan nan", False, marks=pytest.mark.slow),
        ("off", "-2.0 -2.0", False),
        ("breakpoint", "nan nan", True),
    ],
)
def test_eqx_on_error(value, outcome, blocks):
    # The debugger is told to continue, each time that it asks.
    output = run(ON_ERROR, EQX_ON_ERROR=value, stdin="c\n" * 100)
    theirs, ours = re.findall(r"BEGIN \w+\n(.*?)END", output, re.DOTALL)
    assert ours == theirs
    assert re.findall(r"OUTCOMES (.*)", ours) == ["2.0 2.0", outcome] * 4
    assert ours.count("Opening a breakpoint") == (8 if value == "breakpoint" else 0)
    assert f"BLOCKS [{blocks}]" in output


# --- Other errors -------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("donate", ["none", "all"])
def test_an_exception_in_a_callback_stays_jaxs(filter_jit, donate, caplog):
    """This also holds if its text is like that of JAX's error about deleted buffers."""

    def fails(x):
        if x < 0:
            raise ValueError("the row was deleted or donated")
        return np.asarray(x)

    @filter_jit(donate=donate)
    def f(x):
        return jax.pure_callback(fails, jax.ShapeDtypeStruct((), jnp.float32), x)

    for _ in range(CALLS):
        assert f(GOOD + 0) == 1
        with pytest.raises(JAX_ERRORS, match="ValueError: the row was deleted or donated"):
            f(BAD + 0)
        # It isn't mistaken for the Equinox error before it, either.
        message = _message()
        _raised(filter_jit(lambda x, message=message: check(x, message)), BAD)
    # It is raised, so it needn't be logged, too.
    assert not caplog.records


@both
def test_an_error_at_trace_time_or_without_jit_stays_equinoxs(filter_jit):
    f = filter_jit(lambda x, always: eqx.error_if(x, always or x < 0, "negative"))
    for context, args in ((contextlib.nullcontext, (GOOD, True)), (jax.disable_jit, (BAD, False))):
        for _ in range(CALLS):
            with context(), pytest.raises(RuntimeError, match="negative") as caught:
                f(*args)
            assert type(caught.value).__name__ == "EquinoxTracetimeError"


@both
def test_under_plain_jax_jit_the_error_is_jaxs(filter_jit):
    message = _message()
    f = filter_jit(lambda x: check(x, message))
    outer = jax.jit(lambda x: f(x) + 1)
    for _ in range(CALLS):
        assert outer(GOOD) == 2
        with pytest.raises(JAX_ERRORS, match=message):
            # A GPU raises it later.
            outer(BAD).block_until_ready()
        drain()
        assert message in str(_raised(f, BAD))
