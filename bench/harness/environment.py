"""What was measured, and on which machine: the facts beside every figure."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax
import psutil

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = (
    "eqxjit",
    "jax",
    "jaxlib",
    "equinox",
    "numpy",
    "flax",
    "optax",
    "diffrax",
    "lineax",
    "optimistix",
    "onnxruntime",
    "torch",
)


def facts() -> dict[str, Any]:
    """Commit, versions, machine and settings, ready for JSON."""
    return {
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in PACKAGES},
        "machine": {
            "processor": _processor(),
            "logical_cpus": psutil.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "system": platform.platform(),
            "devices": [device.device_kind for device in jax.devices()],
        },
        "settings": {
            "jax_cpu_enable_async_dispatch": jax.config.read("jax_cpu_enable_async_dispatch"),
            "environment": {
                name: value
                for name, value in os.environ.items()
                if name.startswith(("EQXJIT_", "EQX_", "JAX_", "XLA_"))
            },
        },
    }


def results(name: str, folder: Path | None) -> Path:
    """The path of a command's JSON, in `RESULTS` if in no other folder."""
    return (folder or RESULTS) / f"{name}-{jax.default_backend()}.json"


def write(name: str, report: dict[str, Any], folder: Path | None) -> Path:
    """Write a report, with the facts, and return its path."""
    path = results(name, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts() | report, indent=1) + "\n")
    return path


def _commit() -> str:
    """The commit that is checked out; `+` says that the sources differ from it."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "src", "bench/*.py") else "")
    except (OSError, subprocess.CalledProcessError):
        return "not a checkout"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(RESULTS.parents[1]), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
