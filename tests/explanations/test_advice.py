"""Each remedy, followed to the letter, leads to no further trace; there is none that can't be."""

import collections
import dataclasses
import enum
import functools
import importlib.util
import sys
import textwrap
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import eqxjit
from tests.support.places import make_site_packages, shown

X = jnp.arange(3.0)


class Model(eqx.Module):
    scale: object = 2.0
    config: object = eqx.field(static=True, default=None)
    rate: object = None

    def __call__(self, x):
        return x


def hint(f, *args, **kwargs):
    """The remedy for the trace that this call makes."""
    before = f.cache_info().traces
    f(*args, **kwargs)
    assert f.cache_info().traces == before + 1
    *_, trace = f.traces()
    return "; ".join(dict.fromkeys(d.remedy for d in trace.differences))


def expression(remedy):
    """The code in a hint."""
    return next(code for code in remedy.split("`") if code.startswith("jnp.asarray("))


def assert_no_further_trace(f, calls, n_to_begin=1):
    """Calls with what the hint says: all but the first are served by what is compiled."""
    for args in calls[:n_to_begin]:
        f(*args)
    before = f.cache_info().traces
    for args in calls:
        f(*args)
    assert f.cache_info().traces == before, f.traces()[-1].explanation()


NUMBERS = {
    "ints": (1, 2, [3, 4, 5]),
    "floats": (1.0, 2.0, [0.5, -0.0, float("inf"), float("nan")]),
    "complex": (1j, 2j, [3j, 1.0]),
    "an int, then floats": (1, 0.5, [0.25, 2]),
}


@pytest.mark.parametrize(("first", "second", "more"), NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("where", ["argument", "in a dict", "field", "static field"])
def test_make_a_number_an_array(where, first, second, more):
    f = eqxjit.filter_jit(lambda x: X)
    wrap = {
        "argument": lambda n: n,
        "in a dict": lambda n: {"n": [n]},
        "field": lambda n: Model(scale=n),
        "static field": lambda n: Model(config={"rate": n}),
    }[where]
    f(wrap(first))
    remedy = hint(f, wrap(second))
    code = expression(remedy)
    assert ("in a field that isn't static" in remedy) == (where == "static field")
    names = {"jnp": jnp, "nan": float("nan"), "inf": float("inf")}
    # To the letter.
    arrays = [eval(code.replace("...", repr(n)), {**names, "x": wrap(n)}) for n in more]
    again = (lambda n: Model(rate=n)) if where == "static field" else wrap
    assert not any(array.weak_type for array in arrays)
    assert_no_further_trace(f, [(again(array),) for array in arrays])
    # Nor with what most arrays are: of a dtype.
    assert_no_further_trace(f, [(again(jnp.zeros((), arrays[0].dtype)),)], n_to_begin=0)


ARRAYS = {
    "float32": (jnp.float32(1), 2.0, 0),
    "float32, then a bool": (jnp.float32(1), True, 0),
    "bfloat16": (jnp.bfloat16(1), 2.5, 0),
    "uint8": (jnp.uint8(1), 2, 0),
    "weak": (jnp.asarray(1.0), 2.0, 0),
    "int32, then a float": (jnp.int32(1), 2.5, 1),
    "uint8, then an int that it can't hold": (jnp.uint8(1), 300, 1),
    "another shape": (X, 2.5, 1),
}


@pytest.mark.parametrize(("array", "number", "n_to_begin"), ARRAYS.values(), ids=ARRAYS)
def test_pass_an_array_again(array, number, n_to_begin):
    f = eqxjit.filter_jit(lambda x: x)
    f(array)
    code = expression(hint(f, number))
    passed = [eval(code, {"jnp": jnp, "x": type(number)(i * number)}) for i in (1, 0, 1)]
    assert passed[0] == number
    assert_no_further_trace(f, [(each,) for each in passed], n_to_begin)


@pytest.mark.parametrize("weak_first", [True, False])
def test_give_it_a_dtype(weak_first):
    f = eqxjit.filter_jit(lambda x: x)
    made = [jnp.asarray(2), jnp.zeros((), int)]
    one, other = made if weak_first else made[::-1]
    f(one)
    code = expression(hint(f, other))
    followed = eval(code.replace("...", "2"), {"jnp": jnp})
    # The dtype of either: what was strong before is served by the same trace.
    assert_no_further_trace(f, [(followed,), (made[1],)], n_to_begin=0)


def test_pad_it_to_a_few_sizes():
    f = eqxjit.filter_jit(lambda x: x)
    f(jnp.ones(3))
    assert "pad it to a few sizes" in hint(f, jnp.ones(4))
    g = eqxjit.filter_jit(lambda x, y: x)
    g(jnp.ones(3), jnp.ones(5)), g(jnp.ones(4), jnp.ones(6))
    explanation = g.traces()[1].explanation()
    assert "`y` was float32[5], is float32[6]" in explanation
    assert explanation.count("pad it to a few sizes") == 1
    sizes = [(jnp.pad(jnp.ones(n), (0, -n % 16)),) for n in range(1, 40)]
    assert_no_further_trace(f, sizes, n_to_begin=39)
    assert len({size.shape for (size,) in sizes}) == 3


def test_give_a_class_an_equality():
    class Settings:
        def __init__(self, rate):
            self.rate = rate

    f = eqxjit.filter_jit(lambda settings: X)
    f(Settings(1))
    remedy = hint(f, Settings(1))
    assert remedy.startswith("`Settings` instances compare by identity: create one and reuse it")
    assert "as a frozen dataclass has" in remedy
    frozen = dataclasses.make_dataclass("Frozen", ["rate"], frozen=True)
    assert_no_further_trace(f, [(frozen(1),), (frozen(1),)])


def test_make_a_class_once():
    """An `__eq__` of its own doesn't help if the class is another one each time."""

    def make():
        return type("Settings", (), {"__module__": __name__})()

    f = eqxjit.filter_jit(lambda settings: X)
    f(make())
    remedy = hint(f, make())
    assert "and define its class once" in remedy
    assert "__eq__" not in remedy
    settings = make()
    assert_no_further_trace(f, [(settings,)] * 3)


def test_define_and_wrap_it_once(caplog):
    for i in range(12):
        f = eqxjit.filter_jit(lambda x: x * i)  # noqa: B023
        f(X)
    assert "Define and wrap it once" in f.traces()[0].differences[0].remedy
    assert "pass what varies as arrays" in caplog.messages[-1]
    assert_no_further_trace(f, [(X,)] * 3, n_to_begin=0)
    g = eqxjit.filter_jit(lambda x, i: x * i)
    assert_no_further_trace(g, [(X, jnp.asarray(i)) for i in range(5)])


# --- Each kind of object ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    rate: object = 1.0
    inner: object = None


class Settings(dict):
    def __hash__(self):
        return 0


class ConfigModule(eqx.Module):
    rate: object


class Point(NamedTuple):
    rate: object


class Mode(enum.Enum):
    TRAIN, EVAL = 1, 2


class Holder(eqx.Module):
    forward: object


def own_activations():
    return [lambda x: x, lambda x: x + 1]


def chained(rate=1e-3):
    return optax.chain(optax.clip(1.0), optax.adam(rate))


def loss(x):
    return (x**2).sum()


class Stepper:
    def step(self, x):
        return x


class StepperModule(eqx.Module):
    def step(self, x):
        return x


ADAM = chained()
INJECTED = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)


