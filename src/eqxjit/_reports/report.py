"""`compile_report`: one table of everything that was compiled, sorted by cost."""

import dataclasses
import json
import os
import pathlib
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from .._diagnostics.constants import MANY_BYTES
from .._diagnostics.differences import causes_of
from .._diagnostics.events import listeners
from .._diagnostics.record import COMPILING, Seconds
from .._diagnostics.size import Program
from .._diagnostics.trace import Trace, TraceList
from .._html import block, page, paragraph, table
from .._places import CallSite
from .._text import bytes_text, times
from .operations import Caller, caller_of
from .timeline import ReportSpan, chrome_trace, spans_of

# Fewer operations outside of any jit aren't worth a note.
_MANY_OPERATIONS = 10
# What a row names: functions that a line calls, and causes of traces.
_MAX_SHOWN = 4
# An operation that was compiled so often for another function of one code is worth a note.
_MANY_FUNCTIONS = 3


class ReportRow(NamedTuple):
    """The cost of one function, or of the operations that one line calls outside of any jit.

    - `function`: the function's name. For operations, the functions that the line calls and the
        line, such as `optax.global_norm at train.py:31`.
    - `traces`: how often it was traced, or compiled once more without tracing.
    - `seconds`: how long that took, without what has another row: functions under `filter_jit`
        that were traced meanwhile, and what was compiled meanwhile.
    - `share`: the part of the report's total seconds, from 0 to 1.
    - `persistent_cache_hits`: how many of its programs came from JAX's persistent cache.
    - `program`: its largest program; `None` for a function that isn't under eqxjit's
        `filter_jit`.
    - `reason`: why it was traced again: each cause of a tenth of its traces, and how often.
    """

    function: str
    traces: int
    seconds: Seconds
    share: float
    persistent_cache_hits: int
    program: Program | None
    reason: str

    @property
    def is_never_cached(self) -> bool:
        """True if JAX's persistent cache is on, and never holds that program."""
        config: Any = jax.config
        is_on = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir
        return bool(is_on and self.program and self.program.calls_python)

    @property
    def notes(self) -> list[str]:
        """What to know about the program's size, its memory and the persistent cache."""
        program = self.program
        if program is None:
            return []
        lines = "".join([f"\n    {line}" for line in program.lines])
        notes = [f"{program.equations:,} equations, most of them by{lines}"] if lines else []
        notes += program.notes
        if program.memory is not None:
            n_bytes, saves = program.memory.temporaries, program.donation_saves
            # XLA fuses larger ones away.
            made = [each for each in program.largest_arrays if each.bytes <= n_bytes * each.number]
            arrays = [str(each) for each in made]
            if arrays and n_bytes >= MANY_BYTES:
                notes.append(
                    f"it takes {bytes_text(n_bytes)} of temporaries. The largest arrays: "
                    f"{'; '.join(arrays)}. `jax.checkpoint` keeps fewer for a gradient; others may "
                    "be made block by block (`jax.lax.map` with `batch_size`)."
                )
            if not program.memory.donated and saves >= MANY_BYTES:
                notes.append(
                    f"it returns {bytes_text(saves)} of arrays with the shapes of its arguments: "
                    'where these aren\'t used again, `filter_jit(donate="all")` saves that much.'
                )
        if self.is_never_cached:
            notes.append(
                "it never comes from JAX's persistent cache, because it calls Python "
                "(`eqx.error_if`, `jax.debug.print`, Diffrax without `throw=False`)."
            )
        return [f"{self.function}: {note}" for note in notes]


def _rows(spans: list[ReportSpan]) -> list[ReportRow]:
    """Return a row for each function and each line of operations, the costliest first."""
    groups: dict[Any, list[ReportSpan]] = defaultdict(list)
    for span in spans:
        line = span.called_by if span.operation else None
        groups[span.function if line is None else line[:2]].append(span)
    rows, total_seconds = list[ReportRow](), _total_seconds(spans) or 1.0
    for those in groups.values():
        seconds = Seconds()
        for span in those:
            spent = getattr(seconds, span.phase) + span.seconds - span.nested_seconds
            setattr(seconds, span.phase, spent)
        # A program that is compiled for another device has no trace, nor has JAX's function.
        traces = _traces_of(those)
        programs = [program for trace in traces if (program := trace.program) is not None]
        n_traces = max(len(traces), sum([span.phase == COMPILING for span in those]))
        rows.append(
            ReportRow(
                function=_name_of(those),
                traces=n_traces,
                seconds=seconds,
                share=seconds.total / total_seconds,
                persistent_cache_hits=sum([span.from_persistent_cache for span in those]),
                program=max(programs, key=lambda program: program.equations, default=None),
                reason=_reason_of(traces, n_traces),
            )
        )
    return sorted(rows, key=lambda row: row.seconds.total, reverse=True)


