"""`trial`: whether a program's results are those of Equinox, what it gains, where time goes."""

import contextlib
import os
import pathlib
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .._deploy.install import install
from .._html import block, page, paragraph, table
from .._places import CallSite
from .report import show
from .sampler import (
    CALLS,
    COMPILING,
    KINDS,
    MOVING,
    NO_LINE,
    OPERATIONS,
    PYTHON,
    WAITING,
    Place,
)
from .swap import AWAITED, OURS, THEIRS, Swap, Tried

# What is shown: lines of each kind, and the least share of a kind.
_MAX_LINES = 3

_HELPS = {
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
    """What a trial found out about one function.

    - `function`: its name.
    - `site`: where it is defined, as `train.py:6`; `None` without a Python function.
    - `calls`: how often it was called outside of any other jitted function.
    - `seconds_equinox`, `seconds_eqxjit`: how long a warm call takes until it returns, the median;
        NaN if it wasn't measured. Equinox's calls return when their results are there.
    - `seconds_ready`: how long one takes under eqxjit until its results are there.
    - `compared`: how many calls were compared.
    - `differences`: a text for each difference, with the path in the output.
    - `effects`: why not more calls were compared; empty without a reason.
    - `is_wrong`: whether results differ by more than rounding, and not as documented.
    - `rounding`: the largest difference within rounding, as a part of an array's largest number.
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
        n = f"{self.compared:,} call{'s' * (self.compared > 1)} compared: "
        if self.is_wrong:
            n += "DIFFERENT"
        elif self.rounding:
            n += f"equal to {self.rounding:.0e}"
        else:
            n += "a known difference" if self.differences else "equal, bit for bit"
        return n + (f" (once, because {self.effects})" if self.effects else "")


class TrialLine(NamedTuple):
    """What one line of the user's took.

    - `share`: its part of the steady state, from 0 to 1.
    - `kind`: a name of `Trial.shares`.
    - `line`: the line.
    """

    share: float
    kind: str
    line: CallSite


class Trial:
    """The findings of a trial, complete when it has ended; made by `eqxjit.trial`.

    `str(trial)` is what it prints, which a notebook shows as HTML.
    """

    def __init__(self, name: str, compare: bool):
        self._name = name
        self._swap = Swap(compare)

    # --- Figures ------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """How long the program takes under eqxjit, without what the trial adds."""
        return self.seconds_startup + self.seconds_steady

    @property
    def seconds_startup(self) -> float:
        """The part of `seconds` before the first warm call, and for first calls after it."""
        return self._swap.startup

    @property
    def seconds_steady(self) -> float:
        """The rest of `seconds`."""
        return sum(self._seconds_of_places().values())

    @property
    def seconds_steady_equinox(self) -> float:
        """How long the steady state takes under Equinox's `filter_jit`; NaN if not measured."""
        swap = self._swap
        rows = self.functions
        if not swap.n_served[THEIRS] or not any(row.seconds_equinox > 0 for row in rows):
            return float("nan")
        spent = self._seconds_of_places()
        rest = sum(s for (kind, _), s in spent.items() if kind not in (CALLS, WAITING))
        # The mean call, weighted by how often each function is called. A function that Equinox
        # didn't serve takes as long as it does.
        seconds = n_calls = 0.0
        for tried in swap.tried.values():
            times = tried.times[THEIRS] or tried.times[OURS]
            if times:
                seconds += tried.calls * _trimmed_mean(times)
                n_calls += tried.calls
        waiting = swap.sampler.waiting_elsewhere[THEIRS] / swap.n_served[THEIRS]
        return rest + swap.n_served.total() * (seconds / n_calls + waiting)

    def _seconds_of_places(self) -> dict[Place, float]:
        """Return the seconds of the steady state for each kind of work and line."""
        swap = self._swap
        sampler = swap.sampler
        seconds = {place: max(0.0, spent) for place, spent in sampler.seconds.items()}
        sampled = sum(seconds.values()) + sum(sampler.waiting_elsewhere.values())
        total = max(0.0, swap.seconds - swap.startup)
        if not sampled:
            return {(PYTHON, NO_LINE): total}
        # Neither calls that weren't served as usual, nor waiting for their results, are among these
        # seconds.
        n_usual = swap.n_served[OURS]
        for_all_calls = swap.n_served.total() / n_usual if n_usual else 1.0
        scale = total / sampled
        return {
            (kind, line): spent * scale * (for_all_calls if kind in (CALLS, WAITING) else 1.0)
            for (kind, line), spent in seconds.items()
        }

    @property
    def shares(self) -> dict[str, float]:
        """The part of the steady state that each kind of work takes; they sum to 1."""
        shares = dict.fromkeys(KINDS, 0.0)
        for line in self.lines:
            shares[line.kind] += line.share
        return shares

    @property
    def lines(self) -> list[TrialLine]:
        """What each line of the main thread took in the steady state, the largest share first."""
        seconds = self._seconds_of_places()
        total = sum(seconds.values())
        if not total:
            return [TrialLine(1.0, PYTHON, NO_LINE)]
        ordered = sorted(seconds.items(), key=lambda item: item[1], reverse=True)
        return [TrialLine(spent / total, kind, line) for (kind, line), spent in ordered if spent]

    @property
    def functions(self) -> list[TrialFunction]:
        """What was found out about each function, the most called first."""
        rows = [_row(tried) for tried in self._swap.tried.values()]
        return sorted(rows, key=lambda row: row.calls, reverse=True)

    @property
    def is_wrong(self) -> bool:
        """Whether results differ from Equinox's by more than rounding, and not as documented."""
        return any(row.is_wrong for row in self.functions)

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
        title = f"{self._name}: {_time(self.seconds)}, of which {_time(self.seconds_steady)} after "
        title += "start-up."
        if not self._swap.is_steady:
            title += " No function under filter_jit was called again after its first call."
        theirs = self.seconds_steady_equinox
        if theirs == theirs:
            times = theirs / (self.seconds_steady or 1.0)
            title += f" Under Equinox's filter_jit {_time(theirs)}, {times:.2g} times as long."
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
        """Return the share of each kind of work, its name, and its lines with what helps."""
        by_kind: dict[str, list[TrialLine]] = {kind: [] for kind in KINDS}
        for each in self.lines:
            by_kind[each.kind].append(each)
        rows = list[tuple[str, str, str]]()
        for kind, share in sorted(self.shares.items(), key=lambda item: -item[1]):
            if share < 0.005:
                continue
            lines = [each for each in by_kind[kind] if each.share >= share / 10][:_MAX_LINES]
            text = ", ".join(
                [f"{each.line} ({each.share:.0%})" for each in lines if each.line.line]
            )
            text += f": {_HELPS[kind]}" if kind in _HELPS else ""
            if kind is COMPILING:
                text += "".join([f"\n{line}" for line in self._why_traced()])
            rows.append((f"{share:.0%}", _NAMES.get(kind, kind), text))
        return rows

    def _why_traced(self) -> list[str]:
        """Return why functions were traced again, the most frequent reason of each."""
        lines = list[str]()
        for tried in self._swap.tried.values():
            again = Counter([trace.reason for trace in tried.traces[1:]])
            for reason, _ in again.most_common(1):
                lines.append(f"{tried.name}: {len(tried.traces)} traces; {reason}")
        return lines

    def _threads(self) -> list[str]:
        """Return what each other thread did that did anything, and whether lines were sampled."""
        lines = list[str]()
        if self._swap.sampler.timer.has_yielded:
            lines.append(
                "Lines are sampled only until the program uses SIGALRM: the shares are of the time "
                "before, and all is Python where there is none."
            )
        for name, samples in self._swap.sampler.others.items():
            [((kind, line), n)] = samples.most_common(1)
            if line.line:
                share = n / samples.total()
                lines.append(f"Thread {name}: {share:.0%} {_NAMES.get(kind, kind)}, {line}")
        return lines

    def __repr__(self) -> str:
        lines = [self._title(), ""]
        if self._swap.tried:
            lines += [*_aligned(self._cells(), 4), *self._differences(), ""]
        lines.append(f"Where the {_time(self.seconds_steady)} went")
        return "\n".join([*lines, *_aligned(self._spent(), 1), *self._threads()])

    def _repr_html_(self) -> str:
        headings, *rows = self._cells()
        return block(
            *map(paragraph, (self._title(), *self._differences())),
            table(headings, rows) if rows else "",
            table(("share", "of the time after start-up", "line"), self._spent()),
            *map(paragraph, self._threads()),
        )


def _row(tried: Tried) -> TrialFunction:
    medians = [
        statistics.median(tried.times[mode] or [float("nan")])
        for mode in (THEIRS, OURS, AWAITED)
    ]
    differences = [str(each) for each in tried.unequal.values()]
    if tried.known and tried.known != tried.effects:
        differences.append(f"known difference: {tried.known}")
    rounding = max([each.rounding or 0.0 for each in tried.unequal.values()], default=0.0)
    return TrialFunction(
        function=tried.name,
        site=tried.site,
        calls=tried.calls,
        seconds_equinox=medians[0],
        seconds_eqxjit=medians[1],
        seconds_ready=medians[2],
        compared=tried.compared,
        differences=differences,
        effects=tried.effects,
        is_wrong=tried.is_wrong,
        rounding=rounding,
    )


def _trimmed_mean(seconds: Iterable[float]) -> float:
    """Return the mean without a tenth at each end: other programs may have used the CPU there."""
    ordered = sorted(seconds)
    n_outer = len(ordered) // 10
    return statistics.fmean(ordered[n_outer : len(ordered) - n_outer])


def _time(seconds: float) -> str:
    if seconds != seconds:
        return "-"
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _aligned(rows: Iterable[Sequence[str]], n_numbers: int) -> list[str]:
    """Return the lines of a table, whose first columns are numbers."""
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
def trying(found: Trial) -> Iterator[Trial]:
    """Fill in the findings of a trial, without printing them."""
    with install(), found._swap.running():
        yield found


@contextlib.contextmanager
def trial(*, compare: bool = True) -> Iterator[Trial]:
    """Try eqxjit on what runs inside, and print the findings.

    They are: whether the results of jitted functions are those of Equinox's `filter_jit`, how much
    longer calls take there, and which lines take the rest of the time. Meanwhile eqxjit is
    installed, as by `install`. `python -m eqxjit --trial train.py` does the same for a script.

    **Arguments:**

    - `compare`: whether some calls run under Equinox, too. Otherwise lines are sampled only.

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
        with trying(found):
            yield found
    finally:
        show(found)


@contextlib.contextmanager
def trial_of_program(name: str, path: str | None, compare: bool) -> Iterator[None]:
    """Try eqxjit on a whole program, and end with status 1 if it has wrong results."""
    found = Trial(name, compare)
    try:
        with trying(found):
            yield
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    finally:
        # However the program ends.
        print(found) if path is None else found.save(path)
    if found.is_wrong:
        sys.exit(1)
