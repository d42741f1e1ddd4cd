"""`compile_report`: one table of everything that was compiled, sorted by cost."""

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
from .._signals import suppressed
from .._text import bytes_text, times
from .operations import Caller, caller_of
from .timeline import ReportSpan, chrome_trace, spans_of
from .tried import comparing

# Operations outside of any jit get a note if there are at least this many.
_MANY_OPERATIONS = 10
# A row names at most this many functions that a line calls, and this many causes of traces.
_MAX_SHOWN = 4
# An operation gets a note if it was compiled for at least this many functions of one code.
_MANY_FUNCTIONS = 3


class ReportRow(NamedTuple):
    """The cost of one function, or of the operations that one line calls outside of any jit.

    - `function`: the function's name. For operations, the names of the functions that were called,
        and the line that calls them, such as `optax.global_norm at train.py:31`.
    - `traces`: how many times the function was traced, or compiled again without a trace.
    - `seconds`: how long tracing, lowering and compiling took, without the time of nested functions
        that have rows of their own.
    - `share`: the row's part of the report's total seconds, from 0 to 1.
    - `persistent_cache_hits`: how many of the function's programs came from JAX's persistent cache.
    - `program`: the function's largest program; `None` for a function that isn't under eqxjit's
        `filter_jit`.
    - `reason`: why the function was traced again: each cause of at least a tenth of the traces,
        with the number of these traces.
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
        """True if JAX's persistent cache is on, and can't hold the row's program."""
        config: Any = jax.config
        is_on = config.jax_enable_compilation_cache and config.jax_compilation_cache_dir
        return bool(is_on and self.program and self.program.calls_python)

    @property
    def notes(self) -> list[str]:
        """Notes on the program's size, its memory and the persistent cache."""
        program = self.program
        if program is None:
            return []
        notes: list[str] = []
        if program.lines:
            lines = "".join([f"\n    {line}" for line in program.lines])
            notes.append(f"{program.equations:,} equations, most of them by{lines}")
        notes += program.notes
        notes += _notes_on_memory(program)
        if self.is_never_cached:
            notes.append(
                "it never comes from JAX's persistent cache, because it calls Python "
                "(`eqx.error_if`, `jax.debug.print`, Diffrax without `throw=False`)."
            )
        return [f"{self.function}: {note}" for note in notes]


def _notes_on_memory(program: Program) -> list[str]:
    """Return notes on large temporary arrays, and on memory that donation would save."""
    if program.memory is None:
        return []
    notes: list[str] = []
    n_bytes = program.memory.temporaries
    # If one array is larger than all temporary arrays together, XLA has fused it away.
    existing = [each for each in program.largest_arrays if each.bytes <= n_bytes * each.number]
    if existing and n_bytes >= MANY_BYTES:
        notes.append(
            f"its temporary arrays take {bytes_text(n_bytes)}. The largest arrays: "
            f"{'; '.join(map(str, existing))}. `jax.checkpoint` keeps fewer of them for a "
            "gradient. Others can be computed block by block (`jax.lax.map` with `batch_size`)."
        )
    saved = program.donation_saves
    if not program.memory.donated and saved >= MANY_BYTES:
        notes.append(
            f"it returns {bytes_text(saved)} of arrays with the shapes of its arguments. If these "
            'arguments aren\'t used again, `filter_jit(donate="all")` saves that much memory.'
        )
    return notes


def _rows(spans: list[ReportSpan]) -> list[ReportRow]:
    """Return a row for each function and each line of operations, the costliest first."""
    groups: dict[Any, list[ReportSpan]] = defaultdict(list)
    for span in spans:
        line = span.called_by if span.operation else None
        groups[span.function if line is None else line[:2]].append(span)
    total_seconds = _total_seconds(spans) or 1.0
    rows = [_row(group, total_seconds) for group in groups.values()]
    return sorted(rows, key=lambda row: row.seconds.total, reverse=True)


def _row(group: list[ReportSpan], total_seconds: float) -> ReportRow:
    """Return the row for the spans of one function, or of one line of operations."""
    seconds = Seconds()
    for span in group:
        spent = getattr(seconds, span.phase) + span.seconds - span.nested_seconds
        setattr(seconds, span.phase, spent)
    traces = _traces_of(group)
    programs = [program for trace in traces if (program := trace.program) is not None]
    # Compilations count, too, because a function of `jax.jit` has no `Trace`, and a program may be
    # compiled again without a trace, for a different device, for example.
    n_traces = max(len(traces), sum([span.phase == COMPILING for span in group]))
    return ReportRow(
        function=_name_of(group),
        traces=n_traces,
        seconds=seconds,
        share=seconds.total / total_seconds,
        persistent_cache_hits=sum([span.from_persistent_cache for span in group]),
        program=max(programs, key=lambda program: program.equations, default=None),
        reason=_reason_of(traces, n_traces),
    )


