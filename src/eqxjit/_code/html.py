"""HTML for notebooks and for pages of their own: tables that suit a light and a dark ground.

JupyterLab drops style sheets, and positions, from notebooks that came from elsewhere. So all style
is inline, and of what it keeps.
"""

import html
from collections.abc import Iterable, Sequence

_CELL = "padding:2px 12px 2px 0;vertical-align:top;border-bottom:1px solid rgba(128,128,128,0.3)"


def escape(text: object) -> str:
    """Return text as HTML, quotes included."""
    return html.escape(str(text))


def block(*parts: str) -> str:
    """Return parts as one block."""
    style = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.4"
    return f'<div class="eqxjit" style="{style}">{"".join(parts)}</div>'


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; numbers are aligned to the right."""
    rows = [tuple(row) for row in rows]
    is_number = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(headings))]

    def line(tag: str, cells: Sequence[object]) -> str:
        aligned = ["right" if number else "left" for number in is_number]
        return "".join(
            [
                f'<{tag} style="text-align:{align};{_CELL}">{_shown(cell)}</{tag}>'
                for align, cell in zip(aligned, cells, strict=True)
            ]
        )

    body = "".join([f"<tr>{line('td', row)}</tr>" for row in rows])
    head = line("th", headings)
    return (
        '<table style="border-collapse:collapse;margin:6px 0">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _shown(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.3g}"
    if isinstance(cell, int):
        return f"{cell:,}"
    return escape(cell).replace("\n", "<br>")
