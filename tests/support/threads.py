"""Runs work in several threads at once."""

import threading
from collections.abc import Callable
from typing import Any

THREADS = 8


def race(work: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """Call `work(i)` in several threads that start at the same moment, and return the results."""
    barrier = threading.Barrier(threads)
    results = [None] * threads
    errors: list[BaseException] = []

    def run(i):
        try:
            barrier.wait(60)
            results[i] = work(i)
        except BaseException as error:
            errors.append(error)

    pool = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join(300)
    assert not any(thread.is_alive() for thread in pool)
    if errors:
        raise errors[0]
    return results
