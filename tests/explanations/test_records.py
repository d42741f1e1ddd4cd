"""The records of traces: what they contain, when they are explained, what they keep alive."""

import contextlib
import gc
import io
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import eqxjit

X = jnp.ones(3)


def compiling(fun):
    return [trace.seconds.compiling for trace in fun.traces()]


def test_a_function_that_calls_itself():
    """Each depth is a trace, one program is compiled, and no call was a hit."""

    @eqxjit.filter_jit
    def total(x):
        return x[:1] + total(x[1:]) if x.shape[0] > 1 else x * 2

    total(jnp.ones(4))
    assert total.cache_info().hits == 0
    assert [trace.summary for trace in total.traces()] == [f"x: float32[{n}]" for n in (1, 2, 3, 4)]
    assert [seconds > 0 for seconds in compiling(total)] == [False, False, False, True]
    assert [trace.equations is None for trace in total.traces()] == [True, True, True, False]
    total(jnp.ones(4))
    assert total.cache_info().hits == 1


def callback(x):
    """Compiles something new in each call, under the very name of the function around it."""
    fun = jax.jit(lambda x: jnp.sin(x) + len(seen))
    seen.append(fun)
    return np.asarray(fun(jnp.asarray(x)))


seen = []


def test_what_a_callback_compiles_for_itself_is_no_part_of_the_trace():
    f = eqxjit.filter_jit(
        lambda x: jax.pure_callback(callback, jax.ShapeDtypeStruct((3,), jnp.float32), x)
    )
    f(X)
    first = compiling(f)
    for _ in range(4):
        f(X)
    assert compiling(f) == first
    assert f.cache_info().hits == 4


def test_the_cost_of_compiling_is_that_of_the_very_program():
    f = eqxjit.filter_jit(lambda x, n: x * n)
    # Traces that are forgotten meanwhile count for nothing.
    for n in range(269):
        jax.eval_shape(lambda x: f(x, n), X)  # noqa: B023
    f.lower(X, 269)
    cost = f.compile(X, 300)
    assert cost.seconds == pytest.approx(f.traces()[-1].seconds.total)
    assert f.compile(X, 300).seconds == 0
    assert f.compile(X, 269).seconds == pytest.approx(f.traces()[-2].seconds.compiling)


class Nameless(type):
    @property
    def __name__(cls):
        raise RuntimeError("no name")


def test_what_can_not_be_described_is_called_all_the_same():
    class Node(metaclass=Nameless):
        def __init__(self, x):
            self.x = x

    jax.tree_util.register_pytree_node(Node, lambda n: ((n.x,), None), lambda _, c: Node(*c))
    f = eqxjit.filter_jit(lambda node, n: node.x * n)
    for n in (2, 2, 3):
        assert f(Node(X), n).tolist() == [n] * 3
    assert [d.path for d in f.traces()[1].differences] == ["n"]


def test_explanations_are_of_the_moment_of_the_trace():
    """They are so although they are computed when they are read."""

    def fun(x, n):
        return x * n

    f = eqxjit.filter_jit(fun, maxsize=1)
    for n in (1, 2, 1):
        f(X, n)
    traces = f.traces()
    f.clear_cache()
    f(X, 1)
    [latest] = f.traces()
    jax.clear_caches()
    f(X, 1)
    again = f.traces()[1]
    f.clear_cache()
    assert "JAX's caches no longer hold the program" in again.reason
    assert "least recently used" in traces[2].reason
    assert traces[2].compared_with == 1
    assert latest.reason == "first trace"
    assert traces[1].reason == "static value changed: `n` was 1, is 2"


def test_unread_explanations_keep_a_bounded_number_of_traces_alive():
    f = eqxjit.filter_jit(lambda x, n: x * n)
    alive = weakref.WeakSet()
    for n in range(320):
        jax.eval_shape(lambda x: f(x, n), X)  # noqa: B023
        alive.add(f.traces()[-1])
        if n % 50 == 49:
            f.clear_cache()
    gc.collect()
    assert len(alive) < 300
    assert len(f.traces()) == 20


def test_descriptions_of_large_trees_are_dropped_in_the_end():
    tree = [*range(30_000)]
    f = eqxjit.filter_jit(lambda tree, n: X * n)
    for n in range(6):
        f.lower(tree, n)
        if n == 1:
            early = f.traces()[1].reason
    first, second, third, *_, last = f.traces()
    assert not first.arguments
    assert last.arguments
    assert second.reason == early == "static value changed: `n` was 0, is 1"
    # The reason is right although the trace before it has no description any more.
    assert third.reason == "static value changed: `n` was 1, is 2"
    assert last.reason == "static value changed: `n` was 4, is 5"


