"""Tables in HTML, for a light or a dark ground."""

import html
import re
from collections.abc import Iterable, Sequence

# All style is inline, because JupyterLab drops style sheets from notebooks of other origin; it
# drops positions, too.
_CELL = "padding:2px 12px 2px 0;vertical-align:top;border-bottom:1px solid rgba(128,128,128,0.3)"
_NUMBER = re.compile(r"[\d.,e+-]*(%| [kMG]?B)?")


_PAGE = """<!doctype html>
<meta charset="utf-8"><meta name="color-scheme" content="light dark">
<title>{}</title>{}
"""


def page(title: str, content: str) -> str:
    return _PAGE.format(html.escape(title), content)


def block(*parts: str) -> str:
    style = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.4"
    return f'<div class="eqxjit" style="{style}">{"".join(parts)}</div>'


def paragraph(text: str) -> str:
    return f'<p style="white-space:pre-wrap">{html.escape(text)}</p>'


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table, which scrolls where it is too wide; numbers are aligned to the right."""
    texts = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    are_numbers = [all(map(_NUMBER.fullmatch, column)) for column in zip(*texts, strict=True)]
    styles = [f"text-align:{'right' if number else 'left'};{_CELL}" for number in are_numbers]

    def line(tag: str, row: Sequence[str]) -> str:
        cells = [html.escape(text).replace("\n", "<br>") for text in row]
        parts = [f'<{tag} style="{s}">{c}</{tag}>' for s, c in zip(styles, cells, strict=True)]
        return f"<tr>{''.join(parts)}</tr>"

    return (
        '<div style="overflow-x:auto"><table class="eqxjit" style="border-collapse:collapse;'
        f'margin:6px 0"><thead>{line("th", headings)}</thead><tbody>'
        f"{''.join([line('td', row) for row in texts])}</tbody></table></div>"
    )
