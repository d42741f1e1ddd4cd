"""What a signal handler or another thread raises in a call arrives, whatever it interrupts."""

import pytest

import eqxjit
from eqxjit import _interruptions
from eqxjit._interruptions import Weak, raise_if_interruption, raised_by, unless_it_raises
from tests.support.processes import run
from tests.support.sides import CALLS

# A timer of one shot, at a random moment, while one call after the other is made. One that doesn't
# arrive is noticed because the calls go on.
PROGRAM = """
    import ctypes, dataclasses, gc, random, signal, sys, threading, time
    import equinox as eqx, jax, jax.numpy as jnp, numpy as np
    import eqxjit

    # JAX has one: Python drops what is raised in it.
    gc.callbacks.clear()

    def timeout(seconds, error):
        def handler(*_):
            raise error
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    def from_another_thread(seconds, error):
        def send():
            time.sleep(seconds)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(threading.main_thread().ident), ctypes.py_object(error))
        threading.Thread(target=send).start()
    how = {"signal": timeout, "thread": from_another_thread}[sys.argv[1]]

    class Timeout(Exception): ...
    class Urgent(BaseException): ...
    ERRORS = [Timeout, TimeoutError, RuntimeError, ValueError, KeyError, TypeError]
    ERRORS += [AttributeError, MemoryError, Urgent]
    class Own:
        def __init__(self, value=0): self.value = value
        def __eq__(self, other): return type(other) is Own and self.value == other.value
        def __hash__(self): return 1 + self.value
    @dataclasses.dataclass
    class Config:
        rate: float = 0.1
        layers: tuple = (1, 2, "a")
        own: object = dataclasses.field(default_factory=Own)
        def __hash__(self): return hash(self.layers)

    @jax.tree_util.register_pytree_node_class
    class Node:
        def __init__(self, *children): self.children = children
        def tree_flatten(self): return [*self.children], ("metadata", len(self.children))
        @classmethod
        def tree_unflatten(cls, metadata, children): return cls(*children)
    class Named(str):
        def __hash__(self): return super().__hash__()
        def __eq__(self, other): return super().__eq__(other)

    class Model(eqx.Module):
        weight: object
        inner: object = None
        static: object = eqx.field(static=True, default=None)

        @eqxjit.filter_jit
        def step(self, x): return self.weight + x

    x = jnp.ones(2)
    trees = {
        "arrays": lambda: [x] * 20,
        "NumPy": lambda: [np.ones(2)] * 20,
        "large NumPy": lambda: [np.ones(5000)] * 3,
        "own ==": lambda: [Own(i) for i in range(20)],
        "nodes": lambda: [Node(x, Node(x))] * 5,
        "Modules": lambda: [Model(x, Model(np.ones(2), Own()), [1, 2.0, {"a": Own()}])] * 4,
        "dicts": lambda: {"a": x, "b": {Named("c"): Own(), Named("d"): x}},
        "dataclasses": lambda: [Config(), Model(x, static=[Config()] * 5)],
        "static sets and arrays": lambda: Model(x, static=[{1, "a", Own()}, np.ones(3)]),
    }
    f = eqxjit.filter_jit(lambda tree, x: (tree, x + 1))
    calls = {}
    for name, tree in trees.items():
        calls[name] = lambda tree=tree(): f(tree, x)
        if name in ("own ==", "nodes", "dicts"):
            calls[name + ", made anew"] = lambda tree=tree: f(tree(), x)
    ahead = f.lower(trees["own =="](), x).compile()
    calls["ahead of time"] = lambda tree=trees["own =="](): ahead(tree, x)
    calls["a method"] = lambda model=Model(x): model.step(x)
    double = lambda tree, x: (tree, x * 2)
    calls["wrapped where it is called"] = lambda: eqxjit.filter_jit(double)(Own(), x)
    calls["structures in turn"] = lambda: [f(Own(i), x) for i in range(9)]

    def interrupted(call, error, seconds):
        "Whether it arrives."
        try:
            try:
                how(seconds, error)
                end = time.monotonic() + seconds + 2
                while time.monotonic() < end:
                    call()
                return False
            except error as found:
                return type(found) is error
        except Urgent:
            return True

    missing = []
    random.seed(0)
    for name, call in calls.items():
        for _ in range(4): call()
        for i in range(int(sys.argv[2])):
            if not interrupted(call, ERRORS[i % len(ERRORS)], random.uniform(0.0002, 0.003)):
                missing.append((name, i))
        call()
    print(missing)
"""