def _name_of(group: list[ReportSpan]) -> str:
    """Return the name of the row for some spans."""
    first = group[0]
    if not first.operation or first.called_by is None:
        return first.function
    seconds: dict[str, float] = defaultdict(float)
    for span in group:
        seconds[span.operation] += span.seconds
    names = sorted(seconds, key=lambda name: seconds[name], reverse=True)
    shown = names[:_MAX_SHOWN]
    if len(names) > _MAX_SHOWN:
        shown.append("...")
    return f"{', '.join(shown)} at {first.called_by}"


def _reason_of(traces: TraceList, n_traces: int) -> str:
    """Return each cause of at least a tenth of the traces, with the number of these traces."""
    causes = Counter[str]()
    for trace in traces:
        causes.update([*causes_of(trace.differences), *causes_of(trace.recompiled)])
    return "; ".join(
        f"{cause} ({times(n)})" if n > 1 else cause
        for cause, n in causes.most_common(_MAX_SHOWN)
        if n * 10 >= n_traces
    )


def _total_seconds(spans: list[ReportSpan]) -> float:
    """Return the time that all spans took, without counting nested spans twice."""
    return sum([span.seconds for span in spans if span.depth == 0])


def _wall_seconds(spans: list[ReportSpan]) -> float:
    """Return the time in which at least one thread was in a span. Spans are sorted by start."""
    seconds = 0.0
    end_so_far = 0.0
    for span in spans:
        end = span.start + span.seconds
        seconds += max(0.0, end - max(end_so_far, span.start))
        end_so_far = max(end_so_far, end)
    return seconds


def _traces_of(spans: list[ReportSpan]) -> TraceList:
    """Return the traces that the spans belong to, each once."""
    return TraceList(dict.fromkeys(span.trace for span in spans if span.trace is not None))


def _notes(spans: list[ReportSpan], rows: list[ReportRow]) -> list[str]:
    """Return notes on operations outside of any jit, and on functions that stand out."""
    by_line: dict[Any, list[ReportSpan]] = defaultdict(list)
    for span in spans:
        # An operation at a greater depth is part of a function that is traced or lowered.
        if span.depth == 0 and span.called_by and span.operation:
            by_line[span.called_by].append(span)
    notes: list[str] = []
    operations = [span for group in by_line.values() for span in group]
    n = sum([span.phase == COMPILING for span in operations])
    share = _total_seconds(operations) / (_total_seconds(spans) or 1.0)
    if n >= _MANY_OPERATIONS and share >= 0.25:
        line = max(by_line, key=lambda line: _total_seconds(by_line[line]))
        notes.append(
            f"{share:.0%} of the compile time went into {n} operations outside of any jit, most of "
            f"it at {line} (`{line.function}`): call them in a jitted function."
        )
    for line, group in by_line.items():
        notes += _note_on_new_functions(line, group)
    return notes + [note for row in rows for note in row.notes]


def _note_on_new_functions(line: CallSite, group: list[ReportSpan]) -> list[str]:
    """Return a note if a line passes a new function, such as a body, to each call of an operation.

    `group` are the spans of the operations that the line calls.
    """
    # The numbers of the functions of one code that were passed to one operation.
    numbers: dict[Any, set[int]] = defaultdict(set)
    for span in group:
        for code, number in span._functions:
            numbers[span.operation, code].add(number)
    for (operation, code), found in numbers.items():
        if len(found) >= _MANY_FUNCTIONS:
            return [
                f"`{operation}` at {line} is compiled for each call, because each call passes a "
                f"different function object: `{code.co_qualname.rpartition('<locals>.')[2]}` was "
                f"defined {len(found)} times. Define it once, or call `{operation}` in a jitted "
                "function."
            ]
    return []


