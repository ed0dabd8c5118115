"""Live bytes are counted exactly, by identity."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_offload.capture.live import LiveBytes
from lightning_offload.tensors.op_facts import facts_of
from tests.capture.devices import pretend_on
from tests.capture.recording import CPU, observe
from tests.engine.live_tracker import LiveStorageTracker

ROW = 4 * 100


def measure(step: object) -> LiveBytes:
    """Watch a step under the floor policy."""
    live = LiveBytes(CPU)
    observe(step, live)  # type: ignore[arg-type]
    return live


def test_peak_of_temporaries_by_hand() -> None:
    """Results count from birth to death; the peak is that of the most at once."""
    x = torch.ones(100)

    def step() -> None:
        a = x + 1.0
        b = a + 1.0  # two alive
        del a
        c = b + 1.0  # two alive
        d = c + 1.0  # three alive
        del b, c, d
        x + 1.0

    live = measure(step)
    assert live.peak_bytes == live.forward_peak_bytes == 3 * ROW
    assert live.backward_peak_bytes == 0
    assert list(live.persistent_storages().values()) == [ROW]


def test_views_and_in_place_ops_count_nothing() -> None:
    """One storage counts once, however many tensors are on it and however often it is written."""
    x = torch.ones(100)

    def step() -> None:
        y = x + 1.0
        y.view(10, 10).t()[:3].add_(1.0)
        y.zero_()

    assert measure(step).peak_bytes == ROW


def test_backward_is_counted_apart() -> None:
    """Peaks of forward and backward are separate; a swapped tensor counts again when it is back."""
    x = torch.ones(100, requires_grad=True)

    def step() -> None:
        loss = x.exp().sum()
        loss.backward()

    live = measure(step)
    # forward: the result of exp, and the sum. It is swapped out while the program still holds it for the sum.
    assert live.forward_peak_bytes == ROW + 4
    # backward: sum, seed, the result back (the seed is expanded without memory), and the product
    assert live.backward_peak_bytes == 4 + 4 + 2 * ROW
    assert live.peak_bytes == live.backward_peak_bytes


def test_dead_persistent_storages_are_forgotten() -> None:
    """A storage from before the step that has died since no longer counts as state."""
    held = [torch.ones(100)]
    live = LiveBytes(CPU)
    observe(lambda: held[0] + 1.0, live)
    assert list(live.persistent_storages().values()) == [ROW]
    held.clear()
    assert live.persistent_storages() == {}


def test_agrees_with_an_independent_tracker() -> None:
    """Over a training step of a small net the peak equals that of a tracker that does not trust the runtime."""
    net = nn.Sequential(nn.Linear(64, 128), nn.Sigmoid(), nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 8))
    x = torch.randn(16, 64)
    live = LiveBytes(CPU)

    def step() -> None:
        loss: Tensor = net(x).square().mean()
        loss.backward()

    with LiveStorageTracker() as tracker:
        tracker.register(net, x)
        with tracker.window() as window:
            observe(step, live)
    assert live.peak_bytes + sum(live.persistent_storages().values()) == window.peak_bytes


def test_other_devices_of_the_type_do_not_count() -> None:
    """Tensors on cuda:1 are none of a step on cuda:0."""
    live = LiveBytes(torch.device("cuda", 0))
    results = [pretend_on("cuda:0"), pretend_on("cuda:1")]
    for result in results:
        live.on_op(facts_of(torch.ops.aten.exp.default), (pretend_on("cuda:1"),), {}, result, 0.0)
    assert live.peak_bytes == ROW
    assert live.persistent_storages() == {}