def _name_of(those: list[ReportSpan]) -> str:
    first = those[0]
    if not first.operation or first.called_by is None:
        return first.function
    seconds = Counter[str]()
    for span in those:
        seconds[span.operation] += span.seconds  # type: ignore[assignment]
    names = [name for name, _ in seconds.most_common(_MAX_SHOWN)]
    more = ", ..." * (len(seconds) > _MAX_SHOWN)
    return f"{', '.join(names)}{more} at {first.called_by}"


def _reason_of(traces: TraceList, n_traces: int) -> str:
    """Return each cause of a tenth of the traces, and how often it was one."""
    causes = Counter[str]()
    for trace in traces:
        causes.update([*causes_of(trace.differences), *causes_of(trace.recompiled)])
    return "; ".join(
        f"{cause} ({times(n)})" if n > 1 else cause
        for cause, n in causes.most_common(_MAX_SHOWN)
        if n * 10 >= n_traces
    )


def _total_seconds(spans: list[ReportSpan]) -> float:
    return sum([span.seconds for span in spans if span.depth == 0])


def _wall_seconds(spans: list[ReportSpan]) -> float:
    """Return how long at least one thread was at it."""
    seconds, end = 0.0, 0.0
    for span in spans:
        seconds += max(0.0, span.start + span.seconds - max(end, span.start))
        end = max(end, span.start + span.seconds)
    return seconds


def _traces_of(spans: list[ReportSpan]) -> TraceList:
    return TraceList(dict.fromkeys(span.trace for span in spans if span.trace is not None))


def _notes(spans: list[ReportSpan], rows: list[ReportRow]) -> list[str]:
    """Return remarks on operations outside of any jit, and on functions that stand out."""
    by_line: dict[Any, list[ReportSpan]] = defaultdict(list)
    for span in spans:
        # Phases of one function come one after another.
        if span.depth == 0 and span.called_by and span.operation:
            by_line[span.called_by].append(span)
    notes: list[str] = []
    operations = [span for those in by_line.values() for span in those]
    n = sum([span.phase == COMPILING for span in operations])
    share = _total_seconds(operations) / (_total_seconds(spans) or 1.0)
    if n >= _MANY_OPERATIONS and share >= 0.25:
        line = max(by_line, key=lambda line: _total_seconds(by_line[line]))
        notes.append(
            f"{share:.0%} of the compile time went into {n} operations outside of any jit, most of "
            f"all by {line} (`{line.function}`): call them in a jitted function."
        )
    for line, those in by_line.items():
        notes += _note_on_functions(line, those)
    return notes + [note for row in rows for note in row.notes]


def _note_on_functions(line: CallSite, those: list[ReportSpan]) -> list[str]:
    """Return a note on an operation that is passed a new function each time, such as a body."""
    numbers: dict[Any, set[int]] = defaultdict(set)
    for span in those:
        for code, number in span._functions:
            numbers[span.operation, code].add(number)
    for (operation, code), found in numbers.items():
        if len(found) >= _MANY_FUNCTIONS:
            return [
                f"`{operation}` at {line} is compiled for each call, because each passes a new "
                f"function: `{code.co_qualname.rpartition('<locals>.')[2]}` is another object "
                f"({len(found)} so far). Define it once, or call `{operation}` in a jitted "
                "function."
            ]
    return []


