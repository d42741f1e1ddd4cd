"""Settings of the whole suite: how many examples the property tests draw, and how."""

import contextlib
import gc
import inspect
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.support.profile import PROFILE

# XLA took half of the suite's time, often for programs that several tests compile. So they share a
# cache. The variables are set before JAX is imported, and for the processes that tests start.
PROGRAMS = Path(__file__).parents[1] / ".pytest_cache" / "programs"
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
# Each of pytest's workers has a folder of its own, because JAX writes a file in place, so another
# process could read half a file. Workers inherit the setting of their parent.
if Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", PROGRAMS)).is_relative_to(PROGRAMS):
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(PROGRAMS / (WORKER or "main"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# The programs are small and run a few times.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# On a GPU several processes share the memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402

# `test_without_events.py` runs tests without listeners of JAX's events. Results, waits and errors
# of calls don't depend on events.
WITHOUT_EVENTS = os.environ.get("TESTS_WITHOUT_EVENTS") == "1"
if WITHOUT_EVENTS:
    with pytest.MonkeyPatch.context() as patch:
        # `clear_event_listeners` doesn't remove listeners of scalars.
        patch.setattr(jax.monitoring, "register_scalar_listener", lambda listener: None)
        import eqxjit  # noqa: F401
    jax.monitoring.clear_event_listeners()

from tests.support.devices import drain  # noqa: E402
from tests.support.helpers import Hooked  # noqa: E402

settings.register_profile(
    "fast",
    deadline=None,
    # Each run has the same examples, so that only a change of the code can break the build.
    derandomize=True,
    suppress_health_check=[*HealthCheck],
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
settings.register_profile(
    "thorough",
    deadline=None,
    print_blob=True,
    suppress_health_check=[*HealthCheck],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
settings.load_profile(PROFILE)


# Doctest would import it, which needs eight devices.
collect_ignore = ["running/eight_devices.py"]


@pytest.fixture(scope="module", autouse=True)
def _collect_little():
    """Exempt the objects of earlier modules from garbage collections, which then are fast."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _leave_no_error():
    """Leave no error of a device for the next test to find."""
    yield
    drain()


@pytest.fixture
def hook(monkeypatch):
    """Set what the `==` and `hash` of `Hooked` run."""
    return lambda action: monkeypatch.setattr(Hooked, "hook", staticmethod(action))


@pytest.fixture(params=["off", "tracebackhide", "quiet_remove_frames", "remove_frames"])
def filtering(request):
    """Set each way in which JAX filters tracebacks, in turn."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", request.param)
    yield request.param
    jax.config.update("jax_traceback_filtering", before)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Give a test of deep structures a stack of its own.

    Where a flatten fails, JAX takes some of its thread's for good: other tests make it fail.
    """
    if pyfuncitem.get_closest_marker("deep") is None:
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    with ThreadPoolExecutor(1) as thread:
        thread.submit(pyfuncitem.obj, **{n: pyfuncitem.funcargs[n] for n in names}).result()
    return True


def pytest_collection_modifyitems(items):
    if PROFILE == "thorough":
        for item in items:
            # With the thorough profile, a property test takes longer than the usual limit.
            item.add_marker(pytest.mark.timeout(0), append=False)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    """Once all workers are done, share their compiled programs with the workers of the next run."""
    if WORKER is None:
        folders = [folder for folder in PROGRAMS.glob("*") if folder.is_dir()]
        for file in [file for folder in folders for file in folder.iterdir()]:
            for folder in folders:
                # The file may exist already, and not all file systems have links.
                with contextlib.suppress(OSError):
                    os.link(file, folder / file.name)
