"""Builds the site: `python docs/build.py [folder]` writes it to docs/site.

Zensical, which does the work, knows neither notebooks nor links to folders. So the pages are staged
first: the figures copied, the notebooks turned into Markdown with what their last run put out.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent


def main() -> int:
    """Stage the pages, then build; warnings are errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=DOCS / "site")
    folder = parser.parse_args().folder.resolve()
    with tempfile.TemporaryDirectory() as staged:
        stage = Path(staged) / "docs"
        shutil.copytree(DOCS / "pages", stage / "pages")
        (stage.parent / "src").symlink_to(DOCS.parent / "src")
        shutil.copy(DOCS / "mkdocs.yml", stage)
        for notebook in sorted((DOCS / "notebooks").glob("*.ipynb")):
            _convert(notebook, stage / "pages")
        command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", "mkdocs.yml"]
        status = subprocess.run(command, cwd=stage).returncode
        if status == 0:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(stage / "site", folder)
            print(f"To search it, serve it: python -m http.server -d {folder}")
    return status


def _convert(notebook: Path, pages: Path) -> None:
    """Write a notebook as a Markdown page, with its pictures in a folder beside it."""
    from nbconvert import MarkdownExporter
    from nbconvert.writers import FilesWriter

    pictures = f"{notebook.stem}_files"
    text, resources = MarkdownExporter().from_filename(
        str(notebook), resources={"output_files_dir": pictures}
    )
    FilesWriter(build_directory=str(pages)).write(text, resources, notebook.stem)


if __name__ == "__main__":
    sys.exit(main())
