"""A disk that stalls, stutters, or is ten times slower from one step to the next costs time, and never the promise.

The disk here copies nothing before it must: a copy ends when it is waited for, or when dice say so, after all that was
asked for before it, and until then it holds the device memory, as a thread does that waits for a busy disk. What a copy
is said to have taken is made up too. So no thread and no clock has a part in this, and a wait that is missing shows as
memory, or as other bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_offload import MemoryPlugin
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph import DeviceSpec
from lightning_offload.plugins import hardware, link_rates
from lightning_offload.runtime import tiers
from lightning_offload.runtime.lanes import Block, Copy, CopyLanes, CpuMover, LaneTimes
from lightning_offload.runtime.native import build
from lightning_offload.runtime.staged_lanes import StagedLanes
from tests.engine.live_tracker import LiveStorageTracker
from tests.one_thread import one_thread as one_thread
from tests.shares import is_all, pairs

ENGINES = ("python", "native")
SEEDS = range(24 if is_all() else 4)
STEPS = 14
ROWS, WIDTH = 1024, 64
ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh)


class _Late(Copy):
    """A copy that is made when it is waited for, or before."""

    def __init__(self, disk: SlowDisk, seconds: float, make: Callable[[], None]) -> None:
        self._disk = disk
        self._seconds = seconds
        self._make: Callable[[], None] | None = make

    @property
    @override
    def is_done(self) -> bool:
        return self._make is None

    @override
    def wait(self) -> float:
        if self.is_done:
            return 0.0
        self._disk.work_until(self)
        return self._seconds

    @override
    def synchronize(self) -> None:
        self.wait()

    def make(self) -> None:
        """Move the bytes and let go of the memory."""
        assert self._make is not None
        self._make()
        self._make = None


class SlowDisk(CopyLanes):
    """See the module's docstring.

    Args:
        dice: Of the faults.
        bytes_per_second: Of the disk while nobody else uses it.
    """

    def __init__(self, dice: random.Random, bytes_per_second: float) -> None:
        self.num_copies = 0
        self.most_waiting = 0
        self._dice, self._rate = dice, bytes_per_second
        self._slowness, self._diligence = 1.0, 1.0
        self._over = StagedLanes(CpuMover())
        self._over.close()
        self._waiting: list[_Late] = []
        self._times = LaneTimes()

    def begin_step(self) -> None:
        """Another fault, or none, until this is called again."""
        self._slowness = self._dice.choice([0.1, 1.0, 1.0, 10.0, 1000.0])
        self._diligence = self._dice.choice([0.0, 0.0, 0.2, 0.8, 1.0])

    @override
    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        seconds = self._seconds_of(block)
        self._times = self._times.added(LaneTimes(out_bytes=block.num_bytes, out_seconds=seconds))
        return self._asked(seconds, lambda: self._over.swap_out(storage, block).synchronize())

    @override
    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        seconds = self._seconds_of(block)
        self._times = self._times.added(LaneTimes(in_bytes=block.num_bytes, in_seconds=seconds))
        return self._asked(seconds, lambda: self._over.swap_in(block, storage).synchronize())

    def _seconds_of(self, block: Block) -> float:
        return self._slowness * block.num_bytes / self._rate

    def _asked(self, seconds: float, make: Callable[[], None]) -> Copy:
        copy = _Late(self, seconds, make)
        self.num_copies += 1
        self._waiting.append(copy)
        while self._waiting and self._dice.random() < self._diligence:
            self.work_until(self._waiting[0])
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        return copy

    def work_until(self, copy: _Late) -> None:
        """Make the copies up to this one."""
        while not copy.is_done:
            self._waiting.pop(0).make()

    @override
    def take_times(self) -> LaneTimes:
        self.drain()
        taken, self._times = self._times, LaneTimes()
        return taken

    @override
    def settle(self) -> None:
        self.drain()

    @override
    def drain(self) -> None:
        while self._waiting:
            self._waiting.pop(0).make()

    @override
    def close(self) -> None:
        self.drain()


@dataclasses.dataclass(kw_only=True)
class Ran:
    """What a training showed.

    Attributes:
        peaks: The true peak of each step.
        predicted: By step, what its plan was predicted to take; None while there was none.
        weights: At the end.
        warnings: What the plugin warned of.
    """

    peaks: list[int] = dataclasses.field(default_factory=list)
    predicted: list[int | None] = dataclasses.field(default_factory=list)
    weights: list[Tensor] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, on what; drawn by dice.

    Attributes:
        abandoned: The steps whose forward is thrown away first.
    """

    depth: int
    activation: Callable[[], nn.Module]
    has_state: bool
    rate: float
    abandoned: frozenset[int]

    @classmethod
    def drawn(cls, dice: random.Random) -> Setting:
        """Any."""
        return cls(
            depth=dice.choice([3, 4, 6, 8]),
            activation=dice.choice(ACTIVATIONS),
            has_state=dice.random() < 0.5,
            rate=10 ** dice.uniform(7.0, 10.0),
            abandoned=frozenset(step for step in range(6, STEPS) if dice.random() < 0.3),
        )

    def train(self, memory: MemoryPlugin | None, disk: SlowDisk | None = None) -> Ran:
        """Train it, plainly without a plugin."""
        torch.manual_seed(0)
        layers = [part for _ in range(self.depth) for part in (nn.Linear(WIDTH, WIDTH), self.activation())]
        model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9 if self.has_state else 0.0)
        tracker, ran = LiveStorageTracker(), Ran()
        gc.collect()
        gc.freeze()
        with tracker, memory or contextlib.nullcontext():
            tracker.register(model)
            if memory is not None:
                memory.attach(model)
            for step in range(STEPS):
                if disk is not None:
                    disk.begin_step()
                inputs, labels = torch.randn(ROWS, WIDTH), torch.randint(10, (ROWS,))
                if step in self.abandoned:
                    with memory.step(inputs, labels) if memory is not None else contextlib.nullcontext():
                        nn.functional.cross_entropy(model(inputs), labels)
                with tracker.window() as window, memory.step(inputs, labels) if memory else contextlib.nullcontext():
                    tracker.register_all()
                    nn.functional.cross_entropy(model(inputs), labels).backward()
                ran.peaks.append(window.peak_bytes)
                ran.predicted.append(memory.report().predicted_peak_bytes if memory is not None else None)
                optimizer.step()
                optimizer.zero_grad()
                del inputs, labels
        ran.weights = [weight.detach() for weight in model.parameters()]
        return ran


