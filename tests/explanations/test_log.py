"""The log is silent by default, except for functions that are traced again and again."""

import functools
import logging
import re
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqxjit
from eqxjit._diagnostics.log import logger
from tests.support.places import shown
from tests.support.processes import run

#: What messages call this file.
HERE = shown(__file__)

# From here on no message has the hint how to silence messages.
logger.process("", {})

X = jnp.arange(3.0)
Y = jnp.arange(4.0)


def test_the_log_is_silent_unless_asked_for(caplog):
    f = eqxjit.filter_jit(lambda x, n: x)
    with caplog.at_level(logging.DEBUG, "eqxjit"):
        f(X, 1)
        f(X, 2)
        assert caplog.messages == []
        with eqxjit.explain_retraces():
            f(X, 2)
            f(X, 3)
        f(X, 4)
    [message] = caplog.messages
    assert message.startswith(
        f"eqxjit: `{f.traces()[0].function}` was traced again (trace 3) for the call "
    )
    assert f"at {HERE}:{f.traces()[2].call_site.line}, in " in message
    assert "(tracing " in message
    assert (
        "Compared with trace 2:\n  - static value changed: `n` was 2, is 3\n    If it varies"
        in message
    )
    [record] = caplog.records
    assert (record.name, record.levelno) == ("eqxjit", logging.WARNING)


def test_other_functions_of_one_code_are_not_defined_again(caplog):
    def decorated(fun):
        return eqxjit.filter_jit(functools.wraps(fun)(lambda *args: fun(*args)))

    def unnamed(fun):
        return eqxjit.filter_jit(lambda x: fun(x))

    def shared(x):
        return x

    functions = [
        eqxjit.filter_jit(jax.grad(lambda x: x.sum())),
        eqxjit.filter_jit(jax.grad(lambda x: (x**2).sum())),
        eqxjit.filter_jit(jax.vmap(lambda x: x + 1)),
        decorated(lambda x: x * 2),
        decorated(lambda x: x * 3),
        unnamed(jnp.sin),
        unnamed(lambda x: x * 4),
        *(eqxjit.filter_jit(lambda x: x * 6), eqxjit.filter_jit(lambda x: x * 7)),
        # The same function, wrapped again.
        *(eqxjit.filter_jit(shared, **options) for options in ({}, {"inline": True})),
    ]
    with eqxjit.explain_retraces():
        for f in functions:
            f(X)
            assert [t.reason for t in f.traces()] == ["first trace"]
    assert caplog.messages == []


def test_explanations_are_switched_on_and_off(caplog):
    f = eqxjit.filter_jit(lambda x, n: x)
    f(X, 0)

    def is_logged():
        caplog.clear()
        f(X, f.cache_info().traces)
        # There may be a message about a storm, too.
        return any("traced again" in message for message in caplog.messages)

    try:
        eqxjit.explain_retraces()
        assert is_logged()
        with eqxjit.explain_retraces(False):
            assert not is_logged()
            with eqxjit.explain_retraces():
                assert is_logged()
            assert not is_logged()
        assert is_logged()
    finally:
        eqxjit.explain_retraces(False)
    assert not is_logged()
    assert eqxjit.explain_retraces()(is_logged)()
    assert not is_logged()
    explaining = eqxjit.explain_retraces()
    for _ in range(2):
        with explaining:
            assert is_logged()
        assert not is_logged()
    # A context may be entered twice, with others in between.
    with explaining, eqxjit.explain_retraces(False):
        with explaining:
            assert is_logged()
        assert not is_logged()
    # Contexts may overlap.
    one, two = eqxjit.explain_retraces(), eqxjit.explain_retraces()
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert is_logged()
    two.__exit__(None, None, None)
    assert not is_logged()


@pytest.mark.parametrize("wrong", ["yes", None, 1, 0, print])
def test_a_switch_is_on_or_off(wrong, caplog):
    with pytest.raises(TypeError, match=r"`on` is True or False"):
        eqxjit.explain_retraces(wrong)
    f = eqxjit.filter_jit(lambda x, n: x)
    f(X, 1), f(X, 2)
    assert caplog.messages == []


