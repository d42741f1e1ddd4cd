"""Builds the site: `python docs/build.py [folder]` writes it to docs/site.

Zensical builds the site, but it can read neither notebooks nor links to folders. So the pages are
first copied to a stage: the notebooks become Markdown with the outputs of their last run.
"""

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zlib
from pathlib import Path

DOCS = Path(__file__).parent

# The sites whose names the API page links to. Each lists its names in the file `objects.inv`.
INVENTORIES = {
    "equinox": "https://docs.kidger.site/equinox/",
    "jax": "https://docs.jax.dev/en/latest/",
    "python": "https://docs.python.org/3/",
}


def main() -> int:
    """Stage the pages, then build the site. Warnings are errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=DOCS / "site")
    parser.add_argument("--url", help="where the site will be served, such as https://host/eqxjit/")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    with tempfile.TemporaryDirectory() as staged:
        stage = Path(staged) / "docs"
        shutil.copytree(DOCS / "pages", stage / "pages")
        (stage.parent / "src").symlink_to(DOCS.parent / "src")
        settings = (DOCS / "mkdocs.yml").read_text()
        (stage / "mkdocs.yml").write_text(configure(settings, arguments.url, inventories(stage)))
        for notebook in sorted((DOCS / "notebooks").glob("*.ipynb")):
            _convert(notebook, stage / "pages")
        command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", "mkdocs.yml"]
        status = subprocess.run(command, cwd=stage).returncode
        if status == 0:
            if not arguments.url:
                missing = stage / "site" / "404.html"
                missing.write_text(relative(missing.read_text()))
            _link_names(stage)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(stage / "site", folder)
            print(f"To search it, serve it: python -m http.server -d {folder}")
    return status


def configure(settings: str, url: str | None, inventories: list[str]) -> str:
    """Return `mkdocs.yml` with the version, the site's address and the inventories filled in."""
    version = importlib.metadata.version("eqxjit")
    settings = settings.replace("copyright: eqxjit\n", f"copyright: eqxjit {version}\n")
    settings = settings.replace("inventories: []\n", f"inventories: [{', '.join(inventories)}]\n")
    return f"{settings}\nsite_url: {url}\n" if url else settings


def inventories(folder: Path) -> list[str]:
    """Download the inventories of other sites. Without a network, names aren't linked."""
    found = []
    for name, site in INVENTORIES.items():
        file = folder / f"{name}.inv"
        try:
            with urllib.request.urlopen(f"{site}objects.inv", timeout=5) as response:
                content = response.read()
            if not content.startswith(b"# Sphinx inventory version 2"):
                raise OSError("its objects.inv is no inventory")
            file.write_bytes(content)
        except OSError as error:
            print(f"No links to {site}: {error}")
        else:
            found.append(f'{{url: "{file.as_uri()}", base_url: "{site}"}}')
    return found


def addresses(inventory: bytes, site: str) -> dict[str, str]:
    """Return the address of each Python name in an inventory, which is in Sphinx's format."""
    *_, compressed = inventory.split(b"\n", 4)
    found = {}
    for line in zlib.decompress(compressed).decode().splitlines():
        match = re.match(r"(\S+) py:\w+ -?\d+ (\S+) ", line)
        if match:
            name, page = match.groups()
            found[name] = site + (page[:-1] + name if page.endswith("$") else page)
    return found


def link_names(page: str, addresses: dict[str, str]) -> str:
    """Link each name in running text, such as `jax.Array`, to its page on another site."""

    def link(match: re.Match[str]) -> str:
        address = addresses.get(re.sub(r"^eqx\.", "equinox.", match[2]))
        return f'<a href="{address}">{match[1]}</a>' if address else match[0]

    # The first alternative matches links, headings and code blocks, whose content stays as it is.
    pattern = r"<(?:a|pre|h\d|title)\b.*?</(?:a|pre|h\d|title)>|(<code>([\w.]+)</code>)"
    return re.sub(pattern, lambda m: link(m) if m[1] else m[0], page, flags=re.DOTALL)


def _link_names(stage: Path) -> None:
    """Link the names of other projects in all pages of the site."""
    found = {}
    for name, site in INVENTORIES.items():
        file = stage / f"{name}.inv"
        if name != "python" and file.exists():
            found |= addresses(file.read_bytes(), site)
    for page in (stage / "site").glob("*.html") if found else ():
        page.write_text(link_names(page.read_text(), found))


def relative(page: str) -> str:
    """Return a page whose links start from its folder, not from the root of the server.

    The server shows `404.html` for any missing page. All pages of the site are in one folder, so
    these links are right under every prefix.
    """
    page = re.sub(r'\b(href|src)="/(?!/)', r'\1="', page)
    return page.replace('"base":"/"', '"base":"."').replace('"base": "/"', '"base": "."')


def label_cells(text: str) -> str:
    """Write the heading of its column into each cell of eqxjit's tables, for narrow screens."""

    def label_table(table: re.Match[str]) -> str:
        headings = re.findall(r"<th\b[^>]*>(.*?)</th>", table[0], re.DOTALL)

        def label_row(row: re.Match[str]) -> str:
            remaining = iter(headings)
            return re.sub(r"<td\b", lambda _: f'<td data-heading="{next(remaining, "")}"', row[0])

        return re.sub(r"<tr\b.*?</tr>", label_row, table[0], flags=re.DOTALL)

    return re.sub(r'<table class="eqxjit".*?</table>', label_table, text, flags=re.DOTALL)


def _convert(notebook: Path, pages: Path) -> None:
    """Write a notebook as a Markdown page, with its pictures in a folder beside it."""
    from nbconvert import MarkdownExporter
    from nbconvert.writers import FilesWriter

    pictures = f"{notebook.stem}_files"
    text, resources = MarkdownExporter().from_filename(
        str(notebook), resources={"output_files_dir": pictures}
    )
    FilesWriter(build_directory=str(pages)).write(label_cells(text), resources, notebook.stem)


if __name__ == "__main__":
    sys.exit(main())
