"""`bench figures`: writes the recorded figures into README, the pages and the pictures.

Figures are written between `<!-- figures: NAME ARGUMENTS -->` and `<!-- end -->`: as a block of its
own if the first comment begins a line, and otherwise as a part of the sentence.
"""

import argparse
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from ..harness.records import RECORDS, RESULTS, ROOT, Times, group, mean_ratio, ratios, record, rows
from .pictures import PICTURES

LABELS = {
    "eqx": "Equinox",
    "eqxjit": "eqxjit",
    "floor": "floor",
    "jit": "`jax.jit` on trees",
    "asarray": "eqxjit, `jnp.asarray` first",
    "packed": "packed",
}
# The workloads of `bench calls` that README and pages show.
SHOWN = {
    "Identity": "`eqx.nn.Identity`",
    "MLP 32": "MLP forward",
    "GRUCell": "GRU step",
    "MLP + adam, donated": "MLP + adam step, donated",
    "transformer": "transformer forward, 12 blocks",
    "1,000 leaves in": "a tree of 1,000 arrays, passed",
}
_PLACE = re.compile(r"(<!-- figures: (.*?) -->).*?(<!-- end -->)", re.DOTALL)


def main(argv: list[str]) -> int:
    """Write all files that differ from the records, or list them, or list outdated records."""
    parser = argparse.ArgumentParser(prog="python -m bench figures", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing, but list the files that differ"
    )
    parser.add_argument(
        "--stale",
        action="store_true",
        help="list the records that are older than the code they measure",
    )
    args = parser.parse_args(argv)
    if args.stale:
        found = [line for name in RECORDS if (line := stale(name))]
    else:
        texts = written()
        found = [path for path, text in texts.items() if text != _text(path)]
        if not args.check:
            for path in found:
                path.write_text(texts[path])
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found) and (args.check or args.stale))


def written() -> dict[Path, str]:
    """Return the text that each file with figures should have."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").glob("*.md"))]
    return {page: rendered(page.read_text()) for page in pages} | {
        RESULTS / f"{name}.svg": draw() for name, draw in PICTURES.items()
    }


def rendered(text: str) -> str:
    """Return a text with the recorded figures in each place for figures."""

    def place(match: re.Match[str]) -> str:
        start, end = match.span()
        opening, name, closing = match.groups()
        what, *arguments = shlex.split(name)
        is_block = text[:start].endswith("\n") or not start
        if is_block and text[end : end + 1] != "\n":
            # Markdown takes a line that begins with a comment for HTML.
            raise SystemExit(f"`{name}` begins a line of a sentence. Break the line elsewhere.")
        around = "\n\n" if is_block else ""
        return f"{opening}{around}{FIGURES[what](*arguments)}{around}{closing}"

    return _PLACE.sub(place, text)


def stale(name: str) -> str | None:
    """Return why a record is outdated; `None` if it isn't.

    It is outdated if eqxjit or the record's command was changed after the recorded commit.
    """
    commit = record(name).get("commit", "")
    paths = ("src/eqxjit", f"bench/commands/{name}.py")
    last = _git("log", "-1", "--format=%h", "--", *paths).stdout.strip()
    if not commit:
        return f"{name}: measured at an unknown commit"
    if commit.endswith("+"):
        return f"{name}: measured with sources that differ from commit {commit[:-1]}"
    # Git fails, too, if the commit no longer exists.
    if _git("merge-base", "--is-ancestor", last, commit).returncode:
        return f"{name}: measured at {commit}, before {last}"
    return None


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)


def _text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def us(of: str, row: str, way: str) -> str:
    """Return the microseconds of one way in a row of a record."""
    return _us(rows(of)[row].get(way))


def times(of: str, row: str, way: str, other: str) -> str:
    """Return the time of one way in a row, divided by that of another way."""
    return _ratio(rows(of)[row][way] / rows(of)[row][other])


def between(name: str, way: str, other: str) -> str:
    """Return the least and the greatest ratio of two ways in a group of workloads."""
    return _span(ratios(group(name), way, other), ".2f")


def faster(of: str, way: str, platform: str = "cpu") -> str:
    """Return how many times as fast as Equinox a way is, from the least to the most.

    `of` is a record, or a group of workloads of `bench calls`.
    """
    found = rows(of, platform) if of in RECORDS else group(of, platform=platform)
    return _span(ratios(found, "eqx", way), ".1f")


def share() -> str:
    """Return eqxjit's share of the cost of a call under Equinox, in words, rounded up."""
    words = {0.2: "a fifth", 0.25: "a quarter", 0.34: "a third", 0.5: "half"}
    mean = mean_ratio(group("small"), "eqxjit", "eqx")
    return next(word for limit, word in words.items() if mean <= limit)


