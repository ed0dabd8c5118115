"""AccUDNN, Capuchin and Meng's swapping do as much as the budget asks for, each in its own order."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph import DeviceSpec, StepGraph
from lightning_offload.planning.planner import plan
from lightning_offload.planning.policies.capuchin import eviction_order, free_seconds
from lightning_offload.planning.policies.layers import Layers
from lightning_offload.planning.policies.swap_out_in import attention_sums
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest
from tests.graph.building import DEVICE, chain
from tests.planning.policies.nets import Net, actions_of, conv_relu

FAST = dataclasses.replace(DEVICE, d2h_bytes_per_second=1e6, h2d_bytes_per_second=1e6)
BUDGETED = ("accudnn", "capuchin", "swap-out-in")


def _floor(graph: StepGraph, device: DeviceSpec, policy: str) -> int:
    with pytest.raises(BudgetInfeasibleError) as caught:
        plan(graph, device, 1, policy=policy)
    return caught.value.floor_bytes


@pytest.mark.parametrize("policy", BUDGETED)
def test_nothing_is_done_without_pressure(policy: str) -> None:
    """Without a budget, and with one that the plain step meets."""
    graph = conv_relu()
    plain = plan(graph, DEVICE, None, policy=policy)
    assert plain.decisions == ()
    assert plan(graph, DEVICE, plain.plain_peak_bytes, policy=policy).decisions == ()


@pytest.mark.parametrize("policy", BUDGETED)
def test_a_lower_budget_takes_more(policy: str) -> None:
    """The bytes that leave grow as the budget falls, and each plan fits."""
    graph = chain(*[100] * 16)
    low = _floor(graph, FAST, policy)
    high = plan(graph, FAST, None, policy=policy).plain_peak_bytes
    counts = []
    for budget in range(high, low - 1, -50):
        found = plan(graph, FAST, budget, policy=policy)
        assert found.predicted_peak_bytes <= budget
        counts.append(len(found.decisions))
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] >= 12


def test_swap_out_in_swaps_the_longest_lived_first() -> None:
    """Going back from the loss, maps stay while they fit: what is swapped is a prefix of forward."""
    graph = chain(*[100] * 10)
    low, high = _floor(graph, FAST, "swap-out-in"), plan(graph, FAST, None).plain_peak_bytes
    found = actions_of(plan(graph, FAST, (low + high) // 2, policy="swap-out-in"))
    assert found["recompute"] == []
    assert found["swap"] == list(range(1, 1 + len(found["swap"])))


def _attention(steps: int, *, share_keys: bool = True) -> tuple[StepGraph, list[int], list[int]]:
    """Additive attention: a query for each decoder step is spread over keys; the storages of sums, and the others."""
    net = Net()
    encoded = net.layer("tanh", net.given(10), size=400, save="output")
    keys = net.layer("mm", encoded, size=400)
    query = net.layer("tanh", net.given(10), size=40, save="output")
    sums, others = [], [net.values[v].storage for v in (encoded, query)]
    for _ in range(steps):
        keys = keys if share_keys else net.layer("mm", encoded, size=400)
        total = net.layer("add", keys, query, size=400, save="")
        energy = net.layer("tanh", total, size=400, save="output")
        sums.append(net.values[energy].storage)
        scores = net.layer("mv", energy, size=40)
        query = net.layer("sigmoid", scores, size=40, save="output")
        others.append(net.values[query].storage)
    return net.finish(), sums, others


def test_attention_sums_are_recomputed() -> None:
    """The activation of keys and a query, shared by many decoder steps, is dropped whatever the budget."""
    graph, sums, others = _attention(6)
    assert attention_sums(Layers(Problem(graph))) == sums
    found = plan(graph, FAST, None, policy="swap-out-in")
    assert actions_of(found) == {"swap": [], "recompute": sums}
    assert found.predicted_peak_bytes < found.plain_peak_bytes - 4 * 400
    tight = actions_of(plan(graph, FAST, _floor(graph, FAST, "swap-out-in"), policy="swap-out-in"))
    assert tight["recompute"] == sums
    assert set(tight["swap"]) <= set(others)


def test_memory_of_attention_sums_grows_with_the_source_alone() -> None:
    """More decoder steps add their states, not another spread of the keys."""
    peaks = [plan(_attention(n)[0], FAST, None, policy="swap-out-in").predicted_peak_bytes for n in (8, 9, 10)]
    assert peaks[1] - peaks[0] == peaks[2] - peaks[1] < 400


def test_a_sum_that_shares_nothing_is_no_attention() -> None:
    """A spread added once to each of many maps, as an embedding of time to features, is left alone."""
    graph, _, _ = _attention(6, share_keys=False)
    assert attention_sums(Layers(Problem(graph))) == []


def test_accudnn_swaps_the_longest_reuse_distance() -> None:
    """With links that hide everything, the first results of forward leave, as few as fit."""
    graph = chain(*[100] * 10)
    low, high = _floor(graph, FAST, "accudnn"), plan(graph, FAST, None).plain_peak_bytes
    found = actions_of(plan(graph, FAST, (low + high) // 2, policy="accudnn"))
    assert found["recompute"] == []
    assert found["swap"] == list(range(1, 1 + len(found["swap"])))


def test_accudnn_repairs_what_stalls() -> None:
    """Never slower than the shortest prefix by reuse distance, which on a chain is Meng's; here it is faster."""
    graph = chain(*(50 + 130 * (i % 3) for i in range(16)))
    low, high = _floor(graph, DEVICE, "swap-out-in"), plan(graph, DEVICE, None).plain_peak_bytes
    gains = []
    for eighth in range(8):
        budget = low + eighth * (high - low) // 8
        prefix = plan(graph, DEVICE, budget, policy="swap-out-in").predicted_step_seconds
        gains.append(prefix - plan(graph, DEVICE, budget, policy="accudnn").predicted_step_seconds)
    assert min(gains) >= 0
    assert max(gains) > 0.5


