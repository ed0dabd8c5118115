"""Plans that somebody else made, good or bad, take the memory that the simulator predicts when they are executed."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from lightning_offload import MemoryPlugin
from lightning_offload.graph import DeviceSpec, MemoryPlan, StepGraph
from lightning_offload.graph.memory_plan import AT_PACK, Action
from lightning_offload.planning.problem import Candidate, Problem
from lightning_offload.planning.request import PlanRequest, build_plan
from lightning_offload.planning.simulator import simulate
from tests.engine.harness import Outcome, assert_same, run
from tests.engine.live_tracker import LiveStorageTracker
from tests.engine.probing import train
from tests.shares import pairs
from tests.zoo.cases import BY_NAME

MODELS = (
    "resnet-basic",
    "vgg-batchnorm",
    "alexnet",
    "vit",
    "gpt2-eager",
    "gpt2-sdpa",
    "bert",
    "t5",
    "lstm",
    "seq2seq",
)
"""Convolutions with and without batch normalisation and dropout, attention of both kinds, and recurrent networks."""

FIXED: Mapping[str, Action] = {"keep-all": "keep", "swap-all": "swap", "recompute-all": "recompute"}
RANDOM = ("random-1", "random-2", "random-3", "random-4")
DRAWN = pairs(MODELS, (*FIXED, "mixed", *RANDOM), every=5)
OVER = 0.01
"""Predictions may be a little high: memory is counted from tick to tick, and several things happen in one."""

NUM_STEPS = 2
"""In the first one the optimizer has no state yet."""


def plans_of(name: str) -> tuple[str, ...]:
    """Those that a model is trained under: models one after another, since what is plain is known of one."""
    return tuple(plan for model, plan in DRAWN if model == name)


@functools.cache
def recorded(name: str) -> tuple[str, StepGraph]:
    """The step of a model as a plugin records it, and the signature that it is known by."""
    memory = MemoryPlugin(policy="all-swap")
    last = train(BY_NAME[name], memory, steps=4).steps[-1]
    (row,) = memory.state_dict()["plans"]
    assert last.report.planned is not None
    return row["signature"], last.report.planned.graph


@functools.lru_cache(maxsize=1)
def plain(name: str) -> Outcome:
    """What plain PyTorch leaves behind."""
    return run(BY_NAME[name], steps=NUM_STEPS)


def device(rng: random.Random, saved_bytes: int, seconds: float) -> DeviceSpec:
    """A device whose links are slow or fast for a step, with host memory for all of it or with a disk."""
    rate = saved_bytes / seconds * rng.choice([0.2, 1.0, 5.0])
    has_disk = rng.random() < 0.3
    return DeviceSpec(
        name="random", kind="cpu", memory_bytes=None, copy_interference=0.0, overhead_seconds=0.0,
        d2h_bytes_per_second=rate, h2d_bytes_per_second=rate,
        host_memory_bytes=saved_bytes // 3 if has_disk else None,
        disk_write_bytes_per_second=rate / 2 if has_disk else 0.0,
        disk_read_bytes_per_second=rate / 2 if has_disk else 0.0,
    )  # fmt: skip


def plan_for(graph: StepGraph, name: str) -> MemoryPlan:
    """A plan of that name; the random ones differ in what they do, in when, where to, and in what they memoise."""
    problem = Problem(graph)
    rng = random.Random(f"{name} {graph.digest()}")
    spec = device(rng, sum(c.num_bytes for c in problem.candidates.values()), graph.seconds)
    no_memo, limit = frozenset[int](), None
    if name in FIXED:
        weights = {FIXED[name]: 1.0}
    elif name == "mixed":
        weights = {"keep": 1.0, "swap": 1.0, "recompute": 1.0}
    else:
        weights = {"keep": rng.random(), "swap": rng.random(), "recompute": rng.random()}
        limit = int(rng.uniform(0.4, 1.0) * simulate(problem, {}, spec).peak_bytes)
    actions = {c.storage: _drawn(rng, weights, c) for c in problem.candidates.values()}
    actions = {s: action for s, action in actions.items() if action != "keep"}
    if limit is not None:
        no_memo = frozenset(s for s, action in actions.items() if action == "recompute" and rng.random() < 0.3)
    timeline = simulate(problem, actions, spec, limit_bytes=limit, no_memo=no_memo)
    return build_plan(PlanRequest(problem, spec, None), name, actions, timeline, no_memo)


def _drawn(rng: random.Random, weights: Mapping[Action, float], candidate: Candidate) -> Action:
    possible: dict[Action, bool] = {"keep": True, "swap": candidate.can_swap, "recompute": candidate.can_recompute}
    shares = [weights.get(action, 0.0) * is_possible for action, is_possible in possible.items()]
    return rng.choices(list(possible), shares)[0] if any(shares) else "keep"


def execute(name: str, plan: MemoryPlan) -> tuple[Outcome, int]:
    """Train a model under a plan from its first step on; what it left behind, and the true peak of the last step."""
    signature, graph = recorded(name)
    memory, tracker, peaks = MemoryPlugin(plan=plan, verify="never"), LiveStorageTracker(), list[int]()
    row = {"signature": signature, "graph": graph.to_json(), "plan": plan.to_json()}
    memory.load_state_dict({"schema": 1, "plans": [row]})

    @contextmanager
    def around() -> Iterator[None]:
        with tracker.window() as window:
            yield
        peaks.append(window.peak_bytes)
        planned = memory.report().planned
        assert planned is not None
        assert planned.plan == plan, "another plan is in force"

    with tracker:
        outcome = run(
            BY_NAME[name], memory=memory, steps=NUM_STEPS, around=around,
            on_start=lambda job: tracker.register(job.model, *job.optimizers),
        )  # fmt: skip
    return outcome, peaks[-1]


@pytest.mark.parametrize(("name", "plan_name"), [(name, plan) for name in MODELS for plan in plans_of(name)])
def test_executed_plan_takes_the_predicted_memory(name: str, plan_name: str) -> None:
    """The tracker's peak is never above the predicted one, nor more than 1% below it, and no bit changes."""
    _, graph = recorded(name)
    plan = plan_for(graph, plan_name)
    outcome, peak_bytes = execute(name, plan)
    assert peak_bytes <= plan.predicted_peak_bytes <= (1 + OVER) * peak_bytes
    assert_same(plain(name), outcome)


def test_the_plans_are_worth_testing() -> None:
    """Random plans use every action, both tiers and both kinds of replay; they overlap copies; and they all differ."""
    plans = [plan_for(recorded(name)[1], plan_name) for name in MODELS for plan_name in RANDOM]
    decisions = [decision for plan in plans for decision in plan.decisions]
    swaps = [decision for decision in decisions if decision.action == "swap"]
    assert {decision.tier for decision in swaps} == {"host", "disk"}
    assert {decision.memo for decision in decisions if decision.action == "recompute"} == {False, True}
    assert any(decision.release_op != AT_PACK for decision in swaps)
    assert any(decision.prefetch_unpack >= 0 for decision in swaps)
    assert len({plan.decisions for plan in plans}) == len(plans)
    assert statistics.median(len(plan.decisions) for plan in plans) >= 10
    shares = [plan.predicted_peak_bytes / plan.plain_peak_bytes for plan in plans]
    assert min(shares) < 0.7
