"""CPU offloading, Layrub, Layup and save_on_cpu: what moves, what is waited for, how far ahead it comes back."""

from __future__ import annotations

import dataclasses

from lightning_offload.graph import MemoryPlan
from lightning_offload.graph.memory_plan import AT_PACK, ON_DEMAND
from lightning_offload.planning.planner import plan
from tests.graph.building import DEVICE
from tests.planning.policies.nets import Net, actions_of, conv_bn_relu, conv_relu


def _schedule(found: MemoryPlan) -> dict[int, tuple[int, int]]:
    return {d.storage: (d.release_op, d.prefetch_unpack) for d in found.decisions if d.action == "swap"}


def test_cpu_offload_waits_at_each_layer_and_looks_one_ahead() -> None:
    """Released before the op after the last reader; brought back at the node before the one that needs it."""
    graph = conv_bn_relu()
    found = plan(graph, DEVICE, None, policy="cpu-offload")
    # Forward ops: conv 0, norm 1, ReLU 2, conv 3, ... Nodes: ReLU 0 (6), norm 1 (5), conv 2 (4), ReLU 3, norm 4 (3).
    assert _schedule(found) == {1: (2, 6), 2: (4, 4), 3: (5, 3), 4: (7, 1), 5: (8, 0)}


def test_layrub_lets_a_copy_out_take_one_layer_more() -> None:
    """Release is one op later than with CPU offloading, prefetch the same; what then comes too late stays."""
    found = plan(conv_bn_relu(), DEVICE, None, policy="layrub")
    assert _schedule(found) == {1: (3, 6), 2: (5, 4), 3: (6, 3), 4: (8, 1)}


def test_layrub_keeps_intermediates_constant_in_depth() -> None:
    """Beyond a few layers, more of them take no more memory."""
    peaks = {depth: plan(conv_relu(depth), DEVICE, None, policy="layrub").predicted_peak_bytes for depth in (8, 16, 64)}
    assert len(set(peaks.values())) == 1
    kept = plan(conv_relu(64), DEVICE, None, policy="keep-all").predicted_peak_bytes
    assert peaks[64] < kept / 8


def test_layup_transfers_convolutions_and_recomputes_the_rest() -> None:
    """Results of convolutions are swapped and back in time for the replays that read them."""
    found = plan(conv_bn_relu(), DEVICE, None, policy="layup")
    assert actions_of(found) == {"swap": [1, 3], "recompute": [2, 4, 6]}
    # 4 is first read by node 2, whose replay reads 3; 2 by node 5, whose replay reads 1.
    assert _schedule(found) == {1: (3, 4), 3: (6, 1)}


def test_layup_transfers_sums_and_what_cannot_be_replayed() -> None:
    """A residual sum would chain back to the input; a fully connected layer is dear; an opaque ReLU has no choice."""
    net = Net()
    x = net.layer("addmm", net.given(1), save="output")
    y = net.layer("tanh", x, save="output")
    z = net.layer("add", x, y, save="output")
    a = net.layer("sigmoid", z, save="output", replayable=False)
    b = net.layer("gelu", a, save="output")
    for _ in range(3):
        b = net.layer("relu", b, save="")
    storages = [net.values[v].storage for v in (x, y, z, a)]
    found = actions_of(plan(net.finish(), DEVICE, None, policy="layup"))
    assert [s for s in storages if s in found["swap"]] == [storages[0], storages[2], storages[3]]
    assert storages[1] in found["recompute"]


def test_save_on_cpu_waits_for_every_copy() -> None:
    """Everything leaves at its pack and comes back on demand: compute waits for all bytes both ways."""
    found = plan(conv_relu(), DEVICE, None, policy="save-on-cpu")
    assert _schedule(found) == dict.fromkeys((2, 4, 6, 8), (AT_PACK, ON_DEMAND))
    assert found.predicted_stall_seconds == 2 * 4 * 100 / 100.0
    overlapped = plan(conv_relu(), DEVICE, None, policy="all-swap")
    assert overlapped.predicted_step_seconds < found.predicted_step_seconds


def test_save_on_cpu_on_a_short_host() -> None:
    """The rest is kept."""
    short = dataclasses.replace(DEVICE, host_memory_bytes=2 * 4096)
    found = plan(conv_relu(size=4096), short, None, policy="save-on-cpu")
    assert len(actions_of(found)["swap"]) == 2


def test_layer_by_layer_policies_on_a_short_host_keep_the_rest() -> None:
    """First come, first served."""
    short = dataclasses.replace(DEVICE, host_memory_bytes=4096)
    graph = conv_bn_relu(size=4096)
    for policy in ("cpu-offload", "layrub", "layup"):
        assert actions_of(plan(graph, short, None, policy=policy))["swap"] == [1]
