"""The timeline of a report: its spans, its files, and what notebooks show."""

import html.parser
import json
import re
import threading

import jax
import jax.numpy as jnp
import pytest

import eqxjit

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
    """Return the spans of complete traces. JAX also begins a trace and drops it for a new shape."""
    return [span for span in report.spans if span.function == function and span.trace]


def test_each_phase_is_a_span(report):
    phases = ["tracing", "lowering", "compiling"]
    assert [span.phase for span in spans_of(report, "outer")] == phases * 3
    threads = [span.thread for span in spans_of(report, "outer")]
    assert threads == [*["MainThread"] * 6, *["loader"] * 3]
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
    # The second `outer` reuses a trace of the first.
    assert [span.phase for span in nested] == ["tracing"] * 2
    for span, around in zip(nested, (traced[0], traced[2]), strict=True):
        assert span.depth == 1
        assert around.start <= span.start
        assert span.start + span.seconds <= around.start + around.seconds


def test_a_span_has_its_trace(report):
    for number, trace in enumerate(outer.traces()):
        spans = spans_of(report, "outer")[3 * number : 3 * number + 3]
        assert all(span.trace == trace for span in spans)
    assert spans_of(report, "outer")[3].reason == "static value changed: `n` was 1, is 2"
    with eqxjit.compile_report() as other:
        jax.jit(lambda x: x + 3)(X)
    assert [(span.trace, span.reason) for span in other.spans] == [(None, "")] * len(other.spans)


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
    """The text of a page, and which tags are in it."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = set(), ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


def test_a_page(report, tmp_path):
    path = tmp_path / "report.HTML"
    report.save(str(path))
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    for part in ("static value changed: `n` was 1, is 2", "np.int32(n)", "inner"):
        assert part in page.text
    # The page loads nothing from elsewhere, and runs no script.
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert "http" not in text


def test_tables_in_a_notebook(report):
    assert "shape: `x` was float32[3], is float32[2]" in Page(outer.traces()._repr_html_()).text
    assert isinstance(outer.traces(), list)
    assert "Nothing was traced" in eqxjit.filter_jit(lambda x: x).traces()._repr_html_()

    def fun(x):
        return x

    fun.__name__ = fun.__qualname__ = "<script>alert('&')</script>"
    with eqxjit.compile_report() as made:
        f = eqxjit.filter_jit(fun)
        f(X)
    for text in (made._repr_html_(), f.traces()._repr_html_()):
        page = Page(text)
        assert "script" not in page.tags
        assert "<script>alert('&')</script>" in page.text


def test_other_formats_are_refused(report):
    with pytest.raises(ValueError, match=r"saved as \.html or \.json; the path is 'report\.txt'"):
        report.save("report.txt")