def injected(rate):
    state = INJECTED.init(X)
    state.hyperparams["learning_rate"] = jnp.asarray(rate, jnp.float32)
    return INJECTED, state


def array(rate):
    return jnp.asarray(rate, jnp.float32)


LINEAR = eqx.nn.Linear(3, 3, key=jax.random.key(0))
ACTIVATIONS = own_activations()

OWN_ARGUMENT = "as a separate argument"

KINDS = {
    "dataclass": (lambda i: Config(float(i)), OWN_ARGUMENT, lambda i: (Config(), array(i))),
    "dataclass, as a Module": (
        lambda i: Config(float(i)),
        "make `Config` an `equinox.Module`",
        lambda i: ConfigModule(array(i)),
    ),
    "dataclass in a dataclass": (
        lambda i: Config(inner=Config(("rate", float(i)))),
        OWN_ARGUMENT,
        lambda i: (Config(), array(i)),
    ),
    "dict of a class that JAX doesn't take apart": (
        lambda i: Settings(rate=float(i)),
        OWN_ARGUMENT,
        lambda i: (Settings(rate=0.0), array(i)),
    ),
    "dataclass in a field": (
        lambda i: Model(rate=Config(float(i))),
        "make `Config` an `equinox.Module`",
        lambda i: Model(rate=ConfigModule(array(i))),
    ),
    "named tuple": (lambda i: Point(float(i)), "make `x.rate` an array", lambda i: Point(array(i))),
    "optimizer": (lambda i: (chained(),), "make `x[0]` once", lambda i: (ADAM,)),
    "optimizer, of another rate": (
        lambda i: chained(1e-3 * i),
        "`optax.inject_hyperparams`",
        lambda i: injected(1e-3 * i),
    ),
    "optimizer's function": (lambda i: chained().update, "make `x` once", lambda i: ADAM.update),
    "functions of one call": (
        lambda i: own_activations(),
        "make them, or `x`, once",
        lambda i: ACTIVATIONS,
    ),
    "lambda": (lambda i: lambda x: x, "make it once", lambda i: loss),
    "partial": (
        lambda i: functools.partial(jnp.dot, 2.0),
        "use `eqx.Partial`",
        lambda i: eqx.Partial(jnp.dot, 2.0),
    ),
    "partial that Equinox jits, in a field": (
        lambda i: Holder(eqx.filter_jit(functools.partial(jnp.dot, 2.0))),
        "use `eqx.Partial`",
        lambda i: Holder(eqx.filter_jit(eqx.Partial(jnp.dot, 2.0))),
    ),
    "transformed Module": (
        lambda i: {"f": jax.vmap(LINEAR)},
        "Use `eqx.filter_vmap`",
        lambda i: {"f": eqx.filter_vmap(LINEAR)},
    ),
    "transformed function": (
        lambda i: {"f": jax.vmap(loss)},
        "use `eqx.filter_vmap`",
        lambda i: {"f": eqx.filter_vmap(loss)},
    ),
    "method": (
        lambda i: Stepper().step,
        "make its class an `equinox.Module`",
        lambda i: StepperModule().step,
    ),
    "transformed method": (
        lambda i: {"f": jax.vmap(LINEAR.__call__)},
        "pass the Linear as an argument",
        lambda i: {"f": LINEAR},
    ),
    "jitted lambda in a field": (
        lambda i: Holder(eqxjit.filter_jit(lambda x: x)),
        "make it once",
        lambda i: Holder(JITTED),
    ),
    "object of a library": (lambda i: object(), "make `x` once", lambda i: X),
}
JITTED = eqxjit.filter_jit(lambda x: x)