class CompileReport:
    """The report of what was compiled within a `compile_report`; up to date at any time.

    `str(report)` is the table, which a notebook shows as HTML; `report.rows` its rows, the
    costliest first; `report.spans` the timeline.
    """

    def __init__(self) -> None:
        # With the numbers of their threads, of which several may have one name.
        self._events: list[tuple[int, ReportSpan]] = []

    @property
    def rows(self) -> list[ReportRow]:
        """A row for each function, the costliest first."""
        return _rows(self.spans)

    @property
    def total_seconds(self) -> float:
        """The time that everything took, in seconds. Threads add up."""
        return _total_seconds(self.spans)

    @property
    def wall_seconds(self) -> float:
        """The time in which at least one thread was tracing, lowering or compiling, in seconds."""
        return _wall_seconds(self.spans)

    @property
    def notes(self) -> list[str]:
        """Remarks on functions that stand out, and on operations outside of any jit."""
        spans = self.spans
        return _notes(spans, _rows(spans))

    @property
    def spans(self) -> list[ReportSpan]:
        """The phases of all functions, by the time at which they began.

        Tracing JAX's operations within a function is part of that function's span.
        """
        return spans_of([*self._events])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a file, in the format of its suffix.

        **Arguments:**

        - `path`: the file. `.html` gives a page with the table and the reason for each trace;
            `.json` a timeline as a Chrome trace, which Perfetto and `chrome://tracing` open.

        **Raises:**

        - `ValueError`, for another suffix.
        """
        path = pathlib.Path(path)
        if path.suffix.lower() not in (".html", ".json"):
            raise ValueError(f"A report is saved as .html or .json; the path is {str(path)!r}.")
        if path.suffix.lower() == ".json":
            text = json.dumps(chrome_trace(self.spans))
        else:
            traces = _traces_of(self.spans)
            content = self._repr_html_() + (traces._repr_html_() if traces else "")
            text = page("What was compiled", content)
        path.write_text(text, encoding="utf-8")

    def _shown(self) -> tuple[str, list[list[str]], list[str]]:
        """Return a title, the headings and rows of a table, and notes."""
        spans = self.spans
        rows = _rows(spans)
        if not rows:
            return "Nothing was compiled.", [[]], []
        title = f"In all, {_total_seconds(spans):.3g} s of tracing, lowering and compiling"
        n_threads = len({thread for thread, _ in self._events})
        if n_threads > 1:
            title += f" in {n_threads} threads, {_wall_seconds(spans):.3g} s of wall time"
        columns = [_columns(row) for row in rows]
        cells = [[*columns[0]], *[[*each.values()] for each in columns]]
        return title, cells, _notes(spans, rows)

    def _repr_html_(self) -> str:
        title, (headings, *rows), notes = self._shown()
        return block(f"<p><b>{title}</b></p>", table(headings, rows), *map(paragraph, notes))

    def __repr__(self) -> str:
        title, cells, notes = self._shown()
        lines = [title]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)][1:]
        # Texts come last, as in Python's profiles: they may be of any length.
        for text, *numbers in filter(None, cells):
            line = "".join([f"  {number:>{n}}" for number, n in zip(numbers, widths, strict=True)])
            lines.append(f"{line}  {text}".replace("\n", f"\n{'':{len(line) + 4}}"))
        return "\n".join([*lines, *notes])


def _columns(row: ReportRow) -> dict[str, str]:
    """Return the text of each column, by its heading."""
    memory = row.program and row.program.memory
    arguments, outputs, _, temporaries = map(bytes_text, memory) if memory else [""] * 4
    return {
        "function, and why it was traced again": f"{row.function}\n{row.reason}".rstrip(),
        "traces": str(row.traces),
        "trace s": f"{row.seconds.tracing:.3f}",
        "lower s": f"{row.seconds.lowering:.3f}",
        "compile s": f"{row.seconds.compiling:.3f}",
        "share": f"{row.share:.0%}",
        "cached": "never" if row.is_never_cached else str(row.persistent_cache_hits),
        "size": f"{row.program.equations:,}" if row.program else "",
        "arguments": arguments,
        "outputs": outputs,
        "temporary": temporaries,
    }


@contextmanager
def recording(report: CompileReport) -> Iterator[CompileReport]:
    """Fill in a report, without printing it."""
    begun = time.perf_counter()

    def observe(function: str, phase: str, seconds: float, from_cache: bool, record: Any) -> None:
        when, thread = time.perf_counter() - begun - seconds, threading.current_thread().name
        line, operation, functions = caller_of(function) if record is None else Caller(None)
        trace = None if record is None else Trace(record)
        span = ReportSpan(function, phase, when, seconds, thread, from_cache, trace, line)
        span = dataclasses.replace(span, operation=operation, _functions=functions)
        report._events.append((threading.get_ident(), span))

    listeners.append(observe)
    try:
        yield report
    finally:
        listeners.remove(observe)


@contextmanager
def compile_report(*, print: bool = True) -> Iterator[CompileReport]:
    """Print one table of everything that is compiled inside it, the costliest function first.

    It includes nested functions, and also `jax.jit` functions and operations of JAX, unless they
    are traced as part of another function. Operations outside of any jit have one row for each of
    your lines. The seconds of a function leave out functions under `filter_jit` that are traced
    within its trace, because these have rows of theirs. Threads add up.

    **Arguments:**

    - `print`: whether to print the table at the end.

    It yields a `CompileReport`, with `rows`, `spans` and `save`, which can be read at any time. In
    a notebook the cell shows the table as HTML.

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
        if print:
            show(report)


def show(report: Any) -> None:
    """Print a report, or have a notebook show it."""
    # Not imported, because without it there is no notebook.
    ipython = sys.modules.get("IPython")
    if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
        from IPython.display import display

        display(report)
    else:
        print(report)
