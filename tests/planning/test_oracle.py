"""The planner against every choice there is, on steps small enough to try them all."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_offload.graph import DeviceSpec, StepGraph
from lightning_offload.graph.memory_plan import Action
from lightning_offload.planning.planner import plan
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.relaxation import integral_bound, relax
from lightning_offload.planning.relaxation.facts import Case
from lightning_offload.planning.relaxation.model import Model
from lightning_offload.planning.request import PlanRequest
from lightning_offload.planning.simulator import ON_DEMAND, Schedule, Timeline, simulate
from tests.graph.building import GraphBuilder, chain, step_graphs, tiered_devices
from tests.shares import examples, share

MEAN_RATIO, WORST_RATIO = 1.001, 1.01
"""How far the planner may be from the best choice of actions and of what is memoised, over a fixed set of steps."""

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


def all_memos(actions: dict[int, Action]) -> Iterator[frozenset[int]]:
    """Every set of recomputed storages that are not memoised."""
    recomputed = [s for s, action in actions.items() if action == "recompute"]
    for count in range(len(recomputed) + 1):
        yield from map(frozenset, itertools.combinations(recomputed, count))


def feasible_timelines(problem: Problem, device: DeviceSpec, budget: int, *, memos: bool = False) -> Iterator[Timeline]:
    """The simulated steps of all choices that fit, overlapped or not, and with `memos` memoised or not."""
    for actions in all_choices(problem):
        no_memos = all_memos(actions) if memos else [frozenset[int]()]
        for no_memo, schedule in itertools.product(no_memos, (None, ON_DEMAND)):
            timeline = simulate(problem, actions, device, limit_bytes=budget, no_memo=no_memo, schedule=schedule)
            if timeline.peak_bytes <= budget and not timeline.overflow_bytes:
                yield timeline


def random_plan(problem: Problem, device: DeviceSpec, rng: random.Random) -> Timeline:
    """The simulated step of some choice of actions, of what is memoised, and of when copies are made."""
    actions: dict[int, Action] = {}
    for s, c in problem.candidates.items():
        options: list[Action] = ["keep"] + ["swap"] * c.can_swap + ["recompute"] * 2 * c.can_recompute
        if (action := rng.choice(options)) != "keep":
            actions[s] = action
    no_memo = frozenset(s for s, action in actions.items() if action == "recompute" and rng.random() < 0.3)
    if rng.random() < 0.5:
        limit = int(rng.random() * simulate(problem, {}, device).peak_bytes)
        return simulate(problem, actions, device, limit_bytes=limit, no_memo=no_memo)
    swapped = [s for s, action in actions.items() if action == "swap"]
    schedule = Schedule(
        release={s: int(rng.choice([-1, *problem.op_ticks])) for s in swapped},
        prefetch={s: rng.randrange(-1, len(problem.unpacks)) for s in swapped},
    )
    return simulate(problem, actions, device, no_memo=no_memo, schedule=schedule)


@settings(max_examples=examples(40))
@given(graph=step_graphs(max_saves=4), device=st.sampled_from(DEVICES))
def test_floor_is_the_smallest_peak_of_all_choices(graph: StepGraph, device: DeviceSpec) -> None:
    """No choice of actions has a smaller peak than the floor: auto is feasible whenever anything is."""
    problem = Problem(graph)
    peaks = [simulate(problem, actions, device, schedule=ON_DEMAND).peak_bytes for actions in all_choices(problem)]
    assert PlanRequest(problem, device, None).floor.peak_bytes == min(peaks)


@settings(max_examples=examples(25))
@given(graph=step_graphs(max_saves=3), device=st.sampled_from(DEVICES), height=st.floats(0, 0.99))
def test_fractions_cost_less_than_wholes_and_those_less_than_plans(
    graph: StepGraph, device: DeviceSpec, height: float
) -> None:
    """The program's optimum is at most that without fractions, and that, like the bound, at most every choice's."""
    problem = Problem(graph)
    request = PlanRequest(problem, device, None)
    low, high = request.floor.peak_bytes, request.plain.peak_bytes
    budget = int(low + height * (high - low))
    best = min(timeline.step_seconds for timeline in feasible_timelines(problem, device, budget, memos=True))
    assert relax(problem, device, budget).seconds <= best * (1 + 1e-9)
    if budget < high:
        model = Model(Case.of(problem, device, request.plain, budget), range(graph.num_ticks), integral=True)
        fractions, wholes = model.solve(10.0), model.program.solve_integral(max_nodes=10_000)
        assert fractions is not None
        assert wholes is not None
        assert model.seconds(fractions.value) <= model.seconds(wholes) * (1 + 1e-6)
        assert model.seconds(wholes) <= best * (1 + 1e-6)
        for max_nodes in (1, 10_000):
            bound = integral_bound(problem, device, budget, max_nodes=max_nodes)
            assert bound is not None
            assert bound <= best * (1 + 1e-6)


@settings(max_examples=examples(60))
@given(
    graph=step_graphs() | step_graphs(max_saves=14, max_ops=24),
    device=st.sampled_from(DEVICES) | tiered_devices(),
    seed=st.integers(0, 10**6),
)
def test_bound_is_below_every_plan_at_its_own_peak(graph: StepGraph, device: DeviceSpec, seed: int) -> None:
    """Whatever is chosen, the step takes at least the bound for a budget that just holds it; the program has it too."""
    problem = Problem(graph)
    plain = simulate(problem, {}, device)
    timeline = random_plan(problem, device, random.Random(seed))
    if timeline.overflow_bytes or timeline.peak_bytes >= plain.peak_bytes:
        return
    assert relax(problem, device, timeline.peak_bytes).seconds <= timeline.step_seconds * (1 + 1e-9)
    solution = Model(Case.of(problem, device, plain, timeline.peak_bytes), range(graph.num_ticks)).solve(10.0)
    assert solution is not None  # else the bound would have been the cheaper one


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
    **{f"chain {seed}": chain(*(10 * (1 + (7 * i + seed) % 5) for i in range(5))) for seed in range(2)},
    "residual": residual(40, 20, 60),
}


@pytest.mark.parametrize(
    "device", share(DEVICES, every=2), ids=lambda d: f"{d.d2h_bytes_per_second:g}Bps-{d.copy_interference:g}"
)
def test_search_is_close_to_the_best_choice(device: DeviceSpec) -> None:
    """With slow links as with quick ones the plan takes hardly longer than the best choice that there is."""
    ratios = {
        f"{name} at {height}": _ratio(graph, device, height) for name, graph in SMALL.items() for height in (0.0, 0.4)
    }
    worse = {name: ratio for name, ratio in ratios.items() if ratio > 1 + 1e-9}
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    assert mean <= MEAN_RATIO, (mean, worse)
    assert max(ratios.values()) <= WORST_RATIO, (mean, worse)


def _ratio(graph: StepGraph, device: DeviceSpec, height: float) -> float:
    problem = Problem(graph)
    request = PlanRequest(problem, device, None)
    low, high = request.floor.peak_bytes, request.plain.peak_bytes
    budget = int(low + height * (high - low))
    best = min(timeline.step_seconds for timeline in feasible_timelines(problem, device, budget, memos=True))
    return plan(graph, device, budget).predicted_step_seconds / best


def test_the_oracle_tries_every_choice() -> None:
    """Three saved results that may be swapped or recomputed give 27 choices, 64 with what is memoised."""
    choices = list(all_choices(Problem(chain(10, 20, 30))))
    assert len(choices) == 27
    assert sum(len(list(all_memos(actions))) for actions in choices) == 64