@pytest.mark.parametrize(("make", "advice", "follow"), KINDS.values(), ids=KINDS)
def test_each_remedy_is_followed(make, advice, follow):
    f = eqxjit.filter_jit(lambda x: X)
    f(make(1))
    remedy = hint(f, make(2))
    assert advice in remedy
    # One cause, and one remedy.
    assert len(f.traces()[-1].differences) == 1, f.traces()[-1].explanation()
    assert_no_further_trace(f, [(follow(i),) for i in range(3, 6)])


def capturing(n):
    return lambda x: x * n


class Plain:
    def __init__(self, n):
        self.n = n


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Mode.TRAIN, Mode.EVAL),
        ("a", "b"),
        (True, False),
        (jnp.float32, jnp.int32),
        (jnp.sin, jnp.cos),
        (capturing(1), capturing(2)),
        (Plain(1), Plain(2)),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (Config("a"), Config("b")),
        (frozenset({1}), frozenset({2})),
        (Model(config=collections.deque([1])), Model(config=collections.deque([2]))),
        # Where nothing would help.
        (1, 2**31),
        (1.0, 1e39),
        (jax.random.key(0), 1),
        (X, "text"),
        (X, X[None]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_where_nothing_is_to_be_made_once_there_is_no_remedy(old, new):
    f = eqxjit.filter_jit(lambda x: X)
    f({"a": [old]})
    assert hint(f, {"a": [new]}) == ""
    [difference] = f.traces()[-1].differences
    assert difference.old != difference.new


MLP = eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.key(0))
BATCH = jnp.ones((2, 3))

WRAPPED = {
    "vmap of a Module": (
        lambda: jax.vmap(MLP),
        BATCH,
        ["another `jax.vmap` of an object of `MLP`", "Use `eqx.filter_vmap`"],
        lambda: eqx.filter_vmap(MLP),
    ),
    "value_and_grad of a function": (
        lambda: jax.value_and_grad(loss),
        X,
        [
            f"another `jax.value_and_grad` of `loss` ({shown(__file__)}:",
            "use `eqx.filter_value_and_grad`",
        ],
        lambda: eqx.filter_value_and_grad(loss),
    ),
    "method of another object": (
        lambda: Stepper().step,
        X,
        ["`Stepper.step` of another `Stepper`", "Make the `Stepper` once"],
        lambda: STEP,
    ),
    "vmap of a library's": (
        lambda: jax.vmap(jnp.sin),
        X,
        ["another `jax.vmap` of `sin`", "use `eqx.filter_vmap`"],
        lambda: eqx.filter_vmap(jnp.sin),
    ),
    "partial": (
        lambda: functools.partial(jnp.dot, 2.0),
        X,
        ["use `eqx.Partial`"],
        lambda: eqx.Partial(jnp.dot, 2.0),
    ),
}
STEP = Stepper().step


