"""The notebooks run, at a small size, and their stored outputs can be shown."""

import re

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.processes import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("NOTEBOOK_STEPS", "20")
    notebook = nbformat.read(path, 4)
    shown = [[output.output_type for output in cell.outputs] for cell in code_cells(notebook)]
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    # The outputs have the same kinds as the stored outputs.
    assert shown == [[o.output_type for o in cell.outputs] for cell in code_cells(notebook)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_kept_is_fit_to_be_shown(path):
    assert len(NOTEBOOKS) == 3
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.get("name") for output in outputs} <= {"stdout", None}
    assert any("text/html" in output.get("data", {}) for output in outputs)
    # The stored outputs contain no paths of the machine that ran them.
    assert not re.search(r"/(root|home|work|tmp)/", path.read_text())
    page = (ROOT / "docs" / "mkdocs.yml").read_text()
    assert f"{path.stem}.md" in page
