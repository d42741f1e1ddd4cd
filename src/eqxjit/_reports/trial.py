"""`trial`: whether a program gives Equinox's results, what it gains, and where its time goes."""

import contextlib
import os
import pathlib
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .._deploy.install import install
from .._html import block, page, paragraph, table
from .._places import CallSite
from .._text import counted
from .log import AWAITED, OURS, THEIRS
from .report import show
from .sampler import CALLS, COMPILING, KINDS, MOVING, NO_LINE, OPERATIONS, PYTHON, WAITING
from .swap import Swap
from .tried import Tried

# The time after start-up that gives reliable figures, in seconds.
_MIN_SECONDS = 0.2

_KNOWN = "known difference: "

# At most this many lines are shown for each kind of work, and at most this many other threads. No
# line or kind below this share is shown.
_MAX_LINES, _MIN_SHARE = 3, 0.005

_REMEDIES = {
    OPERATIONS: "call them in a jitted function",
    WAITING: "read results later, or less often",
    MOVING: "move data once, before the loop, or pass NumPy arrays to the jitted function",
}
_NAMES = {
    CALLS: "calls of jitted functions",
    OPERATIONS: "operations of JAX outside of any jit",
    WAITING: "waiting for results",
}


class TrialFunction(NamedTuple):
    """The findings of a trial on one function.

    - `function`: the function's name.
    - `site`: where the function is defined, such as `train.py:6`; `None` if it isn't a Python
        function.
    - `calls`: how often the function was called, not counting calls inside other jitted functions.
    - `seconds_equinox`: the median time of a warm call under Equinox, in seconds, until the call
        returns. Equinox waits for the results. NaN if no call was timed.
    - `seconds_eqxjit`: the same under eqxjit, which may return before the results are there.
    - `seconds_ready`: the median time of a warm call under eqxjit until its results are there.
    - `compared`: how many calls were compared.
    - `differences`: one string per difference, with the path in the output; empty if there is none.
    - `effects`: why no more calls were compared, or none; empty if there is no reason.
    - `is_wrong`: whether results differ by more than rounding, in a way that isn't documented.
    - `rounding`: the largest difference that counts as rounding, relative to the largest number in
        its array; 0 if there is none.
    """

    function: str
    site: CallSite | None
    calls: int
    seconds_equinox: float
    seconds_eqxjit: float
    seconds_ready: float
    compared: int
    differences: list[str]
    effects: str
    is_wrong: bool
    rounding: float

    @property
    def verdict(self) -> str:
        """The outcome of the comparison in a few words."""
        if not self.compared:
            return f"not compared: {self.effects}" if self.effects else "not compared"
        calls = "1 call" if self.compared == 1 else f"{self.compared:,} calls"
        if self.is_wrong:
            found = "DIFFERENT"
        elif self.rounding:
            found = f"equal to {self.rounding:.0e}"
        elif any(text.startswith(_KNOWN) for text in self.differences):
            found = "a known difference"
        elif self.differences:
            found = "equal, but for signs of zeros or bits of NaNs"
        else:
            found = "equal, bit for bit"
        why = f"; no more, because {self.effects}" if self.effects else ""
        return f"{calls} compared: {found}{why}"


class TrialLine(NamedTuple):
    """The time that one line of the user's took for one kind of work.

    - `share`: the part of the steady state, from 0 to 1.
    - `kind`: the kind of work, a key of `Trial.shares`.
    - `line`: the line.
    """

    share: float
    kind: str
    line: CallSite


