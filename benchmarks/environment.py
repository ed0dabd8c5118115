"""Device, versions and commit: what a figure depends on besides its configuration."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import lightning_offload

_CHECKOUT = Path(__file__).resolve().parents[1]
_MEASURED = (":/", ":(exclude,top)benchmarks/results", ":(exclude,top)*.md")  # a run writes the others itself
_PACKAGES = ("torch", "lightning", "transformers", "numpy", "scipy")


def device() -> torch.device:
    """Return the device to measure on: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(kind: str | None = None) -> str:
    """Return the device's name for people and for file names; by default that of the GPU if there is one."""
    return torch.cuda.get_device_name() if torch.device(kind or device()).type == "cuda" else "cpu"


def is_emulated() -> bool:
    """Whether CUDA is the emulated device of tests/emulated_cuda, whose figures say nothing of a GPU."""
    return "emulated_cuda" in sys.modules


def describe(kind: str | None = None) -> dict[str, Any]:
    """Return processor, threads, versions and commit, ready for JSON, and a GPU's memory and driver."""
    versions = {"python": platform.python_version(), "lightning_offload": lightning_offload.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    on_gpu = torch.device(kind or device()).type == "cuda"
    if on_gpu:
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
        versions["driver"] = _driver()
    return {
        "processor": _processor(),
        "num_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "commit": _commit(),
        **({"emulated": True} if on_gpu and is_emulated() else {}),
        **({"device_memory_bytes": torch.cuda.get_device_properties(0).total_memory} if on_gpu else {}),
    }


def digest_of(*places: str) -> str:
    """What tells whether figures are of this very code: a digest of Python files, or of all that are in folders.

    Args:
        places: Below the checkout.
    """
    digest = hashlib.sha256()
    for place in places:
        for path in sorted((_CHECKOUT / place).rglob("*.py")) if (_CHECKOUT / place).is_dir() else [_CHECKOUT / place]:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _driver() -> str:
    """Return the version of the GPU's driver, if its library tells."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except Exception:  # a figure without this is better than none
        return "unknown"
    return str(version)


def _processor() -> str:
    """Return the processor's model, which Linux tells in a file and other systems by `platform`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit() -> str:
    """Return the commit that was measured, marked if the files differ from it, results and documents aside.

    Outside git it is what `BENCHMARK_COMMIT` in the environment says, or "unknown".
    """
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return os.environ.get("BENCHMARK_COMMIT", "unknown")
    return commit + (" with changes" if _git("status", "--porcelain", "--", *_MEASURED) else "")


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