class CompileReport:
    """The report of what was compiled within a `compile_report`. It is up to date at any time.

    `str(report)` is the table, which a notebook shows as HTML. `report.rows` are the rows, the
    costliest first. `report.spans` is the timeline.
    """

    def __init__(self) -> None:
        # A span for each phase that ended, with the number of its thread, because two threads may
        # have the same name.
        self._events: list[tuple[int, ReportSpan]] = []

    @property
    def rows(self) -> list[ReportRow]:
        """A row for each function, the costliest first."""
        return _rows(self.spans)

    @property
    def total_seconds(self) -> float:
        """The time of all spans, in seconds. The times of several threads are added."""
        return _total_seconds(self.spans)

    @property
    def wall_seconds(self) -> float:
        """The time in which at least one thread was tracing, lowering or compiling, in seconds."""
        return _wall_seconds(self.spans)

    @property
    def notes(self) -> list[str]:
        """Notes on functions that stand out, and on operations outside of any jit."""
        spans = self.spans
        return _notes(spans, _rows(spans))

    @property
    def spans(self) -> list[ReportSpan]:
        """The phases of all functions, in the order in which they began.

        The time that it takes to trace JAX's operations within a function is part of the function's
        span.
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
        """Return the title of the report, the cells of its table with headings first, and notes."""
        spans = self.spans
        rows = _rows(spans)
        if not rows:
            return "Nothing was compiled.", [[]], []
        title = f"In all, {_total_seconds(spans):.3g} s of tracing, lowering and compiling"
        n_threads = len({thread for thread, _ in self._events})
        if n_threads > 1:
            title += f" in {n_threads} threads, {_wall_seconds(spans):.3g} s of wall time"
        by_heading = [_texts_by_heading(row) for row in rows]
        headings = [*by_heading[0]]
        cells = [headings, *[[*texts.values()] for texts in by_heading]]
        return title, cells, _notes(spans, rows)

    def _repr_html_(self) -> str:
        title, (headings, *rows), notes = self._shown()
        return block(f"<p><b>{title}</b></p>", table(headings, rows), *map(paragraph, notes))

    def __repr__(self) -> str:
        title, cells, notes = self._shown()
        lines = [title]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)][1:]
        # The first column is shown last, as in Python's profiles, because its texts may be long.
        for text, *numbers in filter(None, cells):
            line = "".join([f"  {number:>{n}}" for number, n in zip(numbers, widths, strict=True)])
            indent = " " * (len(line) + 4)
            lines.append(f"{line}  {text}".replace("\n", f"\n{indent}"))
        return "\n".join([*lines, *notes])


def _texts_by_heading(row: ReportRow) -> dict[str, str]:
    """Return the text of each cell of a row, by the heading of its column."""
    memory = row.program.memory if row.program else None
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
    """Fill in a report with what JAX does in this context, in any thread."""
    begun = time.perf_counter()

    def observe(function: str, phase: str, seconds: float, from_cache: bool, record: Any) -> None:
        if comparing.nested_mode:
            # A trial traces a function once more. That isn't the program's work.
            return
        start = time.perf_counter() - begun - seconds
        caller = caller_of(function) if record is None else Caller(None)
        span = ReportSpan(
            function=function,
            phase=phase,
            start=start,
            seconds=seconds,
            thread=threading.current_thread().name,
            from_persistent_cache=from_cache,
            trace=None if record is None else Trace(record),
            called_by=caller.line,
            operation=caller.operation,
            _functions=caller.functions,
        )
        report._events.append((threading.get_ident(), span))

    listeners.append(observe)
    try:
        yield report
    finally:
        listeners.remove(observe)


@contextmanager
def compile_report(*, print: bool = True) -> Iterator[CompileReport]:
    """Print one table of everything that is compiled in its context, the costliest function first.

    The table includes `jax.jit` functions and operations of JAX, unless they are traced as a part
    of another function. Operations outside of any jit have one row for each of your lines. The
    seconds of a function leave out functions under `filter_jit` that are traced within its trace,
    because these have rows of their own. The times of several threads are added.

    **Arguments:**

    - `print`: whether to print the table at the end. In a notebook the cell shows it as HTML.

    **Returns:**

    A context manager that yields a `CompileReport`, with `rows`, `spans` and `save`. The report can
    be read at any time.

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
    # IPython isn't imported here, because there is no notebook unless it is imported already.
    ipython = sys.modules.get("IPython")
    if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
        from IPython.display import display

        display(report)
        return
    text = str(report)
    # The program may have closed its standard output, or have replaced it by an object that fails
    # in any way. Then print on the standard error.
    for file in (sys.stdout, sys.__stderr__):
        with suppressed:
            if file is not None:
                print(text, file=file)
                return