class Trial:
    """The findings of a trial, complete when the trial has ended. `eqxjit.trial` creates one.

    `str(trial)` is the printed text. A notebook shows the trial as HTML.
    """

    def __init__(self, name: str, compare: bool):
        self._name = name
        self._swap = Swap(compare)

    # --- Figures ------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """The seconds that the program takes under eqxjit, without the trial's own work."""
        return self.seconds_startup + self.seconds_steady

    @property
    def seconds_startup(self) -> float:
        """The part of `seconds` before the first warm call, plus compilations of new code later."""
        return self._swap.startup

    @property
    def seconds_steady(self) -> float:
        """The rest of `seconds`, the steady state."""
        return self._swap.spans.seconds

    @property
    def seconds_steady_equinox(self) -> float:
        """The time of the steady state under Equinox's `filter_jit`; NaN if it wasn't measured."""
        return self.seconds_steady + self._swap.spans.excess

    @property
    def shares(self) -> dict[str, float]:
        """The part of the steady state that each kind of work takes; they sum to 1."""
        shares: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        for line in self.lines:
            shares[line.kind] += line.share
        return shares

    @property
    def lines(self) -> list[TrialLine]:
        """The time of each line of the main thread in the steady state, the largest share first."""
        seconds = self._swap.spans.places
        total = sum(seconds.values())
        if not total:
            return [TrialLine(1.0, PYTHON, NO_LINE)]
        ordered = sorted(seconds.items(), key=lambda item: item[1], reverse=True)
        return [TrialLine(spent / total, kind, line) for (kind, line), spent in ordered if spent]

    @property
    def functions(self) -> list[TrialFunction]:
        """The findings on each function, the most called first."""
        self._swap.count_calls()
        return sorted(map(_row, self._groups()), key=lambda row: row.calls, reverse=True)

    @property
    def is_wrong(self) -> bool:
        """True if a function's results differ by more than rounding, and not as documented."""
        return any(row.is_wrong for row in self.functions)

    def _groups(self) -> Iterable[list[Tried]]:
        """Return the functions of each row of the table."""
        groups: defaultdict[object, list[Tried]] = defaultdict(list)
        for tried in self._swap.functions:
            groups[tried.row].append(tried)
        return groups.values()

    # --- Texts --------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the findings to a file, as a page of HTML.

        **Arguments:**

        - `path`: the file. It must end with `.html`.

        **Raises:**

        - `ValueError`, for another suffix.
        """
        if pathlib.Path(path).suffix.lower() != ".html":
            raise ValueError(f"A trial is saved as .html; the path is {os.fspath(path)!r}.")
        pathlib.Path(path).write_text(page("A trial of eqxjit", self._repr_html_()), "utf-8")

    def _title(self) -> str:
        if not self._swap.is_steady:
            why = "no function under filter_jit was called"
            if self._swap.functions:
                why = "the main thread made no call of a function under filter_jit without "
                why += "compiling, and calls of other threads aren't timed"
            rest = f"of which {_time(self.seconds_steady)} aren't first compilations"
            return f"{self._name}: {_time(self.seconds)}, {rest}; {why}."
        title = f"{self._name}: {_time(self.seconds)}, of which {_time(self.seconds_steady)} after "
        title += "start-up."
        theirs = self.seconds_steady_equinox
        if self.seconds_steady < _MIN_SECONDS:
            title += " That is too short for reliable figures."
        elif theirs == theirs:
            times = theirs / self.seconds_steady
            title += f" Under Equinox's filter_jit about {_time(theirs)}, "
            title += f"{times:.2f} times as long."
        elif self._swap.compares:
            title += " Equinox served too few calls to tell how long it takes under its filter_jit."
        return title

    def _cells(self) -> list[list[str]]:
        """Return the headings and the rows of the table of functions."""
        cells = [["calls", "Equinox", "eqxjit", "until ready", "results", "function"]]
        for row in self.functions:
            seconds = row.seconds_equinox, row.seconds_eqxjit, row.seconds_ready
            where = f"{row.function} ({row.site})" if row.site else row.function
            cells.append([f"{row.calls:,}", *map(_time, seconds), row.verdict, where])
        return cells

    def _differences(self) -> list[str]:
        return [f"{row.function}: {text}" for row in self.functions for text in row.differences]

    def _spent(self) -> list[tuple[str, str, str]]:
        """Return the share of each kind of work, its name, and its lines, followed by a remedy."""
        rows = list[tuple[str, str, str]]()
        all_lines = self.lines
        for kind, share in sorted(self.shares.items(), key=lambda item: -item[1]):
            if share < _MIN_SHARE:
                continue
            least = max(_MIN_SHARE, share / 10)
            lines = [each for each in all_lines if each.kind == kind and each.share >= least]
            shown = [each for each in lines[:_MAX_LINES] if each.line is not NO_LINE]
            text = ", ".join([f"{each.line} ({each.share:.0%})" for each in shown])
            in_calls = self._swap.sampler.waited_in_calls
            is_limited = kind is WAITING and in_calls > share * self.seconds_steady / 2
            # If calls wait for computations, reading the results later doesn't help.
            if kind in _REMEDIES and shown and not is_limited:
                text += f": {_REMEDIES[kind]}"
            if kind is COMPILING:
                text += "".join([f"\n{line}" for line in self._why_traced()])
            rows.append((f"{share:.0%}", _NAMES.get(kind, kind), text))
        return rows

    def _why_traced(self) -> list[str]:
        """Return the most frequent reason of each function that was traced again."""
        lines = list[str]()
        for group in self._groups():
            traces = [trace for tried in group for trace in tried.traces]
            again = Counter([trace.reason for trace in traces if trace.differences])
            for reason, _ in again.most_common(1):
                lines.append(f"{group[0].name}: {counted(len(traces), 'trace')}; {reason}")
        return lines

    def _notes(self) -> list[str]:
        """Return why lines weren't sampled, if so, and what each other thread did most."""
        lines = list[str]()
        sampler = self._swap.sampler
        if sampler.timer.has_yielded and not self._swap.spans.places:
            lines.append("Lines weren't sampled, because the program uses SIGALRM.")
        elif sampler.timer.has_yielded:
            lines.append(
                "Lines were sampled until the program used SIGALRM. The shares are those of the "
                "time before."
            )
        elif not sampler.timer.has_run:
            lines.append(
                "Lines weren't sampled, because that needs the main thread, a system with interval "
                "timers, and no other trial around this one."
            )
        # A program may start a new thread in each step.
        busiest = sorted(sampler.others.items(), key=lambda item: -item[1].total())[:_MAX_LINES]
        for name, samples in busiest:
            [((kind, line), n)] = samples.most_common(1)
            if line is not NO_LINE:
                share = n / samples.total()
                lines.append(f"Thread {name}: {share:.0%} {_NAMES.get(kind, kind)}, {line}")
        return lines

    def __repr__(self) -> str:
        lines = [self._title(), ""]
        if self._swap.functions:
            lines += [*_aligned(self._cells(), 4), *self._differences(), ""]
        if self._swap.spans.places:
            lines.append(f"Where the {_time(self.seconds_steady)} went")
            lines += _aligned(self._spent(), 1)
        return "\n".join([*lines, *self._notes()])

    def _repr_html_(self) -> str:
        headings, *rows = self._cells()
        return block(
            *map(paragraph, (self._title(), *self._differences())),
            table(headings, rows) if rows else "",
            table(("share", "of the time after start-up", "line"), self._spent())
            if self._swap.spans.places
            else "",
            *map(paragraph, self._notes()),
        )


