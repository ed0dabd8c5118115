"""vDNN: which inputs leave, when the end of a layer waits for them, and how far prefetch looks."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph import StepGraph
from lightning_offload.planning.planner import plan
from tests.graph.building import DEVICE
from tests.planning.policies.nets import Net, actions_of, conv_bn_relu, conv_relu

FAST = dataclasses.replace(DEVICE, d2h_bytes_per_second=1e6, h2d_bytes_per_second=1e6)


def _schedule(graph: StepGraph, policy: str) -> dict[int, tuple[int, int]]:
    found = plan(graph, DEVICE, None, policy=policy)
    return {d.storage: (d.release_op, d.prefetch_unpack) for d in found.decisions}


def test_conv_offloads_inputs_of_convolutions_only() -> None:
    """Convolutions read the ReLUs' results 2 and 4; the normalizations' inputs stay, and 6 has no reader."""
    graph = conv_bn_relu()
    assert actions_of(plan(graph, DEVICE, None, policy="vdnn-conv")) == {"swap": [2, 4], "recompute": []}
    assert actions_of(plan(graph, DEVICE, None, policy="vdnn-all")) == {"swap": [1, 2, 3, 4, 5], "recompute": []}


def test_end_of_the_last_reader_waits() -> None:
    """The device copy is released before the op after the one that reads it last."""
    graph = conv_bn_relu()
    for storage, (release, _) in _schedule(graph, "vdnn-all").items():
        reader = max(
            i
            for i, op in enumerate(graph.ops)
            if op.phase == "forward" and any(graph.values[v].storage == storage for v in op.inputs)
        )
        # Normalization is followed by a ReLU in place, which reads what normalization made, not what is saved.
        assert release == reader + 1


def test_prefetch_takes_one_layer_at_a_time_and_stops_behind_a_convolution() -> None:
    """Backward is ReLU, norm, conv, three times: each node brings back the next input, none past a convolution."""
    prefetch = {s: ordinal for s, (_, ordinal) in _schedule(conv_bn_relu(), "vdnn-all").items()}
    # 5 is wanted by node 1, 4 by node 2, 3 by node 4, 2 by node 5, 1 by node 7. Node 2, a convolution, finds 3 behind
    # it before the next convolution; nodes 3 and 5 look on in the same way.
    assert prefetch == {5: 0, 4: 1, 3: 2, 2: 3, 1: 5}


def test_prefetch_of_a_convolution_waits_until_it_is_the_next_one() -> None:
    """Where only inputs of convolutions are offloaded, no node looks past the nearest convolution."""
    assert _schedule(conv_relu(), "vdnn-conv") == {2: (3, 3), 4: (5, 1), 6: (7, 0)}
    # Nodes: 0 ReLU, 1 conv (reads 6), 2 ReLU, 3 conv (reads 4), 4 ReLU, 5 conv (reads 2).


def test_window_ends_at_a_convolution_that_needs_nothing() -> None:
    """Storage 1 is wanted behind a convolution with nothing offloaded: that one's own backward brings it back."""
    net = Net()
    x = net.layer("relu", net.given(1), save="output")
    batch = net.given(1)
    net.layer("tanh", x, save="input")
    net.layer("convolution", batch, save="input")  # reads the batch, which is not offloaded
    net.layer("sigmoid", batch, save="output")
    graph = net.finish()
    # Backward: node 0 sigmoid, node 1 convolution, node 2 tanh, which wants storage x.
    assert {s: ordinal for s, (_, ordinal) in _schedule(graph, "vdnn-all").items()} == {0 + 1: 1}


def test_dyn_takes_the_fastest_that_fits() -> None:
    """Nothing is offloaded while that fits; it is as fast as the static variants at least, and fits where they do."""
    graph = conv_bn_relu(depth=6)
    peaks = {p: plan(graph, FAST, None, policy=p).predicted_peak_bytes for p in ("keep-all", "vdnn-conv", "vdnn-all")}
    assert peaks["keep-all"] > peaks["vdnn-conv"] > peaks["vdnn-all"]
    slow = dataclasses.replace(FAST, d2h_bytes_per_second=50.0)
    for name, peak in peaks.items():
        found = plan(graph, slow, peak, policy="vdnn-dyn")
        assert found.predicted_step_seconds <= plan(graph, slow, None, policy=name).predicted_step_seconds
        assert found.predicted_peak_bytes <= peak
        assert found.policy == "vdnn-dyn"
    assert actions_of(plan(graph, slow, peaks["keep-all"], policy="vdnn-dyn"))["swap"] == []
    with pytest.raises(BudgetInfeasibleError) as caught:
        plan(graph, slow, peaks["vdnn-all"] - 1, policy="vdnn-dyn")
    assert caught.value.floor_bytes <= peaks["vdnn-all"]
    assert (
        plan(graph, slow, caught.value.floor_bytes, policy="vdnn-dyn").predicted_peak_bytes <= caught.value.floor_bytes
    )


def test_the_discipline_does_not_bend_to_the_budget() -> None:
    """Prefetched and unreleased copies count: a budget below that peak is infeasible for vDNN."""
    graph = conv_relu(depth=6)
    found = plan(graph, DEVICE, None, policy="vdnn-all")
    assert plan(graph, DEVICE, found.predicted_peak_bytes, policy="vdnn-all").decisions == found.decisions
    with pytest.raises(BudgetInfeasibleError, match="vdnn-all") as caught:
        plan(graph, DEVICE, found.predicted_peak_bytes - 1, policy="vdnn-all")
    assert caught.value.floor_bytes == found.predicted_peak_bytes


def test_a_short_host_takes_the_first_layers() -> None:
    """What the host has no room for stays on the device."""
    graph = conv_relu(size=4096)
    short = dataclasses.replace(DEVICE, host_memory_bytes=2 * 4096)
    assert actions_of(plan(graph, short, None, policy="vdnn-conv"))["swap"] == [2, 4]