@pytest.mark.parametrize(("value", "n_messages"), [("1", 1), ("False", 0)])
def test_the_environment_variable(value, n_messages):
    program = """
        import logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(name)s: %(message)s")
        import jax.numpy as jnp, eqxjit
        f = eqxjit.filter_jit(lambda x, n: x)
        f(jnp.ones(3), 1)
        f(jnp.ones(3), 2)
    """
    printed = run(program, EQXJIT_EXPLAIN_RETRACES=value)
    assert printed.count("eqxjit: `<lambda>` was traced again (trace 2)") == n_messages


def test_messages_say_whose_they_are_and_once_how_to_silence_them():
    program = """
        import logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        import jax.numpy as jnp, eqxjit
        f = eqxjit.filter_jit(lambda x, n: x)
        with eqxjit.explain_retraces():
            for n in range(4):
                f(jnp.ones(3), n)
            logging.getLogger("eqxjit").setLevel("ERROR")
            f(jnp.ones(3), 5)
    """
    printed = run(program)
    assert printed.count("eqxjit: `<lambda>` was traced again") == 3
    assert printed.count('logging.getLogger("eqxjit").setLevel("ERROR")') == 1


def test_a_sweep_over_sizes_is_one_cause(messages):
    f = eqxjit.filter_jit(lambda model, state, x: x)
    for n in range(12):
        model = {f"w{k}": jnp.ones((n, k)) for k in range(30)}
        f(model, [jnp.ones(n + k) for k in range(6)], X)
    reason = f.traces()[-1].reason
    cause = "36 arrays in `model`, `state`"
    assert reason == f"shape: {cause}, such as `model['w0']` was float32[10,0], is float32[11,0]"
    [message] = messages
    assert message.count("the last time:") == 1
    assert f"10 times, the last time: shapes of {cause}, such as shape: `model['w0']`" in message
    assert "pad it to a few sizes" in message


@pytest.mark.parametrize("where", ["closure", "Module"])
def test_a_huge_array_that_a_program_closes_over(where, messages):
    array = jnp.ones((110, 250_000))

    class Optics(eqx.Module):
        cube: jax.Array

        def __call__(self, i):
            return self.cube[i].sum()

    def at(i):
        return array[i].sum()

    names = {"closure": "array", "Module": "optics.cube"}
    optics = Optics(array)
    functions = {"closure": at, "Module": lambda i: optics(i)}
    fun = functions[where]
    for _ in range(2):
        f = eqxjit.filter_jit(fun)
        f(jnp.array(3))
        f.clear_cache()
    [message] = messages
    assert f"closes over `{names[where]}` float32[110,250000], 110 MB: pass it as an arg" in message


@pytest.fixture
def messages():
    """Return the messages that were logged so far."""
    logged: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("eqxjit").addHandler(handler)
    yield logged
    logging.getLogger("eqxjit").removeHandler(handler)


def one(arguments, fun=lambda x: X, **options):
    """Return a function that starts a storm of calls of one wrapper."""

    def made():
        again = types.FunctionType(fun.__code__, fun.__globals__, fun.__name__)
        f = eqxjit.filter_jit(again, **options)
        return lambda i: f(*arguments(i))

    return made


def anew(fun, make=lambda i: X):
    """Return a function that starts a storm of calls, each of a new wrapper."""
    return lambda: lambda i: eqxjit.filter_jit(fun(i))(make(i))


class ScaleBy(eqx.Module):
    by: int = eqx.field(static=True)

    def __call__(self, x):
        return self.by * x


class Stepper:
    def step(self, x):
        return x


def multiply(i, x):
    return i * x


def cleared():
    f = eqxjit.filter_jit(lambda x: x)

    def call(i):
        f(X)
        jax.clear_caches()

    return call


