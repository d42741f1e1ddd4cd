"""Adds a run of the test suite to README's table of versions: `python .ci/versions.py JUNIT.xml`.

Run by `nox -s versions` in the environment that the tests ran in.
"""

import importlib.metadata
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
HEAD = "| Python | jax | equinox | tests |\n| --- | --- | --- | --- |\n"
TABLE = re.compile(r"(<!-- versions -->\n).*(<!-- /versions -->)", re.DOTALL)


def main() -> None:
    """Reads the outcome; its row takes the place of the one for the same versions."""
    [suite] = ElementTree.parse(sys.argv[1]).getroot().iter("testsuite")
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    python = ".".join(platform.python_version_tuple()[:2])
    versions = [python, *map(importlib.metadata.version, ("jax", "equinox"))]
    outcome = f"{total - skipped - failed:,} passed" + (f", {failed} failed" if failed else "")
    outcome += f", at {_commit()}"

    text = README.read_text()
    found = TABLE.search(text)
    assert found is not None, "README has no place for the table"
    rows = {
        tuple(cells[:3]): cells[3]
        for cells in re.findall(
            r"^\| (\d\S*) \| (\S+) \| (\S+) \| (.+) \|$", found[0], re.MULTILINE
        )
    }
    rows[tuple(versions)] = outcome
    lines = [f"| {' | '.join([*key, rows[key]])} |\n" for key in sorted(rows, key=_order)]
    README.write_text(TABLE.sub(lambda m: m[1] + HEAD + "".join(lines) + m[2], text))


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _order(versions: tuple[str, ...]) -> list[list[int]]:
    return [[int(part) for part in version.split(".")] for version in versions]


if __name__ == "__main__":
    main()