def leaf(direction: str) -> str:
    """Return the floor's microseconds for each array that is passed or returned.

    `direction` is "in" for passed arrays and "out" for returned arrays.
    """
    passed, returned = (rows("calls")[f"1,000 leaves {way}"] for way in ("in", "in and out"))
    total = passed["floor"] if direction == "in" else returned["floor"] - passed["floor"]
    return _ratio(total / 1_000)


def statics() -> str:
    """Return the range and the median of the ratios of `bench statics` to Equinox."""
    found = ratios(rows("statics"), "eqxjit", "eqx")
    return f"{_span(found, '.2f')}, {_ratio(median(found))} in the middle"


def facts(name: str, platform: str = "cpu") -> str:
    """Return the machine, the versions and the commit of a record."""
    found = record(name, platform)
    machine, versions = found["machine"], found["versions"]
    devices = [f"{device}, " for device in dict.fromkeys(machine["devices"]) if device != "cpu"]
    return (
        f"{''.join(devices)}{machine['logical_cpus']} cores ({machine['processor']}), "
        f"Python {versions['python']}, JAX {versions['jax']}, Equinox {versions['equinox']}, "
        f"eqxjit at commit {found.get('commit', 'unknown')}"
    )


def rounds(name: str, platform: str = "cpu") -> str:
    """Return the number of rounds of a record."""
    return str(record(name, platform)["rounds"])


def n_workloads(platform: str = "cpu") -> str:
    """Return the number of workloads in the record of `bench calls`."""
    return str(len(rows("calls", platform)))


def means_table(platform: str = "cpu") -> str:
    """Tabulate the geometric means over workloads, of the native back end and in Python."""
    others = {"floor": "the floor", "jit": "`jax.jit` on trees", "eqx": "`equinox.filter_jit`"}
    groups = {workload["group"] for workload in record("calls", platform)["workloads"].values()}
    # "all" leaves out workloads that spend their time outside of the wrapper: in a library's Python
    # code, in waiting, or in JAX's transformations.
    kinds = {
        "small models": {"small"},
        "all": groups - {"library", "numpy", "eager"},
        "libraries": {"library"} & groups,
    }
    lines = [
        (
            f"{name}, {which}",
            *(
                _ratio(mean_ratio(group(*kind, platform=platform), way, to))
                for way in ("eqxjit", "python")
            ),
        )
        for to, name in others.items()
        for which, kind in kinds.items()
        if kind
    ]
    return _table(("as a multiple of", "native", "in Python"), lines)


def group_table(name: str, *ways: str) -> str:
    """Tabulate the times of a group of workloads: these ways, or Equinox, eqxjit and the floor."""
    return _times_table("µs per call", group(name), *ways)


def gpu_table(name: str) -> str:
    """Tabulate rows of `bench calls` or `bench training` on a GPU, beside those on a CPU."""
    ways = ("eqx", "eqxjit", "packed" if name == "training" else "floor")
    there, here = rows(name, "gpu"), rows(name)
    shown = SHOWN if name == "calls" else {row: row for row in there}
    lines = [
        (label, *(_us(times[row][way]) for times in (there, here) for way in ways))
        for row, label in shown.items()
        if row in there and row in here
    ]
    columns = (f"{LABELS[way]}, {side}" for side in ("GPU", "CPU") for way in ways)
    return _table(("µs", *columns), lines)


def shapes_table() -> str:
    """Tabulate the ratios of `bench shapes` to Equinox."""
    columns = {"first": "first shape", "later": "later ones", "older": "older, after a trace"}
    lines = [
        (name, *(_ratio(row[column]["eqxjit"] / row[column]["eqx"]) for column in columns))
        for name, row in record("shapes")["best_us"].items()
    ]
    return _table(("as a multiple of Equinox", *columns.values()), lines)


