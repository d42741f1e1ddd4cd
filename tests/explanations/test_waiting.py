"""A phase that takes long is logged while it goes on, and once more when it is over."""

import logging
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

import eqxjit
from eqxjit._diagnostics import waiting

X = jnp.ones(3)


@pytest.fixture
def messages(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "BOUNDS", [0.2, 0.6, 1.2])
    # The watcher of an earlier test may sleep for a second.
    monkeypatch.setattr(waiting, "watcher", threading.Thread())
    return lambda: caplog.messages


def slow(x):
    time.sleep(1.5)
    return x + 1


def test_a_trace_that_takes_long(messages):
    f = eqxjit.filter_jit(slow)
    f(X)
    # On a busy machine other phases may take long, too.
    first, *others, last = [text for text in messages() if "tracing" in text]
    assert first.startswith("eqxjit: `slow`, called at tests/explanations/test_waiting.py:")
    assert " has been tracing for 0." in first
    line = slow.__code__.co_firstlineno + 1
    # The first message of a process also says how to silence them.
    assert f"and runs tests/explanations/test_waiting.py:{line} now." in first
    # After 0.6 and 1.2 seconds.
    assert len(others) == 2
    assert last.startswith("eqxjit: `slow`: tracing took 1.")
    n = len(messages())
    f(X)
    assert len(messages()) == n


@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="JAX doesn't say what it compiles")
def test_a_compilation_that_takes_long(messages, monkeypatch):
    monkeypatch.setattr(waiting, "BOUNDS", [0.02, 60])

    # A program that no persistent cache has.
    number = time.time() % 1

    def unrolled(x):
        for _ in range(100):
            x = jnp.sin(x @ x) + x * number
        return x

    f = eqxjit.filter_jit(unrolled)
    lowered = f.lower(jnp.ones((3, 3)))
    number += 1
    f(jnp.ones((4, 4)))
    texts = "\n".join(messages())
    assert any(f"has been {phase} for" in texts for phase in ("compiling", "lowering"))
    # The size of a program is known as soon as it is lowered.
    lowered.compile()
    line = unrolled.__code__.co_firstlineno + 2
    assert f"; it has 400 equations:\n  unrolled:{line}: 400 of 400" in messages()[-2]


def test_it_can_be_silenced_and_short_ones_are_silent(messages):
    logger = logging.getLogger("eqxjit")
    logger.setLevel("ERROR")
    try:
        eqxjit.filter_jit(slow)(X)
    finally:
        logger.setLevel("NOTSET")
    eqxjit.filter_jit(lambda x: x)(X)
    assert messages() == []


def test_a_failed_trace_is_not_watched_any_more(messages):
    def fails(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        eqxjit.filter_jit(fails)(X)
    time.sleep(0.5)
    assert messages() == []
    assert waiting.watcher.daemon


@pytest.mark.parametrize("stage", ["call", "lower"])
def test_a_program_that_cannot_be_lowered_is_not_watched_any_more(messages, stage, monkeypatch):
    monkeypatch.setattr(waiting, "BOUNDS", [1.0])
    primitive = Primitive("without a rule")
    primitive.def_abstract_eval(lambda x: x)
    f = eqxjit.filter_jit(lambda x: primitive.bind(x), donate="all")
    for _ in range(2):
        with pytest.raises(NotImplementedError):
            f(X + 0) if stage == "call" else f.lower(X)
    time.sleep(1.4)
    assert messages() == []


def test_the_watcher_ends_and_starts_again(messages):
    f = eqxjit.filter_jit(lambda x: slow(x))
    for n in (1, 2):
        f(jnp.ones(n))
        time.sleep(0.5)
        assert not [t for t in threading.enumerate() if t.name == "eqxjit" and t.is_alive()]
    assert len([text for text in messages() if "has been tracing" in text]) == 6


def test_functions_of_others_are_not_watched(messages):
    jax.jit(slow)(X)
    assert messages() == []


def test_an_error_of_a_handler_of_messages_ends_no_watching(messages):
    """The watching thread goes on for other threads, and for later phases."""

    class Failing(logging.Handler):
        n_failed = 0

        def emit(self, record):
            self.n_failed += 1
            raise RuntimeError("full disk")

    logger, handler = logging.getLogger("eqxjit"), Failing()
    logger.addHandler(handler)
    try:
        eqxjit.filter_jit(lambda x: slow(x))(X)
    except RuntimeError:
        # The message at the end comes from the call itself.
        pass
    finally:
        logger.removeHandler(handler)
    # After 0.2, 0.6 and 1.2 seconds, and at the end.
    assert handler.n_failed >= 4
