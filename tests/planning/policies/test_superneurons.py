"""SuperNeurons: checkpoints and segments, recomputation by cost, and a cache that evicts only under pressure."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.planning.planner import plan
from lightning_offload.planning.policies.layers import Layers
from lightning_offload.planning.policies.superneurons import cost_aware, is_checkpoint, segments
from lightning_offload.planning.problem import Problem
from tests.graph.building import DEVICE
from tests.planning.policies.nets import Net, actions_of, conv_bn_relu


def test_without_pressure_nothing_is_transferred() -> None:
    """The cache holds all results of convolutions; activation functions are recomputed all the same."""
    found = plan(conv_bn_relu(), DEVICE, None, policy="superneurons")
    assert actions_of(found) == {"swap": [], "recompute": [2, 4, 6]}
    assert all(decision.memo for decision in found.decisions)


def test_eviction_takes_the_least_recently_used_convolutions_first() -> None:
    """As the budget falls, results of convolutions leave in the order of forward, where that is the fastest."""
    graph, evicted = conv_bn_relu(depth=6), []
    free = plan(graph, DEVICE, None, policy="superneurons").predicted_peak_bytes
    with pytest.raises(BudgetInfeasibleError) as caught:
        plan(graph, DEVICE, 1, policy="superneurons")
    for budget in range(caught.value.floor_bytes, free + 1, 25):
        evicted.append(tuple(actions_of(plan(graph, DEVICE, budget, policy="superneurons"))["swap"]))
    outputs = (1, 3, 5, 7, 9, 11)
    assert all(found == outputs[: len(found)] for found in evicted)
    assert len(evicted[0]) >= len(evicted[-1])
    assert len(set(evicted)) >= 3
    recomputing = plan(graph, DEVICE, None, policy="superneurons")
    assert actions_of(recomputing)["swap"] == []
    assert plan(graph, DEVICE, free, policy="superneurons").predicted_step_seconds <= recomputing.predicted_step_seconds


def _branches() -> tuple[Net, dict[str, int]]:
    net = Net()
    values = {}
    values["conv"] = net.layer("convolution", net.given(1), save="output")
    values["relu"] = net.layer("relu", values["conv"], save="output")
    values["pool"] = net.layer("max_pool2d_with_indices", values["relu"], save="output")
    values["fork"] = net.layer("tanh", values["pool"], save="output")
    values["left"] = net.layer("sigmoid", values["fork"], save="output")
    values["join"] = net.layer("add", values["left"], values["fork"], save="output")
    values["norm"] = net.layer("native_layer_norm", values["join"], save="output")
    values["drop"] = net.layer("native_dropout", values["norm"], save="output", replayable=False)
    values["softmax"] = net.layer("_softmax", values["drop"], save="output")
    values["last"] = net.layer("relu", values["softmax"], save="output")
    return net, {name: net.values[v].storage for name, v in values.items()}


def test_checkpoints_and_segments() -> None:
    """Convolutions, forks, joins, softmax and what cannot be replayed are checkpoints; the rest lies between."""
    net, named = _branches()
    layers = Layers(Problem(net.finish()))
    checkpoints = {name for name, s in named.items() if is_checkpoint(layers.by_storage[s])}
    assert checkpoints == {"conv", "fork", "join", "drop", "softmax"}
    parts = [["relu", "pool"], ["left"], ["norm"], ["last"]]
    assert segments(layers) == [[named[name] for name in part] for part in parts]


def test_only_checkpoints_are_evicted() -> None:
    """Under any pressure what is cheap is recomputed or stays; joins, forks and softmax may leave like convolutions."""
    net, named = _branches()
    graph = net.finish()
    with pytest.raises(BudgetInfeasibleError) as caught:
        plan(graph, DEVICE, 1, policy="superneurons")
    found = actions_of(plan(graph, DEVICE, caught.value.floor_bytes, policy="superneurons"))
    checkpoints = {named[name] for name in ("conv", "fork", "join", "drop", "softmax")}
    assert set(found["swap"]) <= checkpoints
    assert not set(found["recompute"]) & checkpoints


def test_a_transformer_has_something_to_evict() -> None:
    """Without a convolution the results of products and joins are what leaves."""
    net = Net()
    x = net.given(10)
    for i in range(6):
        x = net.layer("addmm", x, module=f"h.{i}.fc")
        x = net.layer("gelu", x, module=f"h.{i}.act", save="output")
    graph = net.finish()
    plain = plan(graph, DEVICE, None).plain_peak_bytes
    with pytest.raises(BudgetInfeasibleError) as caught:
        plan(graph, DEVICE, 1, policy="superneurons")
    assert caught.value.floor_bytes < plain
    assert actions_of(plan(graph, DEVICE, caught.value.floor_bytes, policy="superneurons"))["swap"]


@pytest.mark.parametrize(("largest", "is_speed_centric"), [(390, True), (389, False)])
def test_segments_that_exceed_the_largest_layer_are_memory_centric(largest: int, is_speed_centric: bool) -> None:
    """Four results of 100 bytes are memoised if some op holds as much: input, output and workspace."""
    net = Net()
    x = net.layer("convolution", net.given(1), size=10, save="output")
    for name in ("relu", "tanh", "sigmoid", "gelu"):
        x = net.layer(name, x, save="output")
    net.op((), (), workspace_bytes=10 + largest)
    graph = net.finish()
    recompute, no_memo = cost_aware(Layers(Problem(graph)))
    assert len(recompute) == 4
    assert no_memo == (frozenset() if is_speed_centric else frozenset(recompute))
    found = plan(graph, DEVICE, None, policy="superneurons")
    assert {d.memo for d in found.decisions if d.action == "recompute"} == {is_speed_centric}


def test_a_short_host_limits_eviction() -> None:
    """What the host has no room for cannot be evicted, so the floor is higher."""
    graph = conv_bn_relu(depth=6, size=4096)

    def floor(host: int | None) -> int:
        device = dataclasses.replace(DEVICE, host_memory_bytes=host)
        with pytest.raises(BudgetInfeasibleError) as caught:
            plan(graph, device, 1, policy="superneurons")
        return caught.value.floor_bytes

    assert floor(None) == floor(6 * 4096) < floor(2 * 4096) < floor(0)
