"""The timeline of a report: its spans, the files that it is saved as, and what notebooks show."""

import html.parser
import json
import re
import sys
import threading
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxjit
from eqxjit._diagnostics import report as report_module
from eqxjit._diagnostics import timeline
from eqxjit._diagnostics.html import table as html_table

X = jnp.arange(3.0)


@eqxjit.filter_jit
def inner(x):
    return jnp.sin(x)


@eqxjit.filter_jit
def outer(x, n):
    return inner(x) * n


@pytest.fixture(scope="module")
def report():
    outer.clear_cache(), inner.clear_cache()
    with eqxjit.compile_report() as made:
        for n in (1, 2, 2):
            outer(X, n)
        thread = threading.Thread(target=outer, args=(jnp.ones(2), 2), name="loader")
        thread.start()
        thread.join()
    return made


def spans_of(report, function):
    """Those of complete traces: where a warm call meets a new shape, JAX begins one in vain."""
    return [span for span in report.spans if span.function == function and span.trace]


def test_each_phase_is_a_span(report):
    phases = ["tracing", "lowering", "compiling"]
    assert [span.phase for span in spans_of(report, "outer")] == phases * 3
    assert [span.thread for span in spans_of(report, "outer")] == ["MainThread"] * 6 + [
        "loader"
    ] * 3
    starts = [span.start for span in report.spans]
    assert starts == sorted(starts)
    for span in spans_of(report, "outer"):
        assert span.depth == 0
        assert span.seconds > 0
        is_cached = span.phase == "compiling" and span.trace.from_persistent_cache
        assert span.from_persistent_cache == is_cached
    own = [span.seconds for span in spans_of(report, "outer") if span.phase == "compiling"]
    [row] = [row for row in report.rows if row.function == "outer"]
    assert sum(own) == pytest.approx(row.seconds.compiling, rel=0.2)


def test_what_is_traced_within_another_is_nested(report):
    traced = [span for span in spans_of(report, "outer") if span.phase == "tracing"]
    nested = spans_of(report, "inner")
    # The second `outer` finds what the first has traced.
    assert [span.phase for span in nested] == ["tracing"] * 2
    for span, around in zip(nested, (traced[0], traced[2]), strict=True):
        assert span.depth == 1
        assert around.start <= span.start
        assert span.start + span.seconds <= around.start + around.seconds


def test_a_span_has_its_trace(report):
    for number, trace in enumerate(outer.traces()):
        spans = spans_of(report, "outer")[3 * number : 3 * number + 3]
        assert all(span.trace is trace for span in spans)
    assert spans_of(report, "outer")[3].reason == "static value changed: `n` was 1, is 2"
    with eqxjit.compile_report() as other:
        jax.jit(lambda x: x + 3)(X)
    assert [span.trace for span in other.spans] == [None] * len(other.spans)
    assert other.spans[0].reason == ""


def test_what_a_callback_compiles_is_no_part_of_the_callers_trace():
    """A CPU may run it in the thread that calls."""

    def doubled(x):
        return x * 2

    def host(x):
        return np.asarray(jax.jit(doubled)(np.ones(3)))

    f = eqxjit.filter_jit(lambda x: jax.pure_callback(host, x, x))
    with eqxjit.compile_report() as made:
        f(X)
    spans = [span for span in made.spans if span.function == "doubled"]
    assert len(spans) == 3
    assert {span.trace for span in spans} == {None}


def test_a_trace_that_failed_is_no_part_of_the_next():
    fails = True

    @eqxjit.filter_jit
    def failing(x):
        if fails:
            raise ZeroDivisionError
        return x

    with eqxjit.compile_report() as made:
        with pytest.raises(ZeroDivisionError):
            failing(X)
        fails = False
        failing(X)
    name = failing.traces()[0].function
    traces = [span.trace for span in made.spans if span.function == name]
    assert traces == [None, *failing.traces() * 3]


