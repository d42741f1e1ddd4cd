"""`bench shapes`: times calls of one function with several shapes or dtypes.

Three kinds of calls are timed: warm calls with the function's first shape, warm calls with later
shapes, and the first three calls with each older shape after a new shape was traced. Each row has a
process of its own, in which the competitors take turns. With `EQXJIT_NATIVE=0`, generated Python is
timed.
"""

from statistics import fmean

from ..harness.environment import record
from ..harness.measure import chosen, options
from ..harness.printing import progress, show
from ..harness.processes import figures_of
from ..models.shape_rows import ROWS

COMPETITORS = ("floor", "jit", "eqx", "eqxjit")


def main(argv: list[str]) -> int:
    """Check that all competitors agree, time them, print the times and write the record."""
    args = options("shapes", __doc__, argv, rounds=16)

    best: dict[str, dict[str, dict[str, float]]] = {}
    for name in progress(chosen(ROWS, args), "rows"):
        figures = figures_of("bench.probes.shapes", name, str(args.rounds), str(args.seconds))
        # For each shape the best round counts. The row shows the mean over the shapes.
        best[name] = {
            column: {way: 1e6 * fmean(map(min, shapes)) for way, shapes in ways.items()}
            for column, ways in figures.items()
        }
    lines = [
        (name, column, *(us[each] for each in COMPETITORS), us["eqxjit"] / us["eqx"])
        for name, columns in best.items()
        for column, us in columns.items()
    ]
    columns = ("row", "shapes", *COMPETITORS, "eqxjit / eqx")
    show("µs per call, best round", columns, lines)
    record("shapes", {"rounds": args.rounds, "best_us": best}, args)
    return 0
