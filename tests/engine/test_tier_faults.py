"""Whatever a disk refuses: the documented outcome, never a wrong gradient, and nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_offload import MemoryPlugin
from lightning_offload.errors import SpillError
from lightning_offload.plugins import devices, settings
from tests.engine.faults import FAULTY_STEPS, active, interruption
from tests.engine.harness import run
from tests.engine.tier_runs import (
    CASE,
    MIB,
    STRICT,
    assert_exact,
    assert_usable,
    failing,
    failing_after,
    patched,
    train,
    warned,
)
from tests.shares import pairs
from tests.zoo.case import Job

AT = pytest.mark.parametrize("step", FAULTY_STEPS)
POLICIES = pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])


@pytest.fixture(autouse=True)
def measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is measured under the fault, as where a machine is new; what is known of it is not asked again."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD_CACHE", "")
    monkeypatch.setattr(devices, "_LINK_BLOCK_BYTES", 2 * MIB)  # so that it takes no longer than what is tested


# ---- no room on disk, no folder


FULL = patched(os, "posix_fallocate", failing(errno.ENOSPC))


@POLICIES
def test_full_disk_at_the_start(policy: str, tmp_path: Path) -> None:
    """With tier="disk" the first step that would need it raises before it runs; with room again, all is well."""
    memory = MemoryPlugin(policy=policy, tier="disk", spill_dir=tmp_path)
    steps: list[int] = []
    case = STRICT
    with FULL(), pytest.raises(SpillError, match=r"want .* on disk in .*free some space there.*spill_dir.*tier='host'"):
        run(case, memory=memory, after_step=lambda job: steps.append(job.index))
    assert steps == [0], "the recorded step keeps what it cannot swap"
    assert active() == []
    assert_usable(memory)


@POLICIES
def test_full_disk_and_host_memory_beside_it(policy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With tier="auto" plans are made without the disk, with a warning."""
    memory = MemoryPlugin(policy=policy, host_budget=2 * MIB, spill_dir=tmp_path)
    assert_exact(train(memory, FULL))
    report = memory.report()
    assert (report.phase, report.disk_bytes) == ("planned", 0)
    assert report.host_bytes <= 2 * MIB
    assert warned(caplog, "planning without a disk tier") == 1