def test_a_chrome_trace(report, tmp_path):
    path = tmp_path / "report.json"
    report.save(path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(report.spans)
    assert {event["pid"] for event in events} == {events[0]["pid"]}
    for event, span in zip(complete, report.spans, strict=True):
        assert event["name"] == f"{span.function} ({span.phase})"
        assert names[event["tid"]] == span.thread
        assert event["ts"] == pytest.approx(span.start * 1e6)
        assert event["dur"] == pytest.approx(span.seconds * 1e6)
    [again] = [e for e in complete if e["args"].get("trace") == 2 and e["cat"] == "lowering"]
    assert again["args"]["reason"] == "static value changed: `n` was 1, is 2"
    assert re.search(r"test_timeline\.py:\d+$", again["args"]["call_site"])


class Page(html.parser.HTMLParser):
    """The texts, and the titles of elements, of a page whose tags must match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.titles, self.left = [], set(), [], []
        self.text, self.cursor = "", 0.0
        self.feed(text)
        self.close()
        assert [tag for tag in self.open if tag not in ("html", "body")] == []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        attributes = dict(attrs)
        style = attributes.get("style", "")
        if style.startswith("clear"):
            self.cursor = 0.0
        if attributes.get("class") == "bar":
            self.titles.append(attributes["title"])
            place = re.match(r"margin-left:([\d.]+)%;width:([\d.]+)%", style)
            margin, width = map(float, place.groups())
            self.left.append((self.cursor + margin, width))
            self.cursor += margin + width
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("html", "body"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_a_page(report, tmp_path):
    path = tmp_path / "report.HTML"
    report.save(str(path))
    page = Page(path.read_text(encoding="utf-8"))
    titles = [title for title in page.titles if title.startswith("outer: ") and "trace " in title]
    assert len(titles) == 9
    assert "trace 2: static value changed: `n` was 1, is 2" in titles[3]
    assert "jnp.asarray(n, dtype=jnp.int32)" in page.text
    assert "loader" in page.text
    assert all(0 <= left <= 100 and left + width <= 100 for left, width in page.left)
    # Nothing is fetched from elsewhere, nor run.
    assert not page.seen & {"script", "link", "img", "iframe", "style"}
    assert "http" not in path.read_text(encoding="utf-8")


def test_names_are_escaped():
    def fun(x):
        return x

    fun.__name__ = fun.__qualname__ = "<script>alert('&')</script>"
    with eqxjit.compile_report() as made:
        f = eqxjit.filter_jit(fun)
        f(X)
    for text in (made._repr_html_(), f.traces()._repr_html_()):
        page = Page(text)
        assert "script" not in page.seen
        assert "<script>alert('&')</script>" in page.text


def span(start, seconds, thread="a", depth=0):
    return eqxjit.types.ReportSpan("f", "tracing", start, seconds, thread, depth, False, None)


def test_long_gaps_are_cut():
    page = Page(
        timeline.timeline_html([span(0, 1), span(1.01, 1), span(3600, 2), span(3600.5, 1, depth=1)])
    )
    [gap] = [title for title in page.titles if "without" in title]
    assert gap.startswith("3.6e+03 s")
    [first, second, cut, third, nested] = page.left
    assert cut[1] < 5
    assert first[0] == 0
    assert first[1] == pytest.approx(second[1]) == pytest.approx(third[1] / 2, rel=0.01)
    assert third[0] + third[1] == pytest.approx(100, abs=0.01)
    assert third[0] < nested[0] < 100


def test_only_the_longest_are_shown(monkeypatch):
    monkeypatch.setattr(timeline, "_MAX_SHOWN", 2)
    text = timeline.timeline_html([span(0, 1), span(1, 3), span(4, 2)])
    assert "The 2 longest of 3 spans." in text
    assert Page(text).titles == ["f: tracing, 3 s, begun at 1 s", "f: tracing, 2 s, begun at 4 s"]


def test_the_latest_events_are_remembered(monkeypatch):
    monkeypatch.setattr(report_module, "_MAX_EVENTS", 2)
    with eqxjit.compile_report() as recorder:
        for name in "abc":
            eqxjit.filter_jit(lambda x, n=name: x * ord(n))(X)
    assert [each.phase for each in recorder.spans] == ["lowering", "compiling"]


def test_other_formats_are_refused(report, tmp_path):
    with pytest.raises(ValueError, match=r"saved as \.html or \.json; the path is 'report\.txt'"):
        report.save("report.txt")


def test_tables_in_a_notebook(report):
    page = Page(outer.traces()._repr_html_())
    assert "shape: `x` was float32[3], is float32[2]" in page.text
    assert page.text.count("outer") == 3
    assert isinstance(outer.traces(), list)
    assert "Nothing was traced" in eqxjit.filter_jit(lambda x: x).traces()._repr_html_()
    with eqxjit.compile_report() as empty:
        pass
    assert "Nothing was compiled" in empty._repr_html_()


def test_numbers_are_aligned_to_the_right():
    text = html_table(("traces", "share", "why"), [(1, "50%", "first trace"), (2_000, "", "")])
    page = Page(text)
    assert "2,000" in page.text
    assert text.count("text-align:right") == 2 * 3


def test_a_cell_shows_the_report_alone(monkeypatch, capsys):
    shown = []
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    display = types.SimpleNamespace(display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    with eqxjit.compile_report() as made:
        eqxjit.filter_jit(lambda model, x: model(x))(eqx.nn.Identity(), X)
    assert shown == [made]
    assert capsys.readouterr().out == ""
    # In a terminal's IPython as in a plain Python.
    del shell.kernel
    with eqxjit.compile_report():
        pass
    assert "Nothing was compiled" in capsys.readouterr().out
