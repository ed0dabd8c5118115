"""What the host has left: the machine's memory, or less where a container's limit leaves less."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lightning_offload.plugins import hardware as host_memory
from lightning_offload.plugins.hardware import available_bytes

FREE = 1000


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 1000 free bytes."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=FREE))


def container(folder: Path, limit: str, used: int, cached: int) -> Path:
    """The files of a container's memory controller."""
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\nfile 7\nactive_file 3\ninactive_file {cached}\n")
    return folder


def test_lesser_of_machine_and_container(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """A limit less what is used counts, the page cache aside; never below 0, never more than the machine has."""
    for limit, used, cached, left in [
        ("500", 200, 0, 300),
        ("500", 200, 50, 350),
        ("500", 700, 0, 0),
        ("5000", 200, 0, FREE),
        ("max", 200, 0, FREE),
    ]:
        with subtests.test(limit=limit):
            assert available_bytes(container(tmp_path, limit, used, cached)) == left


@pytest.mark.parametrize("broken", ["memory.max", "memory.current", "memory.stat"])
@pytest.mark.parametrize("text", [None, "", "no number\n"])
def test_machine_counts_where_the_container_does_not_tell(broken: str, text: str | None, tmp_path: Path) -> None:
    """Files that are missing or not understood set no limit."""
    file = container(tmp_path, "500", 200, 0) / broken
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    assert available_bytes(tmp_path) == FREE
    assert available_bytes(tmp_path / "missing") == FREE


def test_limits_of_a_job(tmp_path: Path) -> None:
    """A process's own control group counts, and those that it lies in: in version 2, and in version 1."""
    own = tmp_path / "own"
    for name, lines in {"job": "0::/slurm/job/step\n", "both": "1:cpu:/x\n7:memory,hugetlb:/slurm/job\n0::/\n"}.items():
        own.write_text(lines)
        root = tmp_path / name / ("memory" if name == "both" else "")
        job = root / "slurm" / "job"
        (job / "step").mkdir(parents=True)
        container(job, "600", 200, 50)
        if name == "both":
            (job / "memory.max").rename(job / "memory.limit_in_bytes")
            (job / "memory.current").rename(job / "memory.usage_in_bytes")
        assert available_bytes(tmp_path / name, own) == 450
        assert available_bytes(tmp_path / name, tmp_path / "missing") == FREE


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_platform_that_does_not_tell(error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing is known."""

    def fail() -> Any:
        raise error("no such file")

    monkeypatch.setattr(host_memory.psutil, "virtual_memory", fail)
    assert available_bytes(container(tmp_path, "500", 200, 0)) is None


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some memory is free where the tests run."""
    monkeypatch.undo()
    found = available_bytes()
    assert found is not None
    assert 0 < found <= psutil.virtual_memory().total
