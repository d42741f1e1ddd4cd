"""`compile_report`: one table of everything that was compiled, sorted by cost."""

import functools
import html
import json
import os
import pathlib
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from .._places import CallSite, innermost_line
from .._text import times
from .events import listeners
from .html import block, table
from .size import Program
from .timeline import ReportSpan, chrome_trace, spans_of, timeline_html
from .trace import COMPILING, Seconds, TraceList

# The latest.
_MAX_EVENTS = 100_000

# Fewer operations outside of any jit aren't worth a note.
_MANY_OPERATIONS = 10

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<meta name="viewport" content="width=device-width"><title>What was compiled</title>
<style>@media (max-width: 40em) {{
  .eqxjit thead {{ display: none }}
  .eqxjit tr {{ display: block; padding: .5em 0; border-top: 1px solid gray }}
  .eqxjit td {{ display: block; text-align: left !important; border: 0 !important }}
  .eqxjit td:empty {{ display: none }}
  .eqxjit td::before {{ content: attr(data-heading) ": "; opacity: .6 }}
}}</style>
<body style="margin: 1.5em auto; padding: 0 1em; max-width: 1100px">{}
"""


class ReportRow(NamedTuple):
    """The cost of one function.

    - `function`: its name.
    - `traces`: how often it was traced, or compiled once more without tracing.
    - `seconds`: how long that took, without what has another row: functions under `filter_jit`
        that were traced meanwhile, and what was compiled meanwhile.
    - `share`: the part of the report's total seconds, from 0 to 1.
    - `persistent_cache_hits`: how many of its programs came from JAX's persistent cache.
    - `equations`: the size of its largest jaxpr, nested ones included; `None` for a function that
        isn't under eqxjit's `filter_jit`.
    - `busiest_line`: the user's line that made most of those equations, if one stands out.
    - `reason`: the most repeated reason for which it was traced again, and how often.
    """

    function: str
    traces: int
    seconds: Seconds
    share: float
    persistent_cache_hits: int
    program: Program | None
    reason: str


def _row(function: str, spans: list[ReportSpan], total_seconds: float) -> ReportRow:
    seconds = Seconds()
    for span in spans:
        spent = getattr(seconds, span.phase) + span.seconds - span.nested_seconds
        setattr(seconds, span.phase, spent)
    # A program that is compiled for another device has no trace, nor has JAX's function.
    traces = _traces_of(spans)
    largest = max(traces, key=lambda trace: trace.equations or 0, default=None)
    recompiled = [difference for trace in traces for difference in trace.recompiled]
    found = [difference for trace in traces for difference in trace.differences]
    reasons = Counter((each.category, each.path) for each in (*found, *recompiled))
    reason = ""
    for (category, path), count in reasons.most_common(1):
        often = f" ({times(count)})" if count > 1 else ""
        reason = f"{category}{': ' if path else ''}{path}{often}"
    return ReportRow(
        function=function,
        traces=max(len(traces), sum([span.phase == COMPILING for span in spans])),
        seconds=seconds,
        share=seconds.total / total_seconds if total_seconds else 0.0,
        persistent_cache_hits=sum([span.from_persistent_cache for span in spans]),
        program=None if largest is None else largest.program,
        reason=reason,
    )


def _traces_of(spans: list[ReportSpan]) -> TraceList:
    return TraceList(dict.fromkeys(span.trace for span in spans if span.trace is not None))


def check_report_path(path: pathlib.Path) -> None:
    if path.suffix.lower() not in (".html", ".json"):
        raise ValueError(f"A report is saved as .html or .json; the path is {str(path)!r}.")


class CompileReport:
    """The report of what was compiled within a `compile_report`; up to date at any time.

    `str(report)` is the table; `report.rows` its rows, the costliest first; `report.spans` the
    timeline. In a notebook it shows as both.
    """

    def __init__(self) -> None:
        # With the numbers of their threads, of which several may have one name.
        self._events: deque[tuple[int, ReportSpan]] = deque(maxlen=_MAX_EVENTS)

    @property
    def rows(self) -> list[ReportRow]:
        """A row for each function, the costliest first."""
        total = self.total_seconds
        by_function: dict[str, list[ReportSpan]] = defaultdict(list)
        for span in self.spans:
            by_function[span.function].append(span)
        rows = [_row(name, spans, total) for name, spans in by_function.items()]
        return sorted(rows, key=lambda row: row.seconds.total, reverse=True)

    @property
    def total_seconds(self) -> float:
        """The time that everything took, in seconds."""
        return sum([span.seconds - span.nested_seconds for span in self.spans])

    def notes(self) -> list[str]:
        """Return remarks on functions that stand out, and on operations outside of any."""
        return [*self._note_on_operations(), *self._notes_on_functions()]

    def _note_on_operations(self) -> list[str]:
        # Phases of one function come one after another.
        spans = [s for s in self.spans if s.depth == 0 and s.trace is None and s.called_by]
        spans = [span for span in spans if _is_operation(span.function)]
        seconds, total = sum([span.seconds for span in spans]), self.total_seconds
        n = sum([span.phase == COMPILING for span in spans])
        if n < _MANY_OPERATIONS or seconds < total / 4:
            return []
        by_function: dict[tuple[str, str], float] = defaultdict(float)
        by_line: dict[CallSite, float] = defaultdict(float)
        for span in spans:
            assert span.called_by is not None
            site, function = span.called_by
            by_function[site.filename, function] += span.seconds
            by_line[site] += span.seconds
        filename, function = max(by_function, key=by_function.__getitem__)
        lines = [site for site in by_line if site.filename == filename]
        line = max(lines, key=by_line.__getitem__)
        return [
            f"{seconds / total:.0%} of the time went into {n} operations outside of any jit, most "
            f"of it from `{function}` ({line}): call them in a jitted function."
        ]

    def _notes_on_functions(self) -> list[str]:
        return [f"{r.function}: {t}" for r in self.rows if r.program for t in r.program.lines+ r.program.notes]

    @property
    def spans(self) -> list[ReportSpan]:
        """The phases of all functions, by the time at which they began; the latest 100,000.

        Tracing JAX's operations within a function is part of that function's span.
        """
        return spans_of([*self._events])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a file, in the format of its suffix.

        **Arguments:**

        - `path`: the file. `.html` gives a page with the timeline, the table, and the reason for
            each trace; `.json` a Chrome trace, which Perfetto and `chrome://tracing` open.

        **Raises:**

        - `ValueError`, for another suffix.
        """
        path = pathlib.Path(path)
        check_report_path(path)
        if path.suffix.lower() == ".json":
            text = json.dumps(chrome_trace(self.spans))
        else:
            traces = _traces_of(self.spans)
            text = _PAGE.format(self._repr_html_() + (traces._repr_html_() if traces else ""))
        path.write_text(text, encoding="utf-8")

    def _repr_html_(self) -> str:
        rows = self.rows
        if not rows:
            return block("<p>Nothing was compiled.</p>")
        title = f"<p><b>{self.total_seconds:.3g} s of tracing, lowering and compiling</b></p>"
        cells = [(row.function, *_columns(row).values(), row.reason) for row in rows]
        headings = ("function", *_columns(rows[0]), "traced again for")
        notes = "".join([f"<p>{html.escape(note)}</p>" for note in self.notes()])
        return block(title, timeline_html(self.spans), table(headings, cells), notes)

    def __repr__(self) -> str:
        rows = self.rows
        if not rows:
            return "Nothing was compiled."
        cells = [[*_columns(rows[0])], *[[*_columns(row).values()] for row in rows]]
        # With two spaces before each column.
        widths = [2 + max(map(len, column)) for column in zip(*cells, strict=True)]
        headings, *numbers = ["".join(map(str.rjust, row, widths)) for row in cells]
        # Texts come last, as in Python's profiles: they may be of any length.
        lines = [
            f"In all, {self.total_seconds:.3g} s of tracing, lowering and compiling",
            f"{headings}  function, and why it was traced again",
        ]
        for row, text in zip(rows, numbers, strict=True):
            lines.append(f"{text}  {row.function}")
            if row.reason:
                lines.append(f"{'':>{len(text)}}    {row.reason}")
        return "\n".join([*lines, *self.notes()])


