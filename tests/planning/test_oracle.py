"""The planner against every choice there is, on steps small enough to try them all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_offload.graph import DeviceSpec, StepGraph
from lightning_offload.graph.memory_plan import Action
from lightning_offload.planning.bound import bound_seconds
from lightning_offload.planning.plans import Setting
from lightning_offload.planning.policies import plan
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.simulator import Timeline, simulate
from tests.graph.building import GraphBuilder, chain, step_graphs

MEAN_RATIO, WORST_RATIO = 1.1, 2.0
"""How far the greedy planner may be from the best choice of actions, over a fixed set of steps."""

DEVICES = tuple(
    DeviceSpec(
        name="oracle", kind="cpu", memory_bytes=None, d2h_bytes_per_second=rate, h2d_bytes_per_second=rate,
        copy_interference=interference, overhead_seconds=0.01,
    )
    for rate, interference in itertools.product((0.5, 20.0, 500.0), (0.0, 0.5))
)  # fmt: skip


def all_choices(problem: Problem) -> Iterator[dict[int, Action]]:
    """Every assignment of keep, swap and recompute to the candidates that allow them."""
    options: list[list[Action]] = []
    for candidate in problem.candidates.values():
        allowed: list[Action] = ["keep"]
        allowed += ["swap"] if candidate.can_swap else []
        allowed += ["recompute"] if candidate.can_recompute else []
        options.append(allowed)
    for drawn in itertools.product(*options):
        yield {s: a for s, a in zip(problem.candidates, drawn, strict=True) if a != "keep"}


def feasible_timelines(problem: Problem, device: DeviceSpec, budget: int) -> Iterator[Timeline]:
    """The simulated steps of all choices that fit, overlapped and not."""
    for actions in all_choices(problem):
        for overlap in (True, False):
            timeline = simulate(problem, actions, device, limit_bytes=budget, overlap=overlap)
            if timeline.peak_bytes <= budget:
                yield timeline


@settings(max_examples=40)
@given(graph=step_graphs(max_saves=4), device=st.sampled_from(DEVICES))
def test_floor_is_the_smallest_peak_of_all_choices(graph: StepGraph, device: DeviceSpec) -> None:
    """No choice of actions has a smaller peak than the floor: auto is feasible whenever anything is."""
    problem = Problem(graph)
    peaks = [simulate(problem, actions, device, overlap=False).peak_bytes for actions in all_choices(problem)]
    assert Setting(problem, device, None).floor.peak_bytes == min(peaks)


@settings(max_examples=40)
@given(graph=step_graphs(max_saves=4), device=st.sampled_from(DEVICES), height=st.floats(0, 0.99))
def test_bound_is_below_every_feasible_choice(graph: StepGraph, device: DeviceSpec, height: float) -> None:
    """The lower bound on the step time holds for every choice that fits the budget."""
    problem = Problem(graph)
    setting = Setting(problem, device, None)
    low, high = setting.floor.peak_bytes, setting.plain.peak_bytes
    budget = int(low + height * (high - low))
    best = min(timeline.step_seconds for timeline in feasible_timelines(problem, device, budget))
    assert bound_seconds(problem, device, budget) <= best * (1 + 1e-9)


def residual(*sizes: int) -> StepGraph:
    """A net of blocks: each adds to its input a saved result made from it; the sum is saved too."""
    b = GraphBuilder()
    stream = b.make(sizes[0], b.given(10))
    saves, dead = [b.pack(stream)], [stream]
    for size in sizes[1:]:
        branch = b.make(size, stream)
        saves.append(b.pack(branch))
        stream = b.make(sizes[0], stream, branch, seconds=0.1)
        saves.append(b.pack(stream))
        b.drop(*dead)
        dead = [branch, stream]
    b.drop(*dead)
    b.backward()
    for save in reversed(saves):
        b.unpack(save)
        b.drop(b.make(10))
        b.release(save)
    b.op()
    return b.build()


SMALL = {
    **{f"chain {seed}": chain(*(10 * (1 + (7 * i + seed) % 5) for i in range(6))) for seed in range(4)},
    "residual": residual(40, 20, 60),
    "equal residual": residual(30, 30, 30),
}


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: f"{d.d2h_bytes_per_second:g}Bps-{d.copy_interference:g}")
def test_search_is_close_to_the_best_choice(device: DeviceSpec) -> None:
    """With slow links as with quick ones the plan takes at most a tenth longer than the best choice, on average."""
    ratios = {
        f"{name} at {height}": _ratio(graph, device, height)
        for name, graph in SMALL.items()
        for height in (0.0, 0.4, 0.8)
    }
    worse = {name: ratio for name, ratio in ratios.items() if ratio > 1 + 1e-9}
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    assert mean <= MEAN_RATIO, (mean, worse)
    assert max(ratios.values()) <= WORST_RATIO, (mean, worse)


def _ratio(graph: StepGraph, device: DeviceSpec, height: float) -> float:
    problem = Problem(graph)
    setting = Setting(problem, device, None)
    low, high = setting.floor.peak_bytes, setting.plain.peak_bytes
    budget = int(low + height * (high - low))
    best = min(timeline.step_seconds for timeline in feasible_timelines(problem, device, budget))
    return plan(graph, device, budget).predicted_step_seconds / best


def test_the_oracle_tries_every_choice() -> None:
    """Three saved results that may all be swapped or recomputed give 27 choices."""
    assert len(list(all_choices(Problem(chain(10, 20, 30))))) == 27
