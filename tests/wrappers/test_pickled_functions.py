"""A pickler treats a jitted function like the function itself: by name or by value."""

import os
import sys
import textwrap

import pytest

from tests.support.processes import python

#: The source of a module and of a script: functions that refer to each other, methods, closures,
#: and objects that hold them.
SOURCE = """
    import functools
    import equinox as eqx, jax.numpy as jnp
    from eqxjit import filter_jit

    @filter_jit
    def twice(x, n=2): return x * n

    def more(x): return twice(x) + 1

    @filter_jit(donate="none", maxsize=9)
    def recursive(x, n=3): return x if n == 0 else recursive(x, n - 1) + other(x, n=n)

    @filter_jit
    def other(x, *, n=5): return x if n == 0 else recursive(x, 0)

    def plain(x, n=4): return x * n
    elsewhere = filter_jit(plain)

    def again(x, n=2): return x if n == 0 else jitted_again(x, n - 1) * 2
    jitted_again = filter_jit(again)

    class Plain:
        @filter_jit
        def step(self, x): return x + 10
        @staticmethod
        @filter_jit
        def helper(x): return x - 1
        def __hash__(self): return 1
        def __eq__(self, other): return type(other) is type(self)

    def make(scale):
        @filter_jit
        def closure(x, n=1): return x * scale * n
        return closure

    @functools.lru_cache
    def closure(): return make(7)

    class Model(eqx.Module):
        weight: object
        act: object
        @filter_jit
        def __call__(self, x): return self.act(self.weight * x)

    THINGS = {
        "decorated": (lambda: twice, 2.0), "its user": (lambda: more, 3.0),
        "recursive": (lambda: recursive, 4.0), "in turn": (lambda: other, 1.0),
        "elsewhere": (lambda: elsewhere, 4.0), "refers to itself": (lambda: jitted_again, 4.0),
        "a method": (lambda: Plain().step, 11.0), "a static method": (lambda: Plain.helper, 0.0),
        "a closure": (closure, 7.0), "a partial": (lambda: functools.partial(twice, n=8), 8.0),
        "a Module that holds one": (lambda: Model(jnp.ones(()), twice), 2.0),
        "a Module's method": (lambda: Model(jnp.ones(()), elsewhere).__call__, 4.0),
    }
"""

DUMP = """
    import importlib, sys
    REFER = ("its user", "recursive", "in turn", "refers to itself")
    pickler, how = importlib.import_module(sys.argv[1]), sys.argv[2]
    if how == "by value": pickler.register_pickle_by_value(project)
    for name, (thing, expected) in project.THINGS.items():
        if how != "by name" and "Module" in name: continue  # Equinox's classes don't go by value.
        if sys.argv[1] == "pickle" and name == "a closure": continue
        # Dill leaves a script's globals behind, of any function.
        if sys.argv[1] == "dill" and how != "by name" and name in REFER: continue
        thing = thing()
        for warm in range(3):
            with open(f"there/{name} {warm}", "wb") as file: pickler.dump(thing, file)
            thing(jnp.ones(()))
"""

LOAD = """
    import importlib, pathlib, sys, jax.numpy as jnp
    pickler = importlib.import_module(sys.argv[1])
    EXPECTED = {expected}
    count = 0
    for path in sorted(pathlib.Path(".").iterdir()):
        with open(path, "rb") as file: thing = pickler.load(file)
        for _ in range(3): assert thing(jnp.ones(())) == EXPECTED[path.name[:-2]], path
        count += 1
    print(count)
"""

# dill and cloudpickle pickle a script's functions by value. For `pickle` it must run there, too.
CASES = [
    *[("module", pickler, "by name") for pickler in ("pickle", "cloudpickle", "dill")],
    ("module", "cloudpickle", "by value"),
    ("script", "pickle", "by name"),
    ("script", "cloudpickle", "by value of a script"),
    ("script", "dill", "by value of a script"),
]


def expected_results():
    namespace = {}
    exec(textwrap.dedent(SOURCE), namespace)
    return {name: expected for name, (_, expected) in namespace["THINGS"].items()}


@pytest.mark.parametrize(("where", "pickler", "how"), CASES)
@pytest.mark.slow
def test_goes_to_another_process(where, pickler, how, tmp_path):
    pytest.importorskip(pickler)
    there = tmp_path / "there"
    there.mkdir()
    source, dump = textwrap.dedent(SOURCE), textwrap.dedent(DUMP)
    if where == "module":
        (tmp_path / "project_code.py").write_text(source)
        dump = f"import jax.numpy as jnp, project_code as project\n{dump}"
    else:
        dump = f"{source}\nproject = sys.modules['__main__']\n{dump}".replace(
            "\nproject", "\nimport sys\nproject", 1
        )
    (tmp_path / "dump.py").write_text(dump)
    made = python("dump.py", pickler, how, cwd=tmp_path)
    assert made.returncode == 0, made.stderr[-3000:]
    load = textwrap.dedent(LOAD).replace("{expected}", repr(expected_results()))
    if how == "by name" and where == "script":
        load = f"{source}\n{load}"
    n = len([*there.iterdir()])
    places = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])} if how == "by name" else {}
    loaded = python("-c", load, pickler, cwd=there, **places)
    assert loaded.returncode == 0, loaded.stderr[-3000:]
    assert loaded.stdout == f"{n}\n"
    assert n >= 3 * 6


PARALLEL = """
    import multiprocessing, sys
    import jax.numpy as jnp, numpy as np
    from eqxjit import filter_jit
    from tests.support import picklable

    @filter_jit
    def of_main(x, n): return x * n

    if __name__ == "__main__":
        model = picklable.Model(jnp.ones(2) * 3, picklable.decorated)
        of_main(jnp.ones(2), 1), model.step(jnp.ones(2))
        for method in ("spawn", "forkserver"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                out, n = pool.apply(picklable.decorated, (np.ones(2),))
                print(method, out.tolist(), n)
                print(pool.apply(of_main, (np.ones(2), 3)).tolist())
                print(pool.apply(model.step, (np.ones(2),)).tolist())
                print(pool.apply(filter_jit(model), (np.ones(2),))[0].tolist())
        import joblib

        @filter_jit
        def local(x): return x * 5

        results = joblib.Parallel(n_jobs=2)(joblib.delayed(local)(np.ones(1)) for _ in range(2))
        print([out.tolist() for out in results])
        assert joblib.hash(local) == joblib.hash(local) != joblib.hash(picklable.decorated)
"""


@pytest.mark.slow
def test_pools(tmp_path):
    (tmp_path / "pools.py").write_text(textwrap.dedent(PARALLEL))
    made = python("pools.py", cwd=tmp_path)
    assert made.returncode == 0, made.stderr[-3000:]
    assert made.stdout.splitlines() == [
        *("spawn [2.0, 2.0] 2", "[3.0, 3.0]", "[3.0, 3.0]", "[6.0, 6.0]"),
        *("forkserver [2.0, 2.0] 2", "[3.0, 3.0]", "[3.0, 3.0]", "[6.0, 6.0]"),
        "[[5.0], [5.0]]",
    ]
