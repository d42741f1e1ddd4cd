"""What the commands print: a console as wide as their tables, and verdicts."""

import sys

from rich.console import Console


def wide_console(width: int) -> Console:
    """A console as wide as the terminal, or this wide where there is none."""
    return Console(width=None if sys.stdout.isatty() else width)


def met_or_missed(holds: bool) -> str:
    """Whether a target was met, in colour."""
    return "[green]met[/]" if holds else "[red]missed[/]"
