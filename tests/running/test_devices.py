"""Arrays on many devices: runs `eight_devices.py` in a process with eight virtual CPU devices."""

import pathlib

import pytest

from tests.support.processes import start

_FILE = pathlib.Path(__file__).parent / "eight_devices.py"


@pytest.mark.slow
def test_on_eight_devices():
    # A process can choose its number of devices only once.
    result = start(
        "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))",
        *("-q", "-n0", "-p", "no:cacheprovider", str(_FILE)),
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" not in result.stdout