PATHS = [
    pytest.param({}, id="default"),
    pytest.param({"EQXJIT_NATIVE": "0"}, id="generated"),
    pytest.param({"EQXJIT_SPECIALIZE": "0"}, id="slow"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", ["signal", "thread"])
@pytest.mark.slow
def test_each_one_arrives(how, path):
    assert run(PROGRAM, how, "48", **path) == "[]\n"


# One call after the other, interrupted at the next line of ours, or of a weak dict, each time.
AT_EACH_LINE = """
    import collections, dataclasses, sys, weakref
    import equinox as eqx, jax.numpy as jnp
    import eqxjit
    FILES = eqxjit.__path__[0], weakref.__file__
    Config = dataclasses.make_dataclass("Config", ["rate"], frozen=True)
    class Model(eqx.Module):
        weight: object
        static: object = eqx.field(static=True)
    Pair = collections.namedtuple("Pair", "a b")
    x = jnp.ones(2)
    tree = Pair(Model(x, [Config(0.1), {"a": object()}]), {1: x})
    f = eqxjit.filter_jit(lambda tree, x: (tree, x + 1))
    calls = {
        "a call": lambda: f(tree, x=x),
        "wrapped where it is called": lambda: eqxjit.filter_jit(f.__wrapped__, backend="cpu")(x, x),
    }
    def call_interrupted_at(call, number, error):
        "Whether there are so many lines, and whether it arrives."
        n = 0
        def step(frame, event, arg):
            nonlocal n
            if not frame.f_code.co_filename.startswith(FILES):
                return
            n += event == "line"
            if n == number:
                n += 1
                raise error
            return step
        sys.settrace(step)
        try:
            call()
        except error:
            return True, True
        finally:
            sys.settrace(None)
        return n >= number, False
    for name, call in calls.items():
        for _ in range(4): call()
        for error in (KeyError, TypeError, AttributeError):
            number, is_there = 0, True
            while is_there:
                number += 1
                is_there, arrives = call_interrupted_at(call, number, error)
                if is_there and not arrives:
                    print(name, error, number)
        assert number > 20, (name, number)
"""


@pytest.mark.parametrize("path", PATHS[1:])
def test_it_arrives_wherever_it_comes(path):
    assert run(AT_EACH_LINE, **path) == ""


class Interrupted:
    """An object whose `==` is interrupted once, if asked."""

    error: BaseException | None = None

    def __eq__(self, other):
        error, Interrupted.error = Interrupted.error, None
        if error is not None:
            raise error
        return type(other) is Interrupted

    def __hash__(self):
        return 1


@pytest.mark.parametrize("error", [KeyError("a"), KeyError(), AttributeError("a"), OSError()])
def test_an_interrupted_guard_raises_it(error):
    """Also what a lookup of ours could have raised."""
    f = eqxjit.filter_jit(lambda x, value: x * 2)
    for _ in range(CALLS):
        f(1.0, Interrupted())
    Interrupted.error = error
    with pytest.raises(type(error)) as caught:
        f(1.0, Interrupted())
    assert caught.value is error
    assert f(1.0, Interrupted()) == 2


class Interruption(Exception):
    """An error that no code knows of."""


@pytest.mark.parametrize("at", [0, 1, 2, 9])
@pytest.mark.parametrize("fails", [False, True])
def test_what_is_raised_again_is_the_users(fails, at):
    """One that comes once is raised: in the first run, or in the one that finds that out."""
    count = -1

    def action():
        nonlocal count
        count += 1
        if count == at:
            raise Interruption
        if fails:
            raise KeyError
        return "done"

    if at == 0 or (fails and at == 1):
        for helper in (lambda: unless_it_raises(action, "otherwise"), lambda: raised_by(action)):
            count = -1
            with pytest.raises(Interruption):
                helper()
        return
    assert unless_it_raises(action, "otherwise") == ("otherwise" if fails else "done")
    count = -1
    assert type(raised_by(action)) is (KeyError if fails else type(None))
    count = at
    if fails:
        raise_if_interruption(KeyError(), action)


def test_a_bug_of_ours_is_raised_when_debugging(monkeypatch):
    """`EQXJIT_DEBUG=1`; what the user's code raises is no bug of ours."""
    monkeypatch.setattr("eqxjit._interruptions.IS_DEBUGGING", True)
    bug = compile("lambda: missing", _interruptions.__file__, "eval")

    def users():
        raise NameError

    assert unless_it_raises(users, "otherwise") == "otherwise"
    with pytest.raises(NameError, match="missing"):
        unless_it_raises(eval(bug), "otherwise")


def test_a_set_of_what_is_alive():
    class Thing:
        """Compares by identity."""

    things, alive = [Thing(), Thing(), Thing()], Weak()
    for thing in things:
        alive.add(thing)
    assert {*alive.alive()} == {*things}
    alive.discard(things.pop())
    del things[0], thing
    assert alive.alive() == things
    assert len(alive) == 1
