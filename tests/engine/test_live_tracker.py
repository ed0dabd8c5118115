"""The tracker is right about programs that can be counted by hand, and agrees with the allocator."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.engine.harness import run
from tests.engine.live_tracker import LiveStorageTracker
from tests.zoo.cases import BY_NAME

KIB = 1024


def test_counts_outputs_until_they_die() -> None:
    """Live bytes follow creation and deletion; the peak stays."""
    with LiveStorageTracker() as tracker, tracker.window() as window:
        first = torch.zeros(256)
        assert tracker.live_bytes == KIB
        second = first + 1
        assert tracker.live_bytes == 2 * KIB
        del first
        assert tracker.live_bytes == KIB
        del second
        assert tracker.live_bytes == 0
    assert window.peak_bytes == 2 * KIB


def test_views_and_writes_in_place_cost_nothing() -> None:
    """A storage counts once, however many tensors look at it, and lives as long as any of them."""
    with LiveStorageTracker() as tracker:
        base = torch.zeros(16, 16)
        view = base.t()[2:5]
        base.add_(1)
        assert tracker.num_storages == 1
        del base
        assert tracker.live_bytes == KIB
        del view
        assert tracker.live_bytes == 0


def test_windows_begin_at_what_is_alive() -> None:
    """A window's peak includes what was alive before it, not what was freed before it."""
    with LiveStorageTracker() as tracker:
        kept = torch.zeros(256)
        torch.zeros(4096)
        with tracker.window() as outer:
            torch.zeros(256)
            with tracker.window() as inner:
                pass
            torch.zeros(512)
    assert outer.peak_bytes == 3 * KIB
    assert inner.peak_bytes == KIB
    assert kept.numel() == 256


def test_register_counts_what_no_op_has_touched() -> None:
    """Parameters, gradients, buffers and optimizer state count once registered."""
    model = nn.BatchNorm1d(256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    tracker = LiveStorageTracker()
    tracker.register(model, optimizer, {"batch": [torch.zeros(0), model.weight]})
    assert tracker.live_bytes == 8 * KIB + 8  # weight and bias, their gradients and momenta, two statistics


def test_sees_saved_tensors_and_backward() -> None:
    """A saved tensor lives until backward drops it; gradients appear."""
    weight = torch.ones(256, requires_grad=True)
    with LiveStorageTracker() as tracker:
        tracker.register(weight)
        loss = (weight * 2).sin().exp().sum()
        assert tracker.live_bytes == 3 * KIB + 4  # weight, the argument of sin, the result of exp, the loss
        loss.backward()
        assert tracker.live_bytes == 2 * KIB + 4  # weight, its gradient, the loss


def test_sees_what_hooks_make() -> None:
    """Ops run inside saved-tensor hooks are seen, a detached copy as much as any."""
    weight = torch.ones(256, requires_grad=True)
    with LiveStorageTracker() as tracker:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t * 1):
            loss = (weight * 2).sin().sum()
        before = tracker.live_bytes
        with tracker.window() as window:
            loss.backward()
    assert window.peak_bytes >= before + KIB


def test_follows_resizes_and_sparse_tensors() -> None:
    """A storage that grows is counted anew when an op touches it; a sparse tensor by its parts."""
    with LiveStorageTracker() as tracker:
        out = torch.zeros(4)
        torch.ones(256, out=out.resize_(256))
        assert tracker.live_bytes == KIB
        del out
        index = torch.arange(4).unsqueeze(0)
        sparse = torch.sparse_coo_tensor(index, torch.ones(4), (8,), check_invariants=True)
        assert tracker.live_bytes == 4 * 8 + 4 * 4
        del sparse, index
        assert tracker.live_bytes == 0


@pytest.mark.parametrize("name", ["resnet-basic", "gpt2-sdpa", "inplace-views"])
def test_agrees_with_the_allocator(name: str, tmp_path: Path) -> None:
    """The live bytes after a plain step, and its peak, are those that torch's CPU allocator reports."""
    tracker = LiveStorageTracker()
    case = BY_NAME[name]
    gc.collect()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with profiler, tracker, tracker.window() as window:
        run(case, steps=2, on_start=lambda job: tracker.register(job.model), record=False)
    trace = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    levels = [event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]"]
    base = levels[0] - next(e["args"]["Bytes"] for e in events if e.get("name") == "[memory]")
    assert max(levels) - base == pytest.approx(window.peak_bytes, rel=0.05)
