"""HTML for notebooks and for pages of their own: tables that suit a light and a dark ground."""

import html
from collections.abc import Iterable, Sequence

# Scoped: a notebook has styles of its own. `currentColor` is whatever its text has.
STYLE = """<style>
.eqxjit { font: 13px/1.4 system-ui, sans-serif; }
.eqxjit table { border-collapse: collapse; margin: 0.4em 0; }
.eqxjit th, .eqxjit td { border: 0; border-bottom: 1px solid #8884; padding: 2px 10px 2px 0;
  text-align: left; vertical-align: top; background: none; color: inherit; white-space: pre-wrap; }
.eqxjit th { font-weight: 600; }
.eqxjit td.number, .eqxjit th.number { text-align: right; font-variant-numeric: tabular-nums; }
.eqxjit p { margin: 0.4em 0; }
</style>"""


def escape(text: object) -> str:
    """Return text as HTML, quotes included."""
    return html.escape(str(text))


def block(*parts: str) -> str:
    """Return parts as one block, with the style that they need."""
    return f'<div class="eqxjit">{STYLE}{"".join(parts)}</div>'


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; numbers are aligned to the right."""
    rows = [tuple(row) for row in rows]
    is_number = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(headings))]

    def line(tag: str, cells: Sequence[object]) -> str:
        kinds = [' class="number"' if number else "" for number in is_number]
        texts = [_shown(cell) for cell in cells]
        return "".join([f"<{tag}{k}>{t}</{tag}>" for k, t in zip(kinds, texts, strict=True)])

    body = "".join([f"<tr>{line('td', row)}</tr>" for row in rows])
    head = line("th", headings)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _shown(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) else escape(cell)
