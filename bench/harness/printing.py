"""What the commands print: tables of figures, and how far they are."""

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

T = TypeVar("T")

#: As wide as the terminal, or wide enough for any table where there is none.
console = Console(width=None if sys.stdout.isatty() else 130)


def progress(items: Iterable[T], title: str, total: int | None = None) -> Iterable[T]:
    """Go through the items, and show how far; `total` is for those without a length."""
    return track(items, title, total, console=console, transient=True)


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table of texts on the left and figures on the right; `None` is a dash."""
    table = Table(title=title, row_styles=["", "dim"])
    rows = [*rows]
    for i, column in enumerate(columns):
        is_text = all(isinstance(row[i], str) for row in rows)
        table.add_column(column, justify="left" if is_text else "right", no_wrap=is_text)
    for row in rows:
        table.add_row(*map(_shown, row))
    console.print(table)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,.{1 if value >= 10 else 2}f}" if isinstance(value, float) else str(value)