@pytest.mark.parametrize(("make", "x", "texts", "follow"), WRAPPED.values(), ids=WRAPPED)
def test_what_is_wrapped_again_and_again(make, x, texts, follow, caplog):
    for _ in range(12):
        eqxjit.filter_jit(make())(x)
    [message] = caplog.messages
    assert all(text in message for text in texts)
    assert ("eqx.filter_" in message) == ("eqx.filter_" in texts[-1])
    for _ in range(3):
        f = eqxjit.filter_jit(follow())
        f(x)
    assert f.cache_info().traces == 1


def test_nothing_to_inject_where_it_is_injected():
    """As the state says, which comes along."""
    g = eqxjit.filter_jit(lambda optimizer, state=None: X)
    made = [
        optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adam)(learning_rate=1e-3))
        for _ in range(2)
    ]
    g(made[0], made[0].init(X))
    remedy = hint(g, made[1], made[1].init(X))
    assert remedy.startswith("If it should be the same, make `optimizer` once")
    assert "inject" not in remedy


# --- A library's ------------------------------------------------------------------------------


LIBRARY = """
    import dataclasses, functools
    import equinox as eqx, jax.numpy as jnp, jax, eqxjit

    @eqxjit.filter_jit
    def solve(x, max_steps=10, opts=None, fun=None):
        return x

    class Solver(eqx.Module):
        tol: float = 1.0
        order: int = eqx.field(static=True, default=3)
        fun: object = None
        ys: object = None

    class Identity:
        pass

    @dataclasses.dataclass(frozen=True)
    class Options:
        tol: float

    def make_callable():
        return lambda x: x

    def make_partial():
        return functools.partial(jnp.clip, min=0)

    def define_and_call():
        eqxjit.filter_jit(lambda x: x)(jnp.ones(3))

    evicting = eqxjit.filter_jit(lambda x, n: x, maxsize=1)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A module that lies where packages are installed."""
    path = make_site_packages(tmp_path_factory.mktemp("lib")) / "a_library.py"
    path.write_text(textwrap.dedent(LIBRARY))
    spec = importlib.util.spec_from_file_location("a_library", path)
    module = sys.modules["a_library"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["a_library"]


OF_LIBRARY = {
    "an argument of its function": lambda lib, i: lib.solve(X, max_steps=i),
    "inside an argument": lambda lib, i: lib.solve(X, opts={"n": [float(i)]}),
    "a size for its function": lambda lib, i: lib.solve(jnp.ones(i + 3)),
    "a field of its class": lambda lib, i: OWN(lib.Solver(tol=float(i))),
    "a static field": lambda lib, i: OWN(lib.Solver(order=i)),
    "its options": lambda lib, i: OWN(lib.Options(float(i))),
    "a weak type in its class": lambda lib, i: OWN(
        lib.Solver(ys=jnp.asarray(1.0) if i else jnp.float32(1))
    ),
    "its lambda for its function": lambda lib, i: lib.solve(X, fun=lib.make_callable()),
    "Equinox's layer": lambda lib, i: OWN(eqx.nn.Dropout(0.1 * (i + 1))),
}


@eqxjit.filter_jit
def OWN(model):
    """A function of the user's."""
    return X


@pytest.mark.parametrize("call", OF_LIBRARY.values(), ids=OF_LIBRARY)
def test_no_advice_about_what_a_library_made(call, library):
    for f in (OWN, library.solve):
        f.clear_cache()
    for i in range(2):
        call(library, i)
    [f] = [f for f in (OWN, library.solve) if f.traces()]
    *_, trace = f.traces()
    assert trace.differences
    assert [d.remedy for d in trace.differences if d.remedy] == []


OF_USER = {
    "a lambda for its function": (lambda lib: lib.solve(X, fun=lambda x: x), "make it once"),
    # The user's call has it made.
    "its lambda": (lambda lib: OWN(lib.make_callable()), "make `model` once"),
    "its partial in its class": (
        lambda lib: OWN(lib.Solver(fun=lib.make_partial())),
        "make `model` once",
    ),
    "its object": (lambda lib: OWN(lib.Identity()), "make `model` once"),
    "JAX's callable": (lambda lib: OWN(jax.jit(jnp.linalg.norm)), "make `model` once"),
}


@pytest.mark.parametrize(("call", "advice"), OF_USER.values(), ids=OF_USER)
def test_advice_about_what_the_user_gave_to_a_library(call, advice, library):
    for f in (OWN, library.solve):
        f.clear_cache()
    call(library), call(library)
    [f] = [f for f in (OWN, library.solve) if f.traces()]
    assert advice in f.traces()[-1].differences[0].remedy


def test_a_librarys_functions_that_are_traced_again_and_again(library, caplog):
    for n in range(12):
        library.evicting(X, "ab"[n % 2])
        library.define_and_call()
    messages = "\n".join(caplog.messages)
    assert messages.count("10 times in a row") == 2
    assert not any(advice in messages for advice in ("raise", "wrap it", "pass"))
