"""Tables in HTML, for a light or a dark ground."""

import html
import re
from collections.abc import Iterable, Sequence

# All style is inline, because JupyterLab drops style sheets from notebooks of other origin; it
# drops positions, too.
_CELL = "padding:2px 12px 2px 0;vertical-align:top;border-bottom:1px solid rgba(128,128,128,0.3)"
_NUMBER = re.compile(r"[\d.,e+-]*%?")


def block(*parts: str) -> str:
    style = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.4"
    return f'<div class="eqxjit" style="{style}">{"".join(parts)}</div>'


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table, which scrolls where it is too wide; numbers are aligned to the right."""
    texts = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    rows = [[html.escape(text).replace("\n", "<br>") for text in row] for row in texts]
    are_numbers = [all(map(_NUMBER.fullmatch, column)) for column in zip(*rows, strict=True)]
    aligned = [f"text-align:{'right' if number else 'left'};{_CELL}" for number in are_numbers]

    headings = [html.escape(heading) for heading in headings]

    def line(tag: str, row: Sequence[str]) -> str:
        # The heading is for style sheets of narrow screens, where cells stand below one another.
        return "".join(
            [
                f'<{tag} style="{style}" data-heading="{heading}">{cell}</{tag}>'
                for style, heading, cell in zip(aligned, headings, row, strict=True)
            ]
        )

    body = "".join([f"<tr>{line('td', row)}</tr>" for row in rows])
    head = line("th", headings)
    return (
        '<div style="overflow-x:auto"><table class="eqxjit" '
        'style="border-collapse:collapse;margin:6px 0">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
