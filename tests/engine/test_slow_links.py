"""Over links of a set bandwidth a step takes the time and the memory that its plan predicts."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_offload.capture.live import LiveBytes
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph import DeviceSpec, MemoryPlan, StepGraph
from lightning_offload.planning.planner import plan as make_plan
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.hooks import executing
from lightning_offload.runtime.host_pool import HostPool
from lightning_offload.runtime.lanes import CpuMover
from lightning_offload.runtime.program import compile_plan
from lightning_offload.runtime.spill import DiskPool
from lightning_offload.runtime.staged_lanes import StagedLanes
from lightning_offload.runtime.tiers import Tiers
from lightning_offload.tensors.observer import observe_all
from tests.capture.recording import record
from tests.one_thread import one_thread as one_thread
from tests.runtime.clocked_lanes import ClockedLanes, VirtualClock
from tests.runtime.inline import inline_lanes
from tests.shares import is_all, share
from tests.zoo.models import hugging_face
from tests.zoo.models.resnet import ResNet

CPU = torch.device("cpu")
STEP_SECONDS = 0.1
"""What the ops of each step take together."""

HEIGHTS = (0.75, 0.5, 0.25, 0.1)
LINKS = {"fair": 0.5, "slow": 2.0}
"""Time to copy all that a step saves off the device, as a multiple of the step: with a fair link most of it can be
hidden, with a slow one next to nothing."""

MIXES = ("swap", "mixed", "disk")
"""Swaps to the host alone; whatever the planner finds best; swaps to a host that has room for a quarter, and to a disk
of half the link's rate."""

RELATIVE, ABSOLUTE_SECONDS = 0.1, 0.002
_HEAVY = ("convolution", "mm", "attention")
_HOST_SHARE, _DISK_SHARE, _IN_SHARE = 0.25, 0.5, 0.8


def _mlp() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(12)]
    batch = torch.randn(512, 64)
    return nn.Sequential(*layers), lambda model: model(batch).square().mean()


def _conv_net() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    model = ResNet((2, 2, 2), bottleneck=False, width=8, num_classes=10)
    return model, lambda model: nn.functional.cross_entropy(model(images), labels)


def _gpt2() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    tokens = torch.randint(96, (8, 48))
    return hugging_face.gpt2("sdpa"), lambda model: model(input_ids=tokens, labels=tokens).loss


MODELS = {"mlp": _mlp, "conv-net": _conv_net, "gpt2": _gpt2}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a step under virtual time came to."""

    seconds: float
    stall_seconds: float
    replay_seconds: float
    peak_bytes: int
    gradients: list[Tensor]


@pytest.fixture(autouse=True)
def seen_by_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ops be seen by a dispatch mode, whatever else this process does: the core sees others, as of autograd."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", "python")


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A model with one batch, recorded."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    graph: StepGraph
    gradients: list[Tensor]

    @classmethod
    @functools.cache
    def of(cls, name: str) -> Subject:
        """The model of a name; the step's ops get set times."""
        torch.manual_seed(5)
        model, loss = MODELS[name]()
        buffers = {key: tensor.clone() for key, tensor in model.named_buffers()}
        torch.manual_seed(6)
        graph = _with_set_times(record(lambda: loss(model).backward()))
        gradients = take_gradients(model)
        model.load_state_dict(buffers, strict=False)
        return cls(model, loss, graph, gradients)

    @property
    def saved_bytes(self) -> int:
        """Bytes of the storages that the step makes and saves."""
        saved = {self.graph.values[save.value].storage for save in self.graph.saves}
        return sum(self.graph.storages[s].num_bytes for s in saved if not self.graph.storages[s].is_persistent)

    @functools.cache  # noqa: B019  (subjects live as long as the process)
    def plan(self, height: float, link: str, mix: str) -> tuple[MemoryPlan, DeviceSpec]:
        """A plan for a budget at a height between the floor and the plain peak, over a link."""
        rate = self.saved_bytes / (LINKS[link] * STEP_SECONDS)
        disk_rate = _DISK_SHARE * rate if mix == "disk" else 0.0
        device = DeviceSpec(
            name="slow", kind="cpu", memory_bytes=None, copy_interference=0.0, overhead_seconds=0.0,
            d2h_bytes_per_second=rate, h2d_bytes_per_second=_IN_SHARE * rate,
            host_memory_bytes=int(_HOST_SHARE * self.saved_bytes) if mix == "disk" else None,
            disk_write_bytes_per_second=disk_rate, disk_read_bytes_per_second=_IN_SHARE * disk_rate,
        )  # fmt: skip
        graph = self.graph if mix == "mixed" else _not_replayable(self.graph)
        plain = make_plan(graph, device, None).plain_peak_bytes
        with pytest.raises(BudgetInfeasibleError) as caught:
            make_plan(graph, device, 1)
        floor = caught.value.floor_bytes
        return make_plan(graph, device, int(floor + height * (plain - floor))), device

    def run(self, plan: MemoryPlan, device: DeviceSpec, slowness: Callable[[], float] = lambda: 1.0) -> Ran:
        """Run the step under a plan, over links that take so many times what the device's take."""
        clock, live = VirtualClock(self.graph), LiveBytes(CPU)
        tiers = clocked_tiers(clock, device, slowness)
        executor = StepExecutor(
            device=CPU, tiers=tiers, program=compile_plan(self.graph, plan),
            observer=observe_all((clock, live)), verifier=None,
        )  # fmt: skip
        buffers = {key: tensor.clone() for key, tensor in self.model.named_buffers()}
        torch.manual_seed(6)
        with clock.timing_replays(), executing(executor):
            self.loss(self.model).backward()
        assert not executor.has_deviated
        assert clock.num_ops == len(self.graph.ops)
        tiers.close()
        self.model.load_state_dict(buffers, strict=False)
        return Ran(
            seconds=clock.now,
            stall_seconds=executor.stall_seconds,
            replay_seconds=clock.replay_seconds,
            peak_bytes=live.made_bytes + self.graph.persistent_bytes,
            gradients=take_gradients(self.model),
        )


