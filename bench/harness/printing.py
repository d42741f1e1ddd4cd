"""Prints the tables of figures and the progress of the commands."""

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

T = TypeVar("T")

#: As wide as the terminal; without a terminal wide enough for any table.
console = Console(width=None if sys.stdout.isatty() else 130)


def progress(items: Iterable[T], title: str, total: int | None = None) -> Iterable[T]:
    """Yield the items, and show a progress bar. Items without a length need a `total`."""
    return track(items, title, total, console=console, transient=True)


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, with strings aligned left and figures aligned right. `None` is a dash."""
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
