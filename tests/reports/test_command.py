"""`python -m eqxjit script.py`: an error of the script reads as if Python itself had run it."""

import pytest

from tests.support.processes import python

SCRIPTS = {
    "raises": "import equinox\ndef main():\n    raise ValueError('wrong')\nmain()\n",
    "does not compile": "def main(:\n",
}


@pytest.mark.parametrize("source", SCRIPTS.values(), ids=SCRIPTS)
def test_the_error_of_a_script_shows_its_own_frames_alone(source, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(source)
    alone, ours = python(str(script)), python("-m", "eqxjit", str(script))
    assert alone.returncode == ours.returncode == 1
    assert ours.stderr.splitlines() == [
        line for line in ours.stderr.splitlines() if "eqxjit" not in line and "frozen" not in line
    ]
    assert ours.stderr.splitlines()[-1] == alone.stderr.splitlines()[-1]
    assert ours.stderr.count("  File ") == alone.stderr.count("  File ")


def test_the_error_of_a_module_begins_in_the_module(tmp_path):
    (tmp_path / "module.py").write_text(SCRIPTS["raises"])
    result = python("-m", "eqxjit", "-m", "module", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("  File ") == 2
    assert "frozen" not in result.stderr
