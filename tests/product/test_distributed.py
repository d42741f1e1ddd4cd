"""Several processes: the data-parallel example trains as one process does, and fails as one."""

import contextlib
import re
import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.processes import ROOT

pytestmark = pytest.mark.slow


# Startup of both processes included, on a busy machine; a process that waits for one that has
# failed would wait for five minutes.
_BOUND = 120


@contextlib.contextmanager
def launched(*options):
    """The example, started; nothing of it is left behind."""
    command = [sys.executable, "-m", "bench.examples.data_parallel", *options]
    launcher = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    children = []
    try:
        yield launcher, children
    finally:
        for process in (launcher, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.communicate()


def in_training(launcher, children):
    """Waits until the two processes train, and notes which those are, in their order."""
    printed = set()
    for line in launcher.stdout:
        if "epoch 1:" in line:
            printed.add(line.split("epoch")[0])
        if len(printed) == 2:
            break
    found = psutil.Process(launcher.pid).children(recursive=True)
    children += sorted(found, key=lambda child: next(a for a in child.cmdline() if "process=" in a))
    assert len(children) == 2


def ended(launcher, children):
    """What the launcher says on stderr as it fails, and that its processes are gone by then."""
    _, error = launcher.communicate(timeout=_BOUND)
    assert launcher.returncode == 1, error
    assert not any(child.is_running() for child in children)
    return error


def test_two_processes_train_as_one():
    with launched("--epochs=2") as (launcher, _):
        output, error = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, error
    runs = re.split("(?m)^.*process.*devices?.*:$", output)[1:]
    assert len(runs) == 3
    for run, n_processes in zip(runs, (2, 1, 1), strict=True):
        losses = re.findall(r"\[process (\d)\] epoch 2: loss (.*)", run)
        assert sorted(process for process, _ in losses) == ["0", "1"][:n_processes]
        # Each sees the loss of the whole batch, not of its share.
        assert len({loss for _, loss in losses}) == 1
        # Each traced once, for all 88 steps.
        assert run.count("88 steps, CacheInfo(entries=1, traces=1") == n_processes
    assert "and of one with 2 devices: equal bit for bit" in output


def test_a_process_that_raises_ends_the_run():
    with launched("--epochs=100000", "--fail-at=1000") as (launcher, children):
        in_training(launcher, children)
        error = ended(launcher, children)
    assert error.startswith("process 1 of 2 failed with exit status 1, and the run with it")
    assert "RuntimeError: asked to fail at step 1000" in error


@pytest.mark.parametrize("which", [0, 1])
def test_a_process_that_is_killed_ends_the_run(which):
    with launched("--epochs=100000") as (launcher, children):
        in_training(launcher, children)
        children[which].kill()
        error = ended(launcher, children)
    assert error.startswith(f"process {which} of 2 was killed by SIGKILL (exit status -9)")
    assert "epoch 1:" in error  # the last that it printed


def test_a_process_that_no_longer_answers_ends_the_run():
    with launched("--epochs=100000") as (launcher, children):
        in_training(launcher, children)
        children[1].send_signal(signal.SIGSTOP)
        error = ended(launcher, children)
    # JAX ends the other one (by an abort or an exception), which says that a heartbeat is missing.
    assert error.startswith("process 0 of 2 ")
    assert "heartbeat" in error


def test_a_run_that_takes_too_long_is_ended():
    with launched("--epochs=100000", "--timeout=3") as (launcher, children):
        error = ended(launcher, children)
    assert error.startswith("after 3 s (`--timeout`) still running: process 0, 1 of 2")


def test_the_processes_end_with_their_launcher():
    with launched("--epochs=100000") as (launcher, children):
        in_training(launcher, children)
        # Stopped, so that the other one waits in the middle of a step, without printing anything:
        # it notices at once, not by a broken pipe nor, ten seconds later, by a missing heartbeat.
        children[1].send_signal(signal.SIGSTOP)
        launcher.kill()
        gone, _ = psutil.wait_procs(children[:1], timeout=8)
        assert gone
        children[1].send_signal(signal.SIGCONT)
        _, alive = psutil.wait_procs(children, timeout=_BOUND)
        assert not alive
