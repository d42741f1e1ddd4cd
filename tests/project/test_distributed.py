"""Several processes: the data-parallel example trains as one process does."""

import re
import subprocess
import sys

import pytest

from tests.support.processes import ROOT


@pytest.mark.slow
def test_two_processes_train_as_one():
    command = [sys.executable, "-m", "bench.examples.data_parallel", "--epochs=2"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    parts = re.split(r"(?m)^\d process.*device.*:$", run.stdout)[1:]
    assert len(parts) == 3
    for part, n_processes in zip(parts, (2, 1, 1), strict=True):
        losses = re.findall(r"\[process (\d)\] epoch 2: loss (.*)", part)
        assert sorted(process for process, _ in losses) == ["0", "1"][:n_processes]
        # Each sees the loss of the whole batch, not of its share.
        assert len({loss for _, loss in losses}) == 1
        # Each traced once, for all 88 steps.
        assert part.count("88 steps, CacheInfo(entries=1, traces=1") == n_processes
    assert "of the other process 0.0e+00 away, of two devices 0.0e+00" in run.stdout
