"""Lets an allocation of Python's fail, to see that what is written in C bears it."""

import sys
from collections.abc import Callable
from typing import Any

import pytest


def with_failing_allocation(n: int, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call returns while Python's `n`th allocation fails; None for a `MemoryError`.

    Other threads would fail instead, pytest-xdist's among them: none runs meanwhile.
    """
    testcapi = pytest.importorskip("_testcapi")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    testcapi.set_nomemory(n, n + 1)
    try:
        return action(*args, **kwargs)
    except MemoryError:
        return None
    finally:
        testcapi.remove_mem_hooks()
        sys.setswitchinterval(interval)
