"""The worked examples print what the README shows, but for the numbers of seconds and sizes."""

import pathlib
import re
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parent.parent
_SHOWN = dict(
    re.findall(
        r"`python -m bench\.examples\.(\w+)`:\n\n```text\n(.*?)```",
        (_ROOT / "README.md").read_text(),
        re.DOTALL,
    )
)


def words(text):
    """Its words without numbers: table lines and spaces depend on how wide those are."""
    return re.sub(r"\d[\d.,e-]*|[─ ]", " ", text).split()


def test_each_example_is_shown():
    examples = {path.stem for path in (_ROOT / "bench" / "examples").glob("*.py")}
    assert set(_SHOWN) == examples - {"__init__"}


@pytest.mark.parametrize("name", sorted(_SHOWN))
def test_an_example_prints_what_is_shown(name):
    result = subprocess.run(
        [sys.executable, "-m", f"bench.examples.{name}"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert words(result.stdout + result.stderr) == words(_SHOWN[name])
