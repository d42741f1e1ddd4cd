"""Generated source: Python reads its names as they are written."""

from eqxjit._fast.source import Constants, define


def test_names_that_python_reads_as_others():
    """In source `µ` (micro) is `μ` (mu)."""
    names = Constants(["value"])
    name = names.constant("µ", 3)
    f = define("f", "title", f"def f(value): return {name} + value", names.namespace)
    assert f(1) == 4