def _row(group: Sequence[Tried]) -> TrialFunction:
    medians = list[float]()
    for mode in (THEIRS, OURS, AWAITED):
        times = [seconds for tried in group for seconds in tried.times[mode]]
        medians.append(statistics.median(times or [float("nan")]))
    unequal = {path: each for tried in group for path, each in tried.unequal.items()}
    known = dict.fromkeys(tried.known for tried in group if tried.known)
    return TrialFunction(
        function=group[0].name,
        site=group[0].site,
        calls=sum(tried.calls for tried in group),
        seconds_equinox=medians[0],
        seconds_eqxjit=medians[1],
        seconds_ready=medians[2],
        compared=sum(tried.compared for tried in group),
        differences=[*map(str, unequal.values()), *[f"{_KNOWN}{each}" for each in known]],
        effects=next((tried.effects for tried in group if tried.effects), ""),
        is_wrong=any(tried.is_wrong for tried in group),
        rounding=max([each.rounding or 0.0 for each in unequal.values()], default=0.0),
    )


def _time(seconds: float) -> str:
    if seconds != seconds:
        return "-"
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _aligned(rows: Iterable[Sequence[str]], n_numbers: int) -> list[str]:
    """Return the lines of a table. The first `n_numbers` columns are aligned at the right."""
    rows = [*rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = list[str]()
    for row in rows:
        cells = [f"{cell:>{n}}" for cell, n in zip(row[:n_numbers], widths, strict=False)]
        cells += [f"{c:<{n}}" for c, n in zip(row[n_numbers:-1], widths[n_numbers:], strict=False)]
        start = "  " + "  ".join(cells) + "  "
        lines.append((start + row[-1].replace("\n", "\n" + " " * len(start))).rstrip())
    return lines


@contextlib.contextmanager
def trial(*, compare: bool = True, print: bool = True) -> Iterator[Trial]:
    """Try eqxjit on what runs inside, and print the findings.

    The findings tell whether jitted functions have the same results under Equinox's `filter_jit`,
    how long calls take there, and which lines take the rest of the time. Inside the context, eqxjit
    is installed, as by `install`. `python -m eqxjit --trial train.py` does the same for a script.

    **Arguments:**

    - `compare`: whether some calls run under Equinox, too. If not, the trial only times calls under
        eqxjit, and samples lines.
    - `print`: whether to print the findings at the end. In a notebook the cell shows them as HTML.

    **Returns:**

    A context manager that yields a `Trial`. Its figures are complete when the context ends.

    !!! example

        ```python
        >>> import jax.numpy as jnp
        >>> import eqxjit
        >>> double = eqxjit.filter_jit(lambda x: 2 * x)
        >>> with eqxjit.trial() as trial:
        ...     for _ in range(5):
        ...         y = double(jnp.ones(3))
        this program: ...
        >>> [row] = trial.functions
        >>> row.calls, row.compared >= 3, row.differences
        (5, True, [])

        ```
    """
    found = Trial("this program", compare)
    try:
        with install(), found._swap.running():
            yield found
    finally:
        if print:
            show(found)


@contextlib.contextmanager
def trial_of_program(name: str, path: str | None, compare: bool) -> Iterator[None]:
    """Try eqxjit on a whole program, and end with status 1 if it has wrong results.

    **Raises:**

    - `OSError`, before the program runs, if no page can be written to `path`.
    """
    found = Trial(name, compare)
    if path is not None:
        found.save(path)
    try:
        with install(), found._swap.running():
            yield
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    finally:
        # However the program ends.
        show(found) if path is None else found.save(path)
    if found.is_wrong:
        sys.exit(1)