def test_folder_that_is_no_good_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing, a file, or not writable: the constructor raises and names the folder."""
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(SpillError, match=f"{name}' is no folder: create it"):
            MemoryPlugin(tier="disk", spill_dir=tmp_path / name)
    monkeypatch.setattr(settings.os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(SpillError, match="is not writable: change its permissions"):
        MemoryPlugin(tier="disk", spill_dir=tmp_path)


def test_folder_gone_before_the_first_step(tmp_path: Path) -> None:
    """With tier="disk" that is an error before a step that needs it, which names the folder."""
    folder = tmp_path / "spill"
    folder.mkdir()
    memory = MemoryPlugin(policy="all-swap", tier="disk", spill_dir=folder)
    folder.rmdir()
    with pytest.raises(SpillError, match=f"no spill file in '{folder}'.*name a folder that exists"):
        run(STRICT, memory=memory)
    folder.mkdir()
    assert_usable(memory)


def test_read_only_folder_found_out_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With tier="auto" a folder that turns out not to be writable is done without."""
    real = os.open

    def refused(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith(str(tmp_path)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, *args, **kwargs)

    memory = MemoryPlugin(policy="all-swap", host_budget=2 * MIB, spill_dir=tmp_path)
    assert_exact(train(memory, patched(os, "open", refused)))
    assert memory.report().disk_bytes == 0
    assert warned(caplog, "planning without a disk tier") == 1


def test_folder_deleted_under_way(tmp_path: Path) -> None:
    """The file has no name: steps go on; without a folder there is no new one after detach, with one there is."""
    folder = tmp_path / "spill"
    folder.mkdir()
    memory = MemoryPlugin(policy="all-swap", tier="disk", spill_dir=folder)

    def after_step(job: Job) -> None:
        if job.index == 2:
            shutil.rmtree(folder)

    assert_exact(run(CASE, memory=memory, after_step=after_step))
    assert memory.report().disk_bytes > 0
    with pytest.raises(SpillError, match="no spill file in"):
        run(STRICT, memory=memory)
    folder.mkdir()
    assert_usable(memory)


# ---- transfers


@pytest.mark.parametrize("unit", [4096, 1000])
@pytest.mark.parametrize("verb", ["write", "read"])
def test_short_transfers(verb: str, unit: int, tmp_path: Path) -> None:
    """However little a call moves, all of it arrives."""
    write, read = os.pwrite, os.preadv
    fault = {
        "write": patched(os, "pwrite", lambda fd, data, at: write(fd, data[:unit], at)),
        "read": patched(os, "preadv", lambda fd, views, at: read(fd, [views[0][:unit]], at)),
    }[verb]
    memory = MemoryPlugin(policy="all-swap", tier="disk", spill_dir=tmp_path)
    assert_exact(train(memory, fault))
    assert memory.report().disk_bytes > 0


WHEN = list(itertools.product(["all-swap", "all-recompute"], FAULTY_STEPS))
WHAT = [(errno.EIO, 0), (errno.ENOSPC, 0), (errno.ENOSPC, 2), (errno.EIO, 2)]


@pytest.mark.parametrize(("when", "what"), pairs(WHEN, WHAT, every=4), ids=str)
def test_write_error(
    when: tuple[str, int], what: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The step in which it happens is exact, values stay on the device, and later plans do without the disk."""
    (policy, step), (number, written) = when, what
    memory = MemoryPlugin(policy=policy, tier="disk", spill_dir=tmp_path)
    fault = patched(os, "pwrite", failing_after(os.pwrite, written, number))
    outcome = train(memory, fault, step)
    assert interruption(outcome, step) == "not interrupted"
    assert_exact(outcome)
    if policy == "all-swap" or step < 2:  # else nothing is written
        assert warned(caplog, "is given up") == 1
        assert memory.report().swapped_bytes == 0
    assert_usable(memory)


@AT
def test_write_error_with_host_memory_beside_the_disk(
    step: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With tier="auto" what has room on the host still goes there."""
    memory = MemoryPlugin(policy="all-swap", host_budget=2 * MIB, spill_dir=tmp_path)
    fault = patched(os, "pwrite", failing_after(os.pwrite, 1, errno.EIO))
    assert_exact(train(memory, fault, step))
    assert warned(caplog, "is given up") == 1
    report = memory.report()
    assert 0 < report.host_peak_bytes <= report.host_bytes <= 2 * MIB
    assert 0 < report.swapped_bytes <= 2 * MIB


def test_write_error_under_a_budget_that_needs_the_disk(tmp_path: Path) -> None:
    """What cannot be done without the disk is refused before the next step, with the smallest feasible budget."""
    probe = MemoryPlugin(policy="all-swap", tier="disk", spill_dir=tmp_path)
    train(probe)
    floor = probe.report().floor_bytes
    memory = MemoryPlugin(budget=floor, policy="all-swap", tier="disk", spill_dir=tmp_path)
    outcome = train(memory, patched(os, "pwrite", failing(errno.EIO)), 4)
    assert interruption(outcome, 4) == "not interrupted"
    assert interruption(outcome, 5).startswith("BudgetInfeasibleError")


@pytest.mark.parametrize(("step", "num_read"), pairs([0, 2, 4], [0, 2], every=2))
def test_read_error(step: int, num_read: int, tmp_path: Path) -> None:
    """The only copy is gone: backward raises, hooks are off, and the model is as it was before the step."""
    memory = MemoryPlugin(policy="all-swap", tier="disk", spill_dir=tmp_path)
    outcome = train(memory, patched(os, "preadv", failing_after(os.preadv, num_read, errno.EIO)), step)
    assert interruption(outcome, step).startswith("SpillError: a copy between tiers failed: could not read")
    assert_exact(outcome, skipped=step)
    assert_usable(memory)


def test_read_error_while_verifying(tmp_path: Path) -> None:
    """A replay whose original cannot be read back is no wrong gradient either."""
    memory = MemoryPlugin(policy="all-recompute", tier="disk", spill_dir=tmp_path)
    outcome = train(memory, patched(os, "preadv", failing(errno.EIO)), 1)
    assert interruption(outcome, 1).startswith(("SpillError", "not interrupted"))
    assert_exact(outcome, skipped=-1 if interruption(outcome, 1) == "not interrupted" else 1)
    assert_usable(memory)


def test_the_step_after_a_read_error_needs_no_new_attach(tmp_path: Path) -> None:
    """Detaching and attaching again is possible, not necessary."""
    memory = MemoryPlugin(policy="all-swap", tier="disk", spill_dir=tmp_path)
    fault = patched(os, "preadv", failing(errno.EIO))

    def after_step(job: Job) -> None:
        if job.index == 5:
            memory.detach()
            memory.attach(job.model)

    steps = iter(range(CASE.steps))
    outcome = run(
        CASE,
        memory=memory,
        around=lambda: fault() if next(steps) == 5 else contextlib.nullcontext(),
        after_step=after_step,
    )
    assert interruption(outcome, 5).startswith("SpillError")
    assert_exact(outcome, skipped=5)
