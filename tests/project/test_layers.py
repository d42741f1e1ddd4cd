"""Layers: imports go down only, those for type checkers included, and without cycles."""

import ast
import graphlib
import pathlib
import re

import eqxjit

ROOT = pathlib.Path(eqxjit.__file__).parent

#: From the bottom to the top; a package may import itself and what is below it.
LAYERS = [
    *(
        "_native",
        "_signals",
        "_text",
        "_html",
        "_compat",
        "_places",
        "_spec",
        "_fast",
        "_diagnostics",
        "_core",
        "_deploy",
        "_reports",
    ),
    *("types", "__init__", "__main__"),
]


def imports_of(path):
    """Return the paths of the files that a file imports, at any place in it."""
    package = path.relative_to(ROOT).parent
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = ROOT / package if node.level == 1 else ROOT / package.parent
            target = folder.joinpath(*(node.module or "").split("."))
            modules = [target.with_suffix(".py"), target.with_suffix(".pyi")]
            for alias in node.names:
                names = [f"{alias.name}.py", f"{alias.name}.pyi"]
                files = [*map(target.joinpath, names), *modules]
                found.add(str(next(filter(pathlib.Path.exists, files)).relative_to(ROOT)))
    return found


FILES = [*ROOT.rglob("*.py"), *ROOT.rglob("*.pyi")]
IMPORTS = {str(path.relative_to(ROOT)): imports_of(path) for path in FILES}


def layer(file):
    return LAYERS.index(file.split("/")[0].split(".")[0])


def test_imports_go_down_only():
    pairs = [(file, other) for file, others in IMPORTS.items() for other in others]
    up = [(file, other) for file, other in pairs if layer(other) > layer(file)]
    assert not up
    assert len(pairs) > 100


def test_no_imports_go_round():
    assert len([*graphlib.TopologicalSorter(IMPORTS).static_order()]) == len(IMPORTS)


def test_tests_reach_into_private_state_by_one_module():
    sources = "\n".join(path.read_text() for path in ROOT.rglob("*.py"))
    private = {*re.findall(r"(?:def |class |self\.)(_[a-z]\w*)", sources)}
    # Modules are imported by name.
    private -= {"_fields", "_repr_html_", *(path.stem for path in ROOT.rglob("_*"))}
    assert len(private) > 100
    tests = pathlib.Path(__file__).parents[1]
    found = [
        f"{path.name}: {name}"
        for path in {*tests.rglob("*.py")} - {tests / "support" / "inside.py"}
        for name in re.findall(r"(?<!self)\.(_[a-z]\w*)", path.read_text())
        if name in private
    ]
    assert found == []
