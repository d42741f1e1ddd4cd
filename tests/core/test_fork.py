"""A fork beside threads that hold locks of ours: none of them is there to release one."""

import os

import pytest

from tests.support.processes import run

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks")

# Every lock of ours is found, and held by another thread, while this one forks.
ALL_LOCKED = """
    import gc, os, signal, threading, warnings, jax.numpy as jnp
    import eqxjit
    from eqxjit._interruptions import Lock

    warnings.simplefilter("ignore")  # JAX warns of the fork.
    f = eqxjit.filter_jit(lambda x: x + 1)
    for _ in range(4):
        f(jnp.ones(2))
    locks = [found for found in gc.get_objects() if type(found) is Lock]
    held, done = threading.Event(), threading.Event()

    def hold():
        for lock in locks:
            lock.__enter__()
        held.set()
        done.wait()
        for lock in locks:
            lock.__exit__(None, None, None)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        f.cache_info(), f.traces(), f.clear_cache()
        eqxjit.filter_jit(lambda x: x).cache_info()
        with eqxjit.install():
            pass
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    done.set()
    thread.join()
    f.cache_info()
    print(len(locks) > 4, status)
"""

# The thread that forks has the lock itself: it goes on in the child.
LOCKED_BY_THE_FORK = """
    import os, signal, threading
    from eqxjit._interruptions import Lock

    lock = Lock()
    with lock:
        child = os.fork()
        signal.alarm(20)
        with lock, lock.attempt as is_free:
            assert is_free
    with lock:
        pass
    thread = threading.Thread(target=lock.__enter__)
    thread.start()
    thread.join(10)
    if child == 0:
        os._exit(thread.is_alive())
    print(os.waitpid(child, 0)[1], thread.is_alive())
"""


def test_every_lock_is_free_in_the_child():
    assert run(ALL_LOCKED) == "True 0\n"


def test_a_fork_within_a_lock():
    assert run(LOCKED_BY_THE_FORK) == "0 False\n"