def clocked_tiers(clock: VirtualClock, device: DeviceSpec, slowness: Callable[[], float]) -> Tiers:
    """Tiers whose copies take virtual time, so many times what the device's links say."""

    def takes(bytes_per_second: float) -> Callable[[int], float]:
        return lambda num_bytes: slowness() * num_bytes / bytes_per_second

    lanes = ClockedLanes(clock, inline_lanes(), takes(device.d2h_bytes_per_second), takes(device.h2d_bytes_per_second))
    if not device.has_disk:
        return Tiers(lanes)
    disk_lanes = StagedLanes(CpuMover())
    disk_lanes.close()
    clocked = ClockedLanes(
        clock, disk_lanes, takes(device.disk_write_bytes_per_second), takes(device.disk_read_bytes_per_second)
    )
    return Tiers(lanes, HostPool(), clocked, DiskPool())


def take_gradients(model: nn.Module) -> list[Tensor]:
    """The gradients, which the model then has no more."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    model.zero_grad(set_to_none=True)
    return gradients


def _with_set_times(graph: StepGraph) -> StepGraph:
    """Let each op take a time that depends on its bytes and its kind alone, so that no run differs from another."""

    def weight(op_index: int) -> float:
        op = graph.ops[op_index]
        num_bytes = sum(graph.storages[graph.values[v].storage].num_bytes for v in (*op.inputs, *op.outputs))
        return num_bytes * (8 if any(part in op.name for part in _HEAVY) else 1) + 1024

    weights = [weight(i) for i in range(len(graph.ops))]
    scale = STEP_SECONDS / sum(weights)
    ops = tuple(dataclasses.replace(op, seconds=scale * w) for op, w in zip(graph.ops, weights, strict=True))
    return dataclasses.replace(graph, ops=ops)


def _not_replayable(graph: StepGraph) -> StepGraph:
    return dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, replayable=False) for op in graph.ops))


SCENES = [(name, link, mix) for name in MODELS for link in LINKS for mix in MIXES]


CASES = [
    pytest.param(*scene, height, id=f"{'-'.join(scene)}-{height}")
    for number, scene in enumerate(SCENES)
    for height in (HEIGHTS if is_all() else (HEIGHTS[(number + number // 6) % len(HEIGHTS)],))
]
"""Each height comes with each model, link and mix, or all of them with all."""


@pytest.mark.parametrize(("name", "link", "mix", "height"), CASES)
def test_step_takes_the_predicted_time(name: str, link: str, mix: str, height: float) -> None:
    """Stalls and the whole step are within 10% and 2 ms of what the plan says, for a step of 100 ms."""
    subject = Subject.of(name)
    plan, device = subject.plan(height, link, mix)
    ran = subject.run(plan, device)
    assert _is_close(ran.stall_seconds, plan.predicted_stall_seconds)
    assert _is_close(ran.seconds, plan.predicted_step_seconds)
    assert ran.seconds == pytest.approx(STEP_SECONDS + ran.stall_seconds + ran.replay_seconds)


def _is_close(actual: float, predicted: float) -> bool:
    return abs(actual - predicted) <= RELATIVE * predicted + ABSOLUTE_SECONDS


@pytest.mark.parametrize(("name", "link", "mix", "height"), share(CASES, 2))
def test_memory_is_the_predicted_whatever_the_speed(name: str, link: str, mix: str, height: float) -> None:
    """Links that are faster or slower than planned, or erratic, change neither a bit nor the peak."""
    subject = Subject.of(name)
    plan, device = subject.plan(height, link, mix)
    dice = random.Random(name)
    speeds: tuple[Callable[[], float], ...] = (lambda: 0.1, lambda: 10.0, lambda: 10 ** dice.uniform(-1, 1))
    for slowness in speeds:
        ran = subject.run(plan, device, slowness)
        assert 0.99 * plan.predicted_peak_bytes <= ran.peak_bytes <= plan.predicted_peak_bytes
        assert all(map(torch.equal, ran.gradients, subject.gradients))


@pytest.mark.parametrize("name", MODELS)
def test_the_plans_are_worth_testing(name: str) -> None:
    """Among them are some that stall for long, some that replay, and some that use the disk."""
    subject = Subject.of(name)
    swap, mixed, disk = (subject.plan(0.1, "slow", mix)[0] for mix in MIXES)
    assert swap.predicted_stall_seconds > STEP_SECONDS
    assert {d.action for d in swap.decisions} == {"swap"}
    assert {d.action for d in mixed.decisions} == {"swap", "recompute"}
    assert {d.tier for d in disk.decisions if d.action == "swap"} == {"host", "disk"}
