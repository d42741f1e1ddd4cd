"""Writes records: figures, with the facts on what was measured and on which machine."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import psutil

import eqxjit

from .records import RESULTS, ROOT

PACKAGES = "eqxjit jax jaxlib equinox numpy optax diffrax lineax optimistix onnxruntime torch"


def facts() -> dict[str, Any]:
    """Return the commit, command, versions, machine and settings, as JSON can hold them."""
    installed = {d.name.lower(): d.version for d in importlib.metadata.distributions()}
    return {
        "commit": _commit(),
        "command": f"python -m bench {' '.join(sys.argv[1:])}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            **{name: installed.get(name, "not installed") for name in PACKAGES.split()},
        },
        "machine": {
            "processor": _processor(),
            "logical_cpus": psutil.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "system": platform.platform(),
            "devices": [device.device_kind for device in jax.devices()],
        },
        "settings": {
            "native": eqxjit.native_enabled(),
            "jax_cpu_enable_async_dispatch": jax.config.read("jax_cpu_enable_async_dispatch"),
            "environment": {
                name: value
                for name, value in os.environ.items()
                if name.startswith(("EQXJIT_", "EQX_", "JAX_", "XLA_"))
            },
        },
    }


def record(name: str, report: dict[str, Any], args: argparse.Namespace) -> None:
    """Write a report with the facts.

    A partial or quick report is written only if `--output` names a folder for it.
    """
    if args.output is None and (args.quick or args.only):
        return
    folder = args.output or RESULTS
    path = folder / f"{name}-{jax.default_backend()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts() | report, indent=1) + "\n")
    print(f"written: {path}")


def _commit() -> str:
    """Return the commit that is checked out, followed by `+` if the sources differ from it."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "src", "bench/*.py") else "")
    except (OSError, subprocess.CalledProcessError):
        return "not a checkout"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.processor()
