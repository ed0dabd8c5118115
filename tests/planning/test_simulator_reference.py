"""The fast simulator against the slow one of :mod:`tests.planning.reference`, in both forms of its loops."""

from __future__ import annotations

import dataclasses
import importlib.util
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from lightning_offload.graph import DeviceSpec, StepGraph
from lightning_offload.planning.kernels import PLAIN, Kernels, compiled
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.simulator import Simulator, Timeline
from lightning_offload.plugins.fake import Step, record_fake_step
from tests.graph.building import DEVICE, chain, step_graphs, tiered_devices
from tests.planning.reference import reference_timeline
from tests.planning.step_strategies import SEEDS, Choice, odd_steps, random_choice
from tests.shares import examples
from tests.zoo.models.resnet import ResNet

HAS_NUMBA = importlib.util.find_spec("numba") is not None
FORMS = ["plain", pytest.param("compiled", marks=pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed"))]
NAMES = ("plain", "compiled") if HAS_NUMBA else ("plain",)


def form(name: str) -> Kernels:
    """The loops in one form."""
    if name == "plain":
        return PLAIN
    found = compiled()
    assert found is not None
    return found


def run(problem: Problem, choice: Choice, device: DeviceSpec, kernels: Kernels) -> Timeline:
    """The fast simulation of a choice."""
    simulator = Simulator(problem, device, choice.limit_bytes, kernels=kernels)
    codes, no_memo = problem.codes(choice.actions), problem.flags(choice.no_memo)
    found = simulator.timeline(codes, no_memo, schedule=choice.schedule)
    outcome = simulator.run(codes, no_memo, schedule=choice.schedule)
    assert outcome == (found.peak_bytes, found.step_seconds, found.stall_seconds, found.overflow_bytes)
    return found


def assert_same(found: Timeline, expected: Timeline) -> None:
    """Everything to the byte and tick, times up to rounding."""
    for field in dataclasses.fields(Timeline):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "memory":
            assert one.tolist() == other.tolist()
        elif field.name.endswith("_seconds"):
            assert one == pytest.approx(other, rel=1e-9, abs=1e-9 * expected.step_seconds), field.name
        else:
            assert one == other, field.name


def check(graph: StepGraph, device: DeviceSpec, rng: random.Random, *, num_choices: int) -> None:
    """Random choices for a step, with both simulators."""
    problem = Problem(graph)
    for _ in range(num_choices):
        check_choice(problem, random_choice(problem, rng), device)


def check_choice(problem: Problem, choice: Choice, device: DeviceSpec) -> None:
    """The fast simulator in all its forms against the slow one."""
    expected = reference_timeline(problem, device=device, **vars_of(choice))
    for name in NAMES:
        assert_same(run(problem, choice, device, form(name)), expected)


def vars_of(choice: Choice) -> dict[str, object]:
    """The arguments of a simulation."""
    return {field.name: getattr(choice, field.name) for field in dataclasses.fields(choice)}


@settings(max_examples=examples(400))
@given(
    graph=odd_steps() | step_graphs(max_saves=8, max_ops=14, unit=1000),
    device=tiered_devices(unit=1000),
    seed=SEEDS,
)
def test_random_steps(graph: StepGraph, device: DeviceSpec, seed: int) -> None:
    """Memory, copies, tiers and times are those of the slow simulator, whatever the step and the choice."""
    check(graph, device, random.Random(seed), num_choices=4)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=examples(60))
@given(graph=odd_steps(), device=tiered_devices(unit=1000), seed=SEEDS)
def test_simulations_leave_nothing_behind(name: str, graph: StepGraph, device: DeviceSpec, seed: int) -> None:
    """One simulator, choice after choice, given up ones among them, says what a new one says of each."""
    problem, rng, kernels = Problem(graph), random.Random(seed), form(name)
    limit = rng.choice([None, 100_000])
    reused = Simulator(problem, device, limit, kernels=kernels)
    for choice in [random_choice(problem, rng) for _ in range(4)]:
        codes, no_memo = problem.codes(choice.actions), problem.flags(choice.no_memo)
        reused.run(codes, no_memo, schedule=choice.schedule, max_seconds=problem.plain_seconds)
        new = Simulator(problem, device, limit, kernels=kernels)
        for flags in (no_memo, None):
            found, expected = (each.timeline(codes, flags, schedule=choice.schedule) for each in (reused, new))
            assert_same(found, expected)


@pytest.mark.parametrize("slow", [1, 30])
def test_long_chains(slow: int) -> None:
    """More unpacks than a block of them, with links that keep up and links that do not."""
    graph = chain(*(4096 * (1 + i % 3) for i in range(100)))
    device = dataclasses.replace(
        DEVICE, d2h_bytes_per_second=20000.0 / slow, h2d_bytes_per_second=30000.0 / slow, copy_interference=0.1
    )
    problem = Problem(graph)
    everything = Choice(
        actions=dict.fromkeys(problem.candidates, "swap"), no_memo=frozenset(), limit_bytes=None, schedule=None,
    )  # fmt: skip
    for choice in (everything, dataclasses.replace(everything, limit_bytes=100_000)):
        check_choice(problem, choice, device)
    check(graph, device, random.Random(slow), num_choices=2)


CARD = DeviceSpec(
    name="card", kind="cuda", memory_bytes=1 << 30, d2h_bytes_per_second=1e9, h2d_bytes_per_second=1.2e9,
    copy_interference=0.05, overhead_seconds=1e-6, flops_per_second=1e12, memory_bytes_per_second=1e11,
    host_memory_bytes=4 << 20, disk_write_bytes_per_second=2e8, disk_read_bytes_per_second=3e8,
)  # fmt: skip


def residual_net() -> tuple[nn.Module, Step]:
    """In-place additions and activations, batch norm."""
    model = ResNet((1, 1, 1, 1), bottleneck=True, width=8, num_classes=10)
    return model, lambda: model(torch.zeros(4, 3, 64, 64)).square().mean().backward()


def recurrent_net() -> tuple[nn.Module, Step]:
    """One cell over and over: chunks of one storage, values read at several steps."""
    cell, head = nn.GRUCell(32, 32), nn.Linear(32, 32)

    def step() -> None:
        hidden, loss = torch.zeros(64, 32), torch.zeros(())
        for _ in range(6):
            hidden = cell(hidden, hidden)
            loss = loss + head(hidden).tanh().square().mean()
        loss.backward()

    return nn.ModuleList([cell, head]), step


@pytest.mark.parametrize("build", [residual_net, recurrent_net])
def test_recorded_nets(build: Callable[[], tuple[nn.Module, Step]]) -> None:
    """The same on steps that a recorder saw."""
    graph = record_fake_step(build, CARD)
    assert len(Problem(graph).candidates) > 10
    check(graph, CARD, random.Random(0), num_choices=3)
    check(graph, dataclasses.replace(CARD, host_memory_bytes=None), random.Random(1), num_choices=3)


@pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
@settings(max_examples=examples(50))
@given(graph=odd_steps(), device=tiered_devices(unit=1000), seed=SEEDS)
def test_both_forms_agree_to_the_last_bit(graph: StepGraph, device: DeviceSpec, seed: int) -> None:
    """A plan does not depend on whether numba is there, nor on when its loops are loaded."""
    problem = Problem(graph)
    choice = random_choice(problem, random.Random(seed))
    plain, fast = (dataclasses.asdict(run(problem, choice, device, form(name))) for name in ("plain", "compiled"))
    assert plain.pop("memory").tolist() == fast.pop("memory").tolist()
    assert plain == fast
