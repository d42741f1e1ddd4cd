"""The whole programs under `bench/examples` run, learn, and stay short."""

import re

import pytest

from tests.support.processes import ROOT, python

pytestmark = pytest.mark.slow

PROGRAMS = {
    "bench.examples.replay_buffer": ["--steps", "1500"],
    "bench.examples.neural_ode": ["--steps", "150"],
    "bench.examples.data_loader": ["--epochs", "2"],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_learns(name):
    result = python("-m", name, *PROGRAMS[name], cwd=ROOT)
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", result.stdout)]
    if losses:
        assert losses[-1] < losses[0] / 3
    else:
        assert "reached place 11 of 11 in 11 actions" in result.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_short_and_can_be_found(name):
    path = ROOT / f"{name.replace('.', '/')}.py"
    assert len(path.read_text().splitlines()) <= 80
    page = (ROOT / "docs" / "pages" / "examples.md").read_text()
    assert f"python -m {name}" in page