def _columns(row: ReportRow) -> dict[str, str]:
    """Return the text of each column of numbers, by its heading."""
    return {
        "traces": str(row.traces),
        "trace s": f"{row.seconds.tracing:.3f}",
        "lower s": f"{row.seconds.lowering:.3f}",
        "compile s": f"{row.seconds.compiling:.3f}",
        "share": f"{row.share:.0%}",
        "cached": str(row.persistent_cache_hits),
        "size": "" if (row.program and row.program.equations) is None else f"{(row.program and row.program.equations):,}",
    }


@functools.cache
def _names_of_operations() -> set[str]:
    modules = (jax.lax, jax.numpy, jax.numpy.linalg, jax.numpy.fft, jax.random, jax.nn)
    return {name for module in modules for name in dir(module)}


def _is_operation(function: str) -> bool:
    """Return whether a function under `jax.jit` is one of JAX's own, by its name."""
    name, names = function.removeprefix("_"), _names_of_operations()
    return name in names or (name != function and name.partition("_")[0] in names)


@contextmanager
def recording(report: CompileReport) -> Iterator[CompileReport]:
    """Fill in a report, without printing it."""
    begun = time.perf_counter()

    def observe(function: str, phase: str, seconds: float, from_cache: bool, record: Any) -> None:
        start = time.perf_counter() - begun - seconds
        thread = threading.current_thread()
        span = ReportSpan(function, phase, start, seconds, thread.name, 0, from_cache, record)
        if record is None:
            span = span._replace(called_by=innermost_line(sys._getframe(1)))
        report._events.append((threading.get_ident(), span))

    listeners.append(observe)
    try:
        yield report
    finally:
        listeners.remove(observe)


@contextmanager
def compile_report() -> Iterator[CompileReport]:
    """Print one table of everything that is compiled inside it, the costliest function first.

    It includes nested functions, and also `jax.jit` functions and operations of JAX, unless they
    are traced as part of another function. The seconds of a function leave out functions under
    `filter_jit` that are traced within its trace, because these have rows of theirs. Threads add
    up.

    It yields a `CompileReport`, with `rows`, `spans` and `save`, which can be read at any time. In
    a notebook the cell shows the table and the timeline as HTML.

    !!! example

        ```python
        >>> import jax.numpy as jnp
        >>> import eqxjit
        >>> @eqxjit.filter_jit
        ... def power(x, n):
        ...     return x**n
        >>> with eqxjit.compile_report() as report:
        ...     _ = power(jnp.ones(2), 3), power(jnp.ones(2), 4), power(jnp.ones(2), 5)
        In all, ... s of tracing, lowering and compiling ...
        >>> [row] = [row for row in report.rows if row.function == "power"]
        >>> row.traces, row.reason
        (3, 'static value changed: n (2 times)')

        ```
    """
    report = CompileReport()
    try:
        with recording(report):
            yield report
    finally:
        ipython = sys.modules.get("IPython")
        if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
            from IPython.display import display

            display(report)
        else:
            print(report)
