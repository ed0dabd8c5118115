"""How much memory the host has left: that of the machine, and of the container that the process runs in."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = _CGROUP) -> int | None:
    """Host memory that can be had without swapping, in bytes; None where the platform does not tell."""
    try:
        free = int(psutil.virtual_memory().available)
    except (OSError, RuntimeError):
        return None
    limit = _container_bytes(cgroup)
    return free if limit is None else min(free, limit)


def _container_bytes(cgroup: Path) -> int | None:
    """What a container's limit leaves, page cache aside; None without a limit (cgroup v2)."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        statistics = (cgroup / "memory.stat").read_text().split()
        cached = int(statistics[statistics.index("inactive_file") + 1])
        return None if limit == "max" else max(0, int(limit) - used + cached)
    except (OSError, ValueError, IndexError):
        return None
