"""What the commands print: tables of figures."""

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def wide_console(width: int = 130) -> Console:
    """A console as wide as the terminal, or this wide where there is none."""
    return Console(width=None if sys.stdout.isatty() else width)


def table_of(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table of texts on the left and figures on the right; `None` is a dash."""
    table = Table(title=title, row_styles=["", "dim"])
    rows = [*rows]
    for i, column in enumerate(columns):
        is_text = all(isinstance(row[i], str) for row in rows)
        table.add_column(column, justify="left" if is_text else "right", no_wrap=is_text)
    for row in rows:
        table.add_row(*map(_shown, row))
    return table


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,.{1 if value >= 10 else 2}f}" if isinstance(value, float) else str(value)