def test_free_time_is_the_absence_less_both_copies() -> None:
    """FT = (back - bytes / rate in) - (evicted + bytes / rate out)."""
    graph = conv_relu(depth=3)
    layers, request = Layers(Problem(graph)), PlanRequest(Problem(graph), DEVICE, None)
    slow_back = dataclasses.replace(DEVICE, h2d_bytes_per_second=50.0)
    free = {s: free_seconds(request, layers, layer) for s, layer in layers.by_storage.items()}
    assert free == {2: 6.0 - 2.0, 4: 2.0 - 2.0, 6: 0.0 - 2.0}
    other = PlanRequest(Problem(graph), slow_back, None)
    assert free_seconds(other, layers, layers.by_storage[2]) == 6.0 - 1.0 - 2.0


def test_capuchin_swaps_what_is_hidden_and_then_takes_the_cheaper() -> None:
    """First by free time while the lane hides the copies; then a dear result is swapped, cheap ones replayed."""
    net = Net()
    x = net.given(1)
    for seconds in (1.0, 1.0, 50.0, 0.1, 0.2):
        x = net.layer("tanh", x, save="output", seconds=seconds)
    slow = dataclasses.replace(DEVICE, d2h_bytes_per_second=4.0, h2d_bytes_per_second=4.0)
    order = eviction_order(PlanRequest(Problem(net.finish()), slow, None))
    # A copy takes 25 s each way. Storage 1 is away for 1 + 50 + 0.3 + 5 s and more: hidden. The others are not.
    assert order[0] == (1, "swap")
    assert dict(order[1:]) == {2: "recompute", 3: "swap", 4: "recompute", 5: "recompute"}
    # By cost for its bytes: 4 (0.1 s), 5 (0.2 s and by then the 0.1 s of 4), 2 (1 s), 3.
    assert [s for s, _ in order[1:]] == [4, 5, 2, 3]


def test_capuchin_counts_sources_that_are_recomputed() -> None:
    """Of a chain of equal results each recomputation makes the next one dearer, until a swap is cheaper."""
    graph = chain(*[100] * 8, seconds=1.0)
    slow = dataclasses.replace(DEVICE, d2h_bytes_per_second=20.0, h2d_bytes_per_second=20.0)
    actions = [action for _, action in eviction_order(PlanRequest(Problem(graph), slow, None))]
    assert {"swap", "recompute"} == set(actions)


def test_capuchin_recomputes_what_the_host_has_no_room_for() -> None:
    """A host of one page takes one result; the others are replayed."""
    graph = chain(*[4096] * 6)
    device = dataclasses.replace(FAST, host_memory_bytes=4096)
    order = eviction_order(PlanRequest(Problem(graph), device, None))
    assert [action for _, action in order].count("swap") == 1
    assert [action for _, action in order].count("recompute") == 5
