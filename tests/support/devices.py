"""Which tests are about CPUs, and what an asynchronous device leaves behind."""

import contextlib

import jax
import pytest


def about_cpus(reason: str) -> pytest.MarkDecorator:
    """Mark a test that says nothing on another device; the reason says why."""
    return pytest.mark.skipif(jax.default_backend() != "cpu", reason=f"about CPUs: {reason}")


def drain() -> None:
    """Forget errors of callbacks that a device has raised after the call."""
    if jax.default_backend() != "cpu":
        with contextlib.suppress(Exception):
            jax.effects_barrier()
