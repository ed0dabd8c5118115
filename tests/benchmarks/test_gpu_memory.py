"""The peak of a step, whoever measures inside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from examples.demo.tracker import CudaPeak


class Allocator:
    """Stands for CUDA's: knows one peak at a time."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def take(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    """An allocator behind torch's functions."""
    fake = Allocator()

    def reset(device: object = None) -> None:
        fake.peak = fake.now

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: fake.peak)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device=None: 2 * fake.peak)
    return fake


def test_a_reset_inside_hides_nothing(allocator: Allocator):
    """The highest peak counts, before or after resets; what came before the measurement does not."""
    allocator.take(100)
    allocator.take(-90)
    with CudaPeak(torch.device("cuda")) as meter:
        allocator.take(50)
        allocator.take(-50)
        torch.cuda.reset_peak_memory_stats()
        assert allocator.peak == 10
        allocator.take(30)
    assert (meter.peak_bytes, meter.reserved_bytes) == (60, 120)
    torch.cuda.reset_peak_memory_stats()
    assert meter.peak_bytes == 60
