"""A `repr` of the user's that fails is left out of a message, unless a signal handler raises."""

import signal

import pytest

import eqxjit


class Failing:
    """No callable, so `filter_jit` shows it in its error."""

    def __repr__(self):
        raise RuntimeError("no repr")


class Interrupted:
    is_new = True

    def __repr__(self):
        # Once, because pytest shows the object if the test fails.
        if self.is_new:
            self.is_new = False
            signal.raise_signal(signal.SIGTERM)
        return "interrupted"


def test_a_repr_that_fails_does_not_hide_the_error():
    with pytest.raises(TypeError, match="got Failing object"):
        eqxjit.filter_jit(Failing())


def test_an_error_of_a_signal_handler_is_raised():
    def time_out(*_):
        raise TimeoutError("too late")

    before = signal.signal(signal.SIGTERM, time_out)
    try:
        with pytest.raises(TimeoutError, match="too late"):
            eqxjit.filter_jit(Interrupted())
    finally:
        signal.signal(signal.SIGTERM, before)