@contextlib.contextmanager
def _on(disk: SlowDisk, rate: float) -> Iterator[None]:
    """Have plugins use this disk, which they think has this rate."""
    spec = DeviceSpec(
        name="a host", kind="cpu", memory_bytes=None, copy_interference=0.5, overhead_seconds=30e-6,
        d2h_bytes_per_second=1e10, h2d_bytes_per_second=1e10,
        disk_write_bytes_per_second=rate, disk_read_bytes_per_second=rate,
    )  # fmt: skip
    with (
        mock.patch.object(tiers, "StagedLanes", return_value=disk),
        mock.patch.object(hardware, "measure_spec", return_value=spec),
        mock.patch.object(link_rates, "MIN_BYTES", 1),  # there are no latencies
    ):
        yield


def _least_budget(setting: Setting, folder: Path) -> int:
    """The smallest budget that errors name, on a disk that never fails to do its best."""
    budget = 1 << 20
    for _ in range(8):
        try:
            with _on(SlowDisk(random.Random(0), setting.rate), setting.rate):
                setting.train(MemoryPlugin(budget=budget, tier="disk", spill_dir=folder))
        except BudgetInfeasibleError as error:
            budget = error.floor_bytes
        else:
            return budget
    raise AssertionError("each smallest budget was too small for the next plan")


@functools.cache
def _known(seed: int) -> tuple[Ran, int]:
    """A plain training of what a seed draws, and the smallest budget, which no engine makes another."""
    setting = Setting.drawn(random.Random(seed))
    with tempfile.TemporaryDirectory() as folder:
        return setting.train(None), _least_budget(setting, Path(folder))


@pytest.mark.parametrize(("seed", "engine"), pairs(SEEDS, ENGINES, every=2))
def test_no_fault_of_the_disk_breaks_the_promise(
    seed: int, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Peaks, and plans, are within the named minimum in each step; bits are plain's; nothing is warned of."""
    if engine == "native" and (why := build.why_not()):
        pytest.skip(f"no native core: {why}")
    monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", engine)
    dice = random.Random(seed)
    setting = Setting.drawn(dice)
    plain, budget = _known(seed)
    caplog.clear()
    disk = SlowDisk(dice, setting.rate)
    with _on(disk, setting.rate * 10 ** dice.uniform(-2, 1)), caplog.at_level(logging.WARNING):
        ran = setting.train(MemoryPlugin(budget=budget, tier="disk", spill_dir=tmp_path), disk)
    assert max(ran.peaks) <= budget
    assert all(predicted is None or predicted <= budget for predicted in ran.predicted)
    assert all(map(torch.equal, ran.weights, plain.weights))
    assert not [record.getMessage() for record in caplog.records if record.name.startswith("lightning_offload")]
    assert max(plain.peaks) > budget
    assert disk.num_copies > 0
