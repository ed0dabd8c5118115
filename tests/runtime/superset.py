"""Steps under the plan for another structure, in both engines, and what there is to run."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_offload.capture.live import LiveBytes
from lightning_offload.capture.recorder import Recorder
from lightning_offload.graph import Decision
from lightning_offload.graph.hook_points import hooks_before_ops
from lightning_offload.graph.memory_plan import AT_PACK, ON_DEMAND, Action
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.fallback import SupersetRule
from lightning_offload.runtime.hooks import executing, patch_data_escapes
from lightning_offload.runtime.host_pool import HostPool
from lightning_offload.runtime.lanes import CopyLanes
from lightning_offload.runtime.native_executor import NativeExecutor, core_for
from lightning_offload.runtime.program import Program, compile_plan
from lightning_offload.runtime.tiers import Tiers
from lightning_offload.tensors.saved_forms import opened
from tests.capture.recording import observe
from tests.runtime.executing import CPU, plain, plan_of, saved_storages
from tests.runtime.inline import inline_lanes

SIDE = 64
LAYER_BYTES = 4 * SIDE * SIDE

Step = Callable[[], Tensor]


class Layers:
    """Layers that each save what they make, and some that differ."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.x = torch.randn(SIDE, SIDE, requires_grad=True)
        self.parameter = torch.nn.Parameter(torch.randn(SIDE, SIDE), requires_grad=False)
        self.given = torch.randn(SIDE, SIDE)
        self._made: list[Any] = []

    def __call__(self, layers: str) -> Step:
        """A step of some layers.

        "e" saves its result, "m" one that two ops save, "s" its argument, "r" noise that it then writes and nobody
        tells of; "w" is twice as wide, "t" three times; "d" saves doubles, "k" a number, "p" a parameter, "g" what was
        there before; "b" has a backward, "x" exposes what it then saves, "u" writes a part of what it saves between two
        saves.
        """

        def step() -> Tensor:
            y = self.x * 1
            for layer in layers:
                if layer == "e":
                    y = (y / 8).exp()
                elif layer == "m":
                    y = torch.relu(y)
                    self._made.append(y.untyped_storage()._weak_ref())
                    y = y * y
                elif layer == "s":
                    y = (y + 1).sin()
                elif layer == "r":
                    y = torch.ops.aten.rrelu_with_noise(y, torch.empty_like(y), 0.1, 0.3, True)
                elif layer == "d":
                    y = (y / 8).double().exp().float()
                elif layer == "p":
                    y = y * self.parameter
                elif layer == "g":
                    y = y * self.given
                elif layer == "k":
                    y = y * y.mean()
                elif layer == "b":
                    y = y + torch.autograd.grad(y.sum(), self.x, retain_graph=True)[0] / 8
                elif layer == "x":
                    y = y / 8
                    y.data.add_(1)
                    y = y * y
                elif layer == "u":
                    one, other = torch.unsafe_chunk(y / 8, 2)
                    one = (one * one).exp()
                    other.add_(1)
                    y = torch.cat([one, other * other])
                else:
                    y = torch.cat([y] * (2 if layer == "w" else 3), 1).exp()[:, :SIDE] / 8
                self._made.append(y.untyped_storage()._weak_ref())
            return y.sum()

        return step

    def num_alive(self) -> int:
        """How many of what layers save are there, in all steps so far."""
        return sum(not torch.UntypedStorage._expired(made) for made in self._made)


def program_for(
    step: Step,
    action: Action,
    *,
    only: Callable[[int], bool] = lambda _: True,
    chance: random.Random | None = None,
    open_sizes: Collection[int] = (),
) -> Program:
    """A program that treats all saved storages, or those at some places, one way.

    By chance some device copies are released later, and some brought back earlier.
    """
    recorder = Recorder(CPU)
    observe(lambda: step().backward(), recorder)  # type: ignore[no-untyped-call]
    graph = recorder.finish()
    chosen = [s for place, s in enumerate(saved_storages(graph)) if only(place)]
    decisions = [Decision(storage=s, action=action) for s in chosen]
    if chance is not None:
        hooked = [op for op, hook in enumerate(hooks_before_ops(graph)) if hook is not None]
        num_unpacks = sum(len(save.unpack_ticks) for save in graph.saves)
        decisions = [
            dataclasses.replace(
                decision,
                release_op=chance.choice([AT_PACK, *(op for op in hooked if op > _made_at(graph, decision.storage))]),
                prefetch_unpack=chance.choice([ON_DEMAND, chance.randrange(num_unpacks)]),
            )
            for decision in decisions
        ]
    return compile_plan(graph, plan_of(graph, *decisions), forms=opened(recorder.saved_forms, open_sizes))


def _made_at(graph: StepGraph, storage: int) -> int:
    return max(value.producer for value in graph.values if value.storage == storage)


@contextlib.contextmanager
def under(
    program: Program,
    engine: str,
    *,
    sees_ops: bool = False,
    persistent: Collection[int] = frozenset(),
    lanes: CopyLanes | None = None,
) -> Iterator[tuple[StepExecutor, HostPool]]:
    """Run what is inside as a step under the plan for another structure, in one of the engines."""
    pool = HostPool()
    tiers, core = Tiers(lanes if lanes is not None else inline_lanes(), pool), core_for(program, CPU, sees_ops=sees_ops)
    if engine == "native" and core is not None:
        executor: StepExecutor = NativeExecutor(
            core, device=CPU, tiers=tiers, program=program, sees_ops=False, persistent=lambda: persistent
        )
    else:
        executor = StepExecutor(
            program=program, device=CPU, tiers=tiers, verifier=None, sees_ops=sees_ops,
            observer=LiveBytes(CPU) if sees_ops else None, persistent=lambda: persistent,
        )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.callback(patch_data_escapes())
        stack.enter_context(executing(executor))
        yield executor, pool


def run(step: Step, program: Program, x: Tensor, engine: str, **how: Any) -> tuple[SupersetRule, HostPool, list[bytes]]:
    """A step under it: what decided, where it swapped to, and its gradient, which is that of plain training."""
    x.grad = None  # of the recording
    expected = plain(step, x)[:1]
    torch.manual_seed(3)  # as plain training's
    with under(program, engine, **how) as (executor, pool):
        step().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    found = [x.grad.numpy().tobytes()]
    x.grad = None
    assert found == expected
    assert executor.superset is not None
    return executor.superset, pool, found
