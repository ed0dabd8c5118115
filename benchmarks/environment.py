"""Device, versions and commit: what a figure depends on besides its configuration."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import lightning_offload

_PACKAGES = ("torch", "lightning", "transformers", "numpy", "scipy")


def device() -> torch.device:
    """Return the device to measure on: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name() -> str:
    """Return the device's name for people and for file names."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def describe() -> dict[str, Any]:
    """Return processor, threads, versions and commit, ready for JSON."""
    versions = {"python": platform.python_version(), "lightning_offload": lightning_offload.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "processor": _processor(),
        "num_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "commit": _commit(),
    }


def _processor() -> str:
    """Return the processor's model, which Linux tells in a file and other systems by `platform`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str:
    """Return the commit that was measured, marked if the files differ from it; "unknown" outside git."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return "unknown"
    return commit + (" with changes" if _git("status", "--porcelain") else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
