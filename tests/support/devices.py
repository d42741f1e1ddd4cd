"""Marks tests that are about CPUs, and clears errors of asynchronous devices."""

import contextlib

import jax
import pytest


def about_cpus(reason: str) -> pytest.MarkDecorator:
    """Mark a test that is meaningful only on a CPU, for this reason."""
    return pytest.mark.skipif(jax.default_backend() != "cpu", reason=f"about CPUs: {reason}")


def drain() -> None:
    """Forget errors of callbacks that a device has raised after the call."""
    if jax.default_backend() != "cpu":
        with contextlib.suppress(Exception):
            jax.effects_barrier()
