"""`bench shapes`: one function called with several shapes or dtypes, against every competitor.

Three kinds of calls: warm ones of the shape that came first; warm ones of later shapes; and the
first three of each older shape after another was traced. Each row has a process of its own, in
which the competitors take turns. With `EQXJIT_NATIVE=0` eqxjit is generated Python.
"""

from statistics import fmean

from ..harness.environment import record
from ..harness.measure import chosen, effort, options
from ..harness.printing import progress, show
from ..harness.processes import figures_of
from ..models.shape_rows import ROWS

COMPETITORS = ("floor", "jit", "eqx", "eqxjit")


def main(argv: list[str]) -> int:
    """Check that all competitors agree, time them, report and write."""
    args = options("shapes", __doc__, argv, rounds=16)

    rounds, seconds = effort(args)
    best = {
        name: _microseconds(name, rounds, seconds) for name in progress(chosen(ROWS, args), "rows")
    }
    lines = [
        (name, column, *(us[each] for each in COMPETITORS), us["eqxjit"] / us["eqx"])
        for name, columns in best.items()
        for column, us in columns.items()
    ]
    columns = ("row", "shapes", *COMPETITORS, "eqxjit / eqx")
    show("µs per call, best round", columns, lines)
    record("shapes", {"rounds": rounds, "best_us": best}, args)
    return 0


def _microseconds(name: str, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """By column and competitor: the mean, over the shapes, of the best round."""
    figures = figures_of("bench.probes.shapes", name, str(rounds), str(seconds))
    return {
        column: {
            competitor: 1e6 * fmean(min(rounds) for rounds in shapes)
            for competitor, shapes in by_competitor.items()
        }
        for column, by_competitor in figures.items()
    }
