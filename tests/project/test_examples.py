"""The worked examples print what the documentation shows, but for seconds and sizes."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.processes import ROOT

pytestmark = pytest.mark.slow

_SHOWN = dict(
    re.findall(
        r"`python -m bench\.examples\.(\w+)`:\n\n```text\n(.*?)```",
        (ROOT / "docs" / "pages" / "retraces.md").read_text(),
        re.DOTALL,
    )
)

# Examples that don't print one answer: what tests them instead.
_TESTED_ELSEWHERE = {
    "data_parallel": "test_distributed.py",
    "data_loader": "test_whole_programs.py",
    "digits_server": "test_digits_server.py",
    "neural_ode": "test_whole_programs.py",
    "replay_buffer": "test_whole_programs.py",
}


def words(text):
    """Its words without numbers: table lines and spaces depend on how wide those are."""
    return re.sub(r"\d[\d.,e-]*|[─ ]", " ", text).split()


def test_each_example_is_shown_or_tested_elsewhere():
    paths = (ROOT / "bench" / "examples").iterdir()
    examples = sorted(path.stem for path in paths if not path.name.startswith("__"))
    assert examples == sorted([*_SHOWN, *_TESTED_ELSEWHERE])
    for name, file in _TESTED_ELSEWHERE.items():
        assert f"bench.examples.{name}" in (ROOT / "tests/project" / file).read_text()


@pytest.mark.parametrize("name", sorted(_SHOWN))
def test_an_example_prints_what_is_shown(name):
    result = subprocess.run(
        [sys.executable, "-m", f"bench.examples.{name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        # The tests' own is another.
        env={**os.environ, "COLUMNS": "100"},
        check=True,
    )
    # On a busy machine the first call takes more than ten seconds, of which the log tells.
    log = re.sub(r"(?m)^`.* has been .*\n|^`\w+`: \w+ took .*\n", "", result.stderr)
    assert words(result.stdout + log) == words(_SHOWN[name])
