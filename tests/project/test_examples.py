"""The examples run, print what the documentation shows, learn, and stay short."""

import json
import re

import pytest

from tests.support.processes import ROOT, python

pytestmark = pytest.mark.slow

#: The output of each example on the pages.
SHOWN = dict(
    re.findall(
        r"`python -m bench\.examples\.(\w+)`:\n\n```text\n(.*?)```",
        (ROOT / "docs" / "pages" / "retraces.md").read_text(),
        re.DOTALL,
    )
)

#: The examples that learn, and their arguments.
LEARNING = {
    "replay_buffer": ["--steps", "1500"],
    "neural_ode": ["--steps", "150"],
    "data_loader": ["--epochs", "2"],
}


def run(name, *arguments):
    # The width of the tests' own terminal may differ.
    result = python("-m", f"bench.examples.{name}", *arguments, cwd=ROOT, COLUMNS="100")
    assert result.returncode == 0, result.stderr
    return result


def words(text):
    """Return a text's words without numbers, because the width of numbers changes a table."""
    return re.sub(r"\d[\d.,e-]*|[─ ]", " ", text).split()


def test_each_example_is_tested():
    paths = (ROOT / "bench" / "examples").iterdir()
    examples = {path.stem for path in paths if not path.name.startswith("__")}
    assert examples == {*SHOWN, *LEARNING, "data_parallel", "digits_server"}


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_an_example_prints_what_is_shown(name):
    result = run(name)
    # On a busy machine the first call may take more than ten seconds, which is logged.
    log = re.sub(r"(?m)^eqxjit: `.*( has been |`: \w+ took ).*\n", "", result.stderr)
    # The first message also says how to silence them.
    log = re.sub(r"(?m)^\(`logging.getLogger.*\n", "", log)
    assert words(result.stdout + log) == words(SHOWN[name])


@pytest.mark.parametrize("name", LEARNING)
def test_a_program_learns_and_is_short(name):
    printed = run(name, *LEARNING[name]).stdout
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    if losses:
        assert losses[-1] < losses[0] / 3
    else:
        assert "reached place 11 of 11 in 11 actions" in printed
    assert len((ROOT / "bench" / "examples" / f"{name}.py").read_text().splitlines()) <= 80
    assert f"bench.examples.{name}" in (ROOT / "docs" / "pages" / "examples.md").read_text()


def test_two_processes_train_as_one():
    printed = run("data_parallel", "--epochs=2").stdout
    parts = re.split(r"(?m)^\d process.*device.*:$", printed)[1:]
    assert len(parts) == 3
    for part, n_processes in zip(parts, (2, 1, 1), strict=True):
        losses = re.findall(r"\[process (\d)\] epoch 2: loss (.*)", part)
        assert sorted(process for process, _ in losses) == ["0", "1"][:n_processes]
        # Each process prints the loss of the whole batch, not of its share.
        assert len({loss for _, loss in losses}) == 1
        # Each process traced once, for all 88 steps.
        assert part.count("88 steps, CacheInfo(entries=1, traces=1") == n_processes
    assert "largest difference: other process 0.0e+00, two devices 0.0e+00" in printed


def test_the_cost_of_diagnostics_can_be_measured():
    """The probe replaces private functions by stubs, so it fails if these get other names."""
    result = python("-m", "bench.probes.diagnostics", "1", cwd=ROOT)
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert len(rows) == 3
    assert all(figures.keys() == {"on", "off"} for figures in rows.values())
