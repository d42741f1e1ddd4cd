"""Runs the tests of calls again, in processes without any listener of JAX's events.

Records, reports and logs get their times from JAX's events. A user may remove all listeners
(`jax.monitoring.clear_event_listeners()`), and every result, wait and error has to stay right.

A test with the mark `events` is left out. It is about JAX's warning of donated buffers, which is
hidden by the event of a lowering where no trace comes first.
"""

import pytest

from tests.support.processes import ROOT, python


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["calls", "errors", "running"])
def test_nothing_but_times_depends_on_jaxs_events(folder):
    result = python(
        *("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", f"tests/{folder}"),
        *("-m", "not slow and not events"),
        cwd=ROOT,
        TESTS_WITHOUT_EVENTS="1",
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