STORMS = {
    "statics": (
        one(lambda i: (X, i, str(i)), lambda x, n, mode: x),
        [
            "static value changed: `n` was 9, is 10",
            "static value changed: `mode` was '9', is '10'",
        ],
    ),
    "dtypes and shapes": (
        one(lambda i: (jnp.ones(i // 2, [jnp.int32, jnp.float32][i % 2]),), lambda x: x),
        ["shape: `x` was", "dtype: `x` was float32, is int32"],
    ),
    "partials": (
        anew(lambda i: functools.partial(multiply, i)),
        ["another callable: `i` was 9, is 10"],
    ),
    "Modules": (anew(ScaleBy), ["another callable: `by` was 9, is 10"]),
    "activations": (
        one(lambda i: (X, lambda x: x), lambda x, activation: activation(x)),
        ["static value changed: `activation` is a different `<lambda>.<lambda>` at "],
    ),
    "cleared": (cleared, ["cache evicted or cleared: JAX's caches no longer hold the program"]),
    "evicted": (
        one(lambda i: (X, "ab"[i % 2]), lambda x, n: x, maxsize=1),
        ["cache evicted or cleared: its entry was the least recently used of more than"],
    ),
}


@pytest.mark.parametrize("name", STORMS)
def test_a_storm_is_logged_once_with_its_causes(name, messages):
    make, expected = STORMS[name]
    call = make()
    for i in range(10):
        call(i)
    assert messages == []
    for i in range(10, 22):
        call(i)
    [message] = messages
    start, *causes, end = message.splitlines()
    is_family = expected[0].startswith("another callable")
    often = "for another callable each time" if is_family else "in a row"
    place = re.escape(HERE)
    assert re.match(
        rf"eqxjit: `.*` was traced 10 times {often}, last for the call at {place}:\d+:", start
    )
    assert "Ignore this if you expect only a few more" in end
    for cause in expected:
        assert any(cause in line and "the last time: " in line for line in causes), message
    # Nor is it logged for functions defined at the same line, if that is the cause.
    call = make()
    for i in range(12):
        call(i)
    assert len(messages) == (1 if is_family else 2)


def test_causes_are_counted(messages):
    f = eqxjit.filter_jit(lambda x, n, **kwargs: x)
    for i in range(4):
        f(X, i, **{f"n{k}": i for k in range(50)})
    for i in range(20, 27):
        f(jnp.ones(i), 3, **{f"n{k}": 3 for k in range(50)})
    [message] = messages
    assert re.search(
        r"- 7 times, the last time: shape: `x` was float32\[25\], is .*\[26\]\n", message
    )
    assert "- 3 times, the last time: static value changed: `n` was 2, is 3\n" in message
    assert message.count("pad it") == message.count("pass `np.int32(n)`") == 1
    # A long list is cut short.
    assert message.count("the last time:") == 4
    assert "and 48 more" in message
    # It is logged once.
    f.clear_cache()
    for i in range(12):
        f(X, i)
    assert messages == [message]


def test_what_is_no_storm(messages):
    f = eqxjit.filter_jit(lambda x, n: x)
    for n in [0] * 40 + [*range(10)]:
        f(X, n)
    # A trace that fails doesn't count.
    g = eqxjit.filter_jit(lambda x, n: 1 / 0)
    for n in range(20):
        with pytest.raises(ZeroDivisionError):
            g(X, n)
    # Traces ahead of time are on purpose.
    frozen = eqxjit.freeze(lambda x: x)
    for n in range(20):
        f.lower(X, n).compile()
        frozen.lower(jnp.ones(n))
    # Traces of parts of an outer program don't count.
    inner = eqxjit.filter_jit(lambda x, n: x * n)
    eqxjit.filter_jit(lambda x: [inner(x, n) for n in range(20)])(X)
    jax.jit(lambda x: [inner(x, n) for n in range(20, 40)])(X)
    # Each line of an interactive session is a different one.
    for i in range(20):
        code = compile(f"lambda x: x * {i}", "<stdin>", "eval")
        eqxjit.filter_jit(eval(code))(X)
    assert messages == []


def test_eager_transformations_are_counted(messages):
    f = eqxjit.filter_jit(lambda x, n: (x * n).sum())
    for n in range(20):
        jax.grad(f)(X, n)
    [message] = messages
    assert "static value changed: `n` was" in message