def training_table() -> str:
    """Tabulate the times of training steps."""
    tasks = record("training")["tasks"].items()
    found = {f"{name}: {task['arrays']} arrays": task["us"] for name, task in tasks}
    return _times_table("µs a step", found, "eqx", "eqxjit", "packed")


def packing_table() -> str:
    """Tabulate packed steps compared with the floor, scanned steps, and first calls."""
    lines = []
    for name, task in record("training")["tasks"].items():
        us, first = task["us"], task["first_call_s"]
        first_call = _ratio(first["packed"] / first["eqxjit"])
        lines.append((name, _ratio(us["packed"] / us["floor"]), _us(us["scan"]), first_call))
    columns = ("", "packed / floor", "ten steps a call, µs a step", "first call, packed / not")
    return _table(columns, lines)


def latency_table() -> str:
    """Tabulate p50 and p99 of calls of three models."""
    models = record("latency")["models"]
    names = ("MLP", "CNN", "transformer")
    lines = [
        (way, *("{:.1f} / {:.0f}".format(*models[name]["us"][way]) for name in names))
        for way in models["MLP"]["us"]
    ]
    return _table(("p50 / p99, µs", *names), lines)


def serving_table() -> str:
    """Tabulate calls a second and percentiles, for each load on a server."""
    lines = [
        (
            f"{load}: {LABELS[way]}",
            f"{found['calls_a_second'][way]:,}",
            *map(_us, found["us"][way]),
        )
        for load, found in record("serving")["loads"].items()
        for way in ("eqx", "eqxjit", "floor")
    ]
    return _table(("", "calls a second", "p50, µs", "p99, µs", "p99.9, µs"), lines)


def ways_table() -> str:
    """Tabulate the seconds until two functions have been called, for each way to start."""
    models = record("startup")["ways"]
    lines = [
        (way, *(f"{ways[way]['until both are called']:.2f}" for ways in models.values()))
        for way in next(iter(models.values()))
    ]
    return _table(("seconds", *models), lines)


def first_calls_table() -> str:
    """Tabulate the times of imports, first calls, new shapes and traces of nested calls."""
    found = {
        f"{probe}: {figure}": {way: 1e3 * seconds for way, seconds in best.items()}
        for probe, figures in record("startup")["probes"].items()
        for figure, best in figures.items()
    }
    return _times_table("milliseconds", found, "eqx", "eqxjit")


def downstream_table() -> str:
    """Tabulate the outcomes of packages built on Equinox."""
    lines = []
    for name, row in record("downstream")["packages"].items():
        version = record("downstream")["installed"].get(name)
        label = f"{name} {version}" if version else f"Equinox's example: {name.replace('_', ' ')}"
        outcomes = "the same" if row["same"] else "**they differ**"
        lines.append((label, str(row["calls"]), str(row["calls_left"]), outcomes))
    return _table(("", "calls", "left to Equinox", "outcomes"), lines)


def installed(name: str) -> str:
    """Return the version of a package that `bench downstream` installed."""
    return record("downstream")["installed"][name]


FIGURES: dict[str, Callable[..., str]] = {
    figure.__name__.replace("_", "-"): figure
    for figure in (
        us,
        times,
        between,
        faster,
        share,
        leaf,
        statics,
        facts,
        rounds,
        n_workloads,
        installed,
        means_table,
        group_table,
        gpu_table,
        shapes_table,
        training_table,
        packing_table,
        latency_table,
        serving_table,
        ways_table,
        first_calls_table,
        downstream_table,
    )
}


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    every = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in every).replace("|  |", "| |")


def _times_table(unit: str, times: Mapping[str, Times], *ways: str) -> str:
    """Tabulate rows of times: these ways, or Equinox, eqxjit and the floor."""
    ways = ways or ("eqx", "eqxjit", "floor")
    lines = [(row, *(_us(found.get(way)) for way in ways)) for row, found in times.items()]
    return _table((unit, *(LABELS[way] for way in ways)), lines)


def _span(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def _us(microseconds: float | None) -> str:
    if microseconds is None:
        return "-"
    return f"{microseconds:,.{0 if microseconds >= 100 else 1}f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}"