def test_old_explanations_of_a_report_are_those_of_their_traces():
    """This holds after hundreds of traces, of which the function keeps only the latest."""
    f = eqxjit.filter_jit(lambda x, n: x * n)
    with contextlib.redirect_stdout(io.StringIO()), eqxjit.compile_report() as report:
        for n in range(300):
            f.lower(X, n)
    traces = [span.trace for span in report.spans if span.trace and span.phase == "tracing"]
    assert len(traces) == 300
    expected = [f"static value changed: `n` was {n - 1}, is {n}" for n in range(1, 300)]
    assert [trace.reason for trace in traces] == ["first trace", *expected]


def test_a_trace_is_read_only():
    f = eqxjit.filter_jit(lambda x: x + 1)
    f(X)
    [trace] = f.traces()
    for name in ("number", "seconds", "reason", "call_site"):
        with pytest.raises(AttributeError):
            setattr(trace, name, None)
    trace.seconds.tracing = -1
    assert trace.seconds.tracing > 0


class Config(eqx.Module):
    names: tuple = eqx.field(static=True)


def test_a_trace_that_nobody_reads_compares_nothing():
    compared = []

    class Name:
        def __init__(self, text):
            self.text = text

        def __repr__(self):
            compared.append(self.text)
            return self.text

    f = eqxjit.filter_jit(lambda x, c: x)
    f(X, Config((Name("a"),)))
    described = len(compared)
    f(X, Config((Name("b"),)))
    assert len(compared) == 2 * described


def test_a_flatten_with_keys_runs_for_a_first_trace_alone():
    n_keyed = 0

    class Box:
        def __init__(self, a):
            self.a = a

    def keyed(box):
        nonlocal n_keyed
        n_keyed += 1
        return [(jax.tree_util.GetAttrKey("a"), box.a)], None

    jax.tree_util.register_pytree_with_keys(
        Box, keyed, lambda _, c: Box(*c), lambda box: ([box.a], None)
    )
    f = eqxjit.filter_jit(lambda box: box.a + 1)
    f(Box(jnp.ones(1)))
    assert n_keyed == 1
    n_keyed = 0
    f(Box(jnp.ones(2)))
    assert n_keyed == 0
    assert str(f.traces()[1].differences[0]) == "shape: `box.a` was float32[1], is float32[2]"


@pytest.mark.filterwarnings("error")
def test_a_compilation_in_the_middle_of_lowering_takes_no_times_and_shows_no_warning():
    inner = Primitive("inner")
    inner.def_abstract_eval(lambda x: x)

    def lower(context, x):
        jax.jit(lambda x: x + 3)(jnp.ones(5))
        return [x]

    mlir.register_lowering(inner, lower)
    f = eqxjit.filter_jit(lambda x: inner.bind(x)[0], donate="all")
    f(jnp.ones(3))
    [trace] = f.traces()
    assert min(trace.seconds.lowering, trace.seconds.compiling) > 0


def test_the_traces_are_a_table_of_lines_in_a_terminal():
    f = eqxjit.filter_jit(lambda x, n: x * n)
    assert repr(f.traces()) == "Nothing was traced."
    for n in (1, 2):
        f(jnp.ones(3), n)
    headings, first, second = repr(f.traces()).splitlines()
    assert headings.split() == ["trace", "function", "called", "at", "seconds", "why"]
    assert first.startswith("1 ")
    assert first.endswith("  first trace")
    assert second.endswith("  static value changed: `n` was 1, is 2")
    assert first.index("first trace") == headings.index("why") == second.index("static value")
    assert str(f.traces()[1].call_site) in second
    # It is still a list, whose elements show all that is known.
    assert f.traces()[0].number == 1
    assert repr(f.traces()[0]).startswith("<trace 1 of ")


def test_what_a_function_closes_over_may_be_anything():
    """The search runs no code of the user's, and ends for objects that contain themselves."""
    _, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "b", mode="batch")
    cycle: dict = {"x": X}
    cycle["self"] = [cycle, (cycle,)]
    mixed = {1: state, "a": cycle, (2, 3): {None: vars(jax)}}

    @eqxjit.filter_jit
    def call(fun, x):
        return fun(x)

    for i in range(3):
        assert call(lambda x, i=i: x * len(mixed) + i, X)[0] == 3 + i
    assert "another" not in call.traces()[2].explanation
    # The State wasn't flattened, which would have made it unusable.
    jax.tree.leaves(state)


def test_compiling_again_ahead_of_time_counts_for_the_trace_of_that_program():
    """The seconds don't count for the latest trace of the function."""
    f = eqxjit.filter_jit(lambda x: jnp.sin(x) * 2)
    f(jnp.ones(2))
    f(jnp.ones(3))
    before = compiling(f)
    lowered = f.lower(jnp.ones(2))
    assert lowered.seconds == 0
    lowered.compile({"xla_embed_ir_in_executable": True})
    after = compiling(f)
    assert after[0] > before[0]
    assert after[1] == before[1]
    assert lowered.seconds == pytest.approx(after[0] - before[0])
