"""Equinox's own examples give the same losses, to the last bit, under eqxjit."""

import pytest

from bench.commands import downstream
from bench.probes.downstream import WORK
from bench.probes.equinox_examples import EXAMPLES
from tests.support.processes import run

PROGRAM = """
    import sys
    import eqxjit
    from bench.probes import downstream

    work = downstream.WORK[sys.argv[1]]
    theirs, n_theirs = downstream.run(work)
    assert n_theirs >= 5
    with eqxjit.install():
        for _ in range(2):
            assert downstream.run(work) == (theirs, 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_equinox(example):
    run(PROGRAM, example, XLA_FLAGS="--xla_force_host_platform_device_count=8")


def test_each_package_is_pinned_and_has_work():
    packages = WORK.keys() - EXAMPLES.keys()
    assert {"jax", "jaxlib", "equinox", *packages} == downstream.pinned().keys()
    assert len(packages) >= 5
