"""Tables in HTML for notebooks and saved reports, readable on a light or a dark background."""

import html
import re
from collections.abc import Iterable, Sequence

# All styles are inline and none uses `position`, because JupyterLab removes style sheets and
# positions from notebooks that it doesn't trust.
_CELL = "padding:2px 12px 2px 0;vertical-align:top;border-bottom:1px solid rgba(128,128,128,0.3)"
# A number with or without a unit, as `bytes_text` writes it, or an empty cell.
_NUMBER = re.compile(r"[\d.,e+-]*(%| [kMG]?B)?")

_PAGE = """<!doctype html>
<meta charset="utf-8"><meta name="color-scheme" content="light dark">
<title>{}</title>{}
"""


def page(title: str, content: str) -> str:
    """Return a whole HTML page with a plain title and HTML content."""
    return _PAGE.format(html.escape(title), content)


def block(*parts: str) -> str:
    """Return HTML parts in one element that sets their font."""
    style = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.4"
    return f'<div class="eqxjit" style="{style}">{"".join(parts)}</div>'


def paragraph(text: str) -> str:
    """Return plain text as a paragraph that keeps the line breaks."""
    return f'<p style="white-space:pre-wrap">{html.escape(text)}</p>'


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table, which scrolls if it is too wide. Columns of numbers are right-aligned."""
    texts = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    columns = [[row[i] for row in texts] for i in range(len(headings))]
    are_numbers = [all(map(_NUMBER.fullmatch, column)) for column in columns]
    styles = [f"text-align:{'right' if number else 'left'};{_CELL}" for number in are_numbers]

    def table_row(tag: str, cells: Sequence[str]) -> str:
        parts: list[str] = []
        for style, text in zip(styles, cells, strict=True):
            content = html.escape(text).replace("\n", "<br>")
            parts.append(f'<{tag} style="{style}">{content}</{tag}>')
        return f"<tr>{''.join(parts)}</tr>"

    head = table_row("th", headings)
    body = "".join([table_row("td", cells) for cells in texts])
    return (
        '<div style="overflow-x:auto"><table class="eqxjit" style="border-collapse:collapse;'
        f'margin:6px 0"><thead>{head}</thead><tbody>{body}</tbody></table></div>'
    )
