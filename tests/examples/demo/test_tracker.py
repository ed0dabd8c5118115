"""The live-storage tracker counts what is alive, to the byte."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from examples.demo.tracker import CudaPeak, LiveStorageTracker, peak_tracker

CPU = torch.device("cpu")
FLOAT = 4


def test_peak_of_a_chain_is_two_links():
    """Each op needs its input and its output; earlier links are gone."""
    x = torch.randn(1000)
    with LiveStorageTracker(CPU) as tracker:
        for _ in range(5):
            x = x.exp()
    assert tracker.peak_bytes == 2 * 1000 * FLOAT
    tracker.add([])
    assert tracker.live_bytes == 1000 * FLOAT


def test_views_and_repeated_use_count_once():
    """A storage is counted by its own size, however many tensors look at it."""
    with LiveStorageTracker(CPU) as tracker:
        x = torch.zeros(100, 10)
        views = [x.t(), x[:2], x.view(-1), x.expand(3, 100, 10)]
        del x
        assert tracker.live_bytes == 1000 * FLOAT
    del views
    tracker.add([])
    assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 1000 * FLOAT


def test_saved_tensors_are_alive_until_backward():
    """What autograd alone holds counts, although no Python name is left."""
    x = torch.randn(1000, requires_grad=True)
    with LiveStorageTracker(CPU) as tracker:
        loss = x.exp().sin().sum()
        tracker.add([])
        assert tracker.live_bytes == (1000 + 1000) * FLOAT + FLOAT  # x is not touched by sum; exp, sin's input
        loss.backward()
        del loss
    tracker.add([])
    assert tracker.live_bytes == 2 * 1000 * FLOAT  # x and its gradient


def test_persistent_tensors_count_from_the_start():
    """Tensors that no op touches are counted when they are added, and only once."""
    layer = nn.Linear(10, 10, bias=False)
    idle = torch.zeros(50)
    with LiveStorageTracker(CPU) as tracker:
        tracker.add([layer.weight, idle, idle])
        layer(torch.ones(1, 10))
    assert tracker.peak_bytes == (100 + 50 + 10 + 10) * FLOAT


def test_memory_that_another_thread_drops_is_noticed():
    """Storages may die anywhere; the next op sees it."""
    holder = [torch.zeros(1000)]
    with LiveStorageTracker(CPU) as tracker:
        tracker.add(holder)
        worker = threading.Thread(target=holder.clear)
        worker.start()
        worker.join()
        torch.zeros(1)
    assert tracker.live_bytes <= FLOAT
    assert tracker.peak_bytes == 1000 * FLOAT


def test_storage_resized_to_nothing_no_longer_counts():
    """Memory given back without ending the storage is not part of a later peak."""
    x = torch.zeros(1000)
    with LiveStorageTracker(CPU) as tracker:
        tracker.add([x])
        x.untyped_storage().resize_(0)
        kept = torch.zeros(1001)
    assert tracker.peak_bytes == kept.nbytes


def test_nested_arguments_are_seen():
    """Lists of tensors, as torch.cat and foreach ops take them, count."""
    parts = [torch.zeros(10) for _ in range(3)]
    with LiveStorageTracker(CPU) as tracker:
        torch.cat(parts)
    assert tracker.peak_bytes == 60 * FLOAT


def test_other_devices_are_ignored():
    """Tensors elsewhere, here on the meta device, are none of this device's bytes."""
    with LiveStorageTracker(CPU) as tracker:
        torch.zeros(10, device="meta").exp()
    assert tracker.peak_bytes == 0


def test_cpu_is_tracked_by_storage():
    """Without a CUDA allocator to ask, storages are counted."""
    assert isinstance(peak_tracker(CPU), LiveStorageTracker)


@pytest.mark.gpu
def test_cuda_peak_is_the_allocators():
    """On a GPU the allocator's own maximum counts."""
    with peak_tracker(torch.device("cuda", 0)) as tracker:
        torch.zeros(1 << 20, device="cuda")
    assert isinstance(tracker, CudaPeak)
    assert tracker.peak_bytes >= 4 << 20
