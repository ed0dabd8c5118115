"""Runs a random program for a few steps, plainly or under a random plan, and notes every bit that it leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import re
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_offload import MemoryPlugin
from lightning_offload.errors import StaleInputError
from lightning_offload.graph.hook_points import hooks_before_ops
from lightning_offload.graph.memory_plan import AT_PACK, ON_DEMAND, Action, Decision, MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.problem import Candidate, Problem
from lightning_offload.plugins.hardware import Hardware
from lightning_offload.runtime.host_pool import HostPool
from lightning_offload.runtime.program import compile_plan
from tests.fuzz.programs import SIDE, Machine, Net

NUM_STEPS = 6
NUM_QUIET_STEPS = 10
FIRST_SNEAKING_STEP = 6
SHAPES = ("whole", "forward", "bare", "retain", "interleaved", "accumulate", "update-inside")
"""Forward and backward in one step; forward alone with a watched or a bare backward; two backwards; two steps at once;
gradients of two steps added up; the optimizer inside the step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A program and how it is trained; all from one seed.

    Attributes:
        is_quiet: Whether nothing is recomputed, so that its steps need no dispatch mode, and trained for longer. From
            some step on it may write what no version counter counts.
    """

    seed: int
    shape: str
    writes: float
    num_instructions: int
    varies: bool
    is_quiet: bool = False

    @classmethod
    def of(cls, seed: int, *, is_quiet: bool = False) -> Program:
        rng = random.Random(f"program {seed}")
        return cls(
            seed=seed,
            shape=rng.choice(SHAPES),
            writes=rng.choice([0.0, 0.1, 0.25]),
            num_instructions=rng.randrange(4, 22),
            varies=rng.random() < (0.1 if is_quiet else 0.25),
            is_quiet=is_quiet,
        )

    @property
    def num_steps(self) -> int:
        """How long it is trained."""
        return NUM_QUIET_STEPS if self.is_quiet else NUM_STEPS

    def sneaks(self, index: int) -> bool:
        """Whether it writes unseen in a step."""
        return self.is_quiet and index >= FIRST_SNEAKING_STEP and random.Random(f"{self.seed} {index}").random() < 0.5


def random_planner(seed: int, *, is_quiet: bool = False) -> Any:
    """A planner that decides by dice, within what is legal: anything a candidate allows.

    Args:
        seed: Of the dice.
        is_quiet: Whether its plans recompute nothing, and release at packs and unpacks alone, so that steps see no ops.
    """
    rng = random.Random(f"plan {seed}")

    def plan(graph: StepGraph, device: Any, target: Any, *, policy: str, keep: frozenset[int], **_: Any) -> MemoryPlan:
        problem = Problem(graph, keep)
        choices = [(0, 1, 0), (1, 1, 0), (1, 4, 0)] if is_quiet else _WEIGHTS
        weights = rng.choice(choices)
        decisions = [
            decision
            for c in problem.candidates.values()
            if (decision := decide(rng, graph, problem, c, weights)) is not None
        ]
        if is_quiet:
            hooked = [index for index, hook in enumerate(hooks_before_ops(graph)) if hook is not None]
            decisions = [at_a_hook(decision, hooked, len(graph.ops)) for decision in decisions]
        return MemoryPlan(
            graph_digest=graph.digest(), policy=policy, budget_bytes=target, decisions=tuple(decisions),
            predicted_peak_bytes=0, predicted_step_seconds=0.0, plain_peak_bytes=0, plain_step_seconds=0.0,
            floor_bytes=0, floor_op="", bound_seconds=0.0,
        )  # fmt: skip

    return plan


_WEIGHTS = [(1, 1, 1), (0, 1, 1), (0, 0, 1), (0, 1, 0), (1, 0, 4)]


def decide(rng: random.Random, graph: StepGraph, problem: Problem, c: Candidate, weights: Any) -> Decision | None:
    """A legal decision by dice, None to keep."""
    actions: tuple[Action, ...] = ("keep", "swap", "recompute")
    (action,) = rng.choices(actions, weights)
    if action == "keep":
        return None
    if action == "recompute" and not c.can_recompute:
        action = "swap"
    first = next((i for i, op in enumerate(graph.ops) if op.tick > c.pack_tick), len(graph.ops))
    return Decision(
        storage=c.storage,
        action=action,
        release_op=AT_PACK if rng.random() < 0.5 else rng.randint(first, len(graph.ops)),
        prefetch_unpack=rng.randrange(ON_DEMAND, len(problem.unpacks)) if rng.random() < 0.5 else ON_DEMAND,
        memo=rng.random() < 0.5,
    )


def at_a_hook(decision: Decision, hooked: list[int], num_ops: int) -> Decision:
    """The decision with its release at an op that a pack or an unpack comes before."""
    if decision.release_op == AT_PACK:
        return decision
    release_op = next((index for index in hooked if index >= decision.release_op), num_ops)
    return dataclasses.replace(decision, release_op=release_op)


_WRITTEN = re.compile("modified .*in-?place")
Trace = list[tuple[str, Any]]


def _bits(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    data = tensor.detach().resolve_conj().contiguous().flatten().view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), bytes(data.numpy())


class _Plain:
    def step(self, *inputs: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        loss.backward(**kwargs)


def trace(program: Program, memory: Any = None) -> Trace:
    """Train; every loss, gradient, parameter, buffer and random state, and every error."""
    torch.manual_seed(program.seed)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5, foreach=program.seed % 2 == 0)
    runner = _Runner(program, memory or _Plain(), net, optimizer)
    for index in range(program.num_steps):
        try:
            runner.train_step(index)
        except RuntimeError as error:
            if isinstance(error, StaleInputError):
                raise
            # Which of two complaints about the same write comes first may differ.
            runner.trace.append(("error", "written in place" if _WRITTEN.search(str(error)) else str(error)[:60]))
        runner.end_step()
    return runner.trace


@dataclasses.dataclass(slots=True)
class _Runner:
    program: Program
    memory: Any
    net: Net
    optimizer: torch.optim.Optimizer
    trace: Trace = dataclasses.field(default_factory=list)

    def train_step(self, index: int) -> None:
        shape = self.program.shape
        if shape in ("whole", "retain", "update-inside"):
            with self.memory.step():
                loss = self.forward(index)
                loss.backward(retain_graph=shape == "retain")
                if shape == "retain":
                    loss.backward()
                if shape == "update-inside":
                    self.optimizer.step()
            self.note("loss", loss)
            return
        losses = []
        for part in range(1 if shape in ("forward", "bare") else 2):
            with self.memory.step():
                losses.append(self.forward(index, part))
            self.update_statistics(index)
            if shape == "accumulate":
                losses[-1].backward()
        for loss in losses:
            self.note("loss", loss)
            if shape == "forward":
                self.memory.backward(loss)
            elif shape != "accumulate":
                loss.backward()

    def forward(self, index: int, part: int = 0) -> Tensor:
        program = self.program
        batch = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(100 * index + part))
        key = f"{program.seed} {index % 3 == 2 if program.varies else False}"
        return Machine(self.net, key, program.writes, sneaks=program.sneaks(index)).run(batch, program.num_instructions)

    def update_statistics(self, index: int) -> None:
        """Update, out of any step and past version counters, what batch norm in evaluation mode read in forward."""
        norm = self.net.norm_eval
        if self.program.seed % 2:
            F.batch_norm(torch.full((2, SIDE), 1.0 + index), norm.running_mean, norm.running_var, training=True)

    def end_step(self) -> None:
        for name, parameter in self.net.named_parameters():
            self.note(f"grad {name}", parameter.grad)
        if self.program.shape != "update-inside":
            self.optimizer.step()
        self.optimizer.zero_grad()
        for name, tensor in (*self.net.named_parameters(), *self.net.named_buffers()):
            self.note(name, tensor)
        self.note("rng", torch.get_rng_state())

    def note(self, name: str, tensor: Tensor | None) -> None:
        self.trace.append((name, _bits(tensor)))


def _compiler(*, is_bound: bool) -> Any:
    """What compiles plans: where sizes are bounds, also steps with smaller tensors follow what is not their plan."""

    def compiled(graph: StepGraph, plan: MemoryPlan, **_: Any) -> Any:
        return compile_plan(graph, plan, is_bound=is_bound)

    return compiled


@contextlib.contextmanager
def randomly_planned(program: Program) -> Iterator[MemoryPlugin]:
    """A plugin whose plans come from dice."""
    verify = ("first", "never", "always")[program.seed % 3]
    with (
        mock.patch("lightning_offload.planning.planner.plan", random_planner(program.seed, is_quiet=program.is_quiet)),
        mock.patch("lightning_offload.plugins.plan_source.compile_plan", _compiler(is_bound=program.seed % 4 >= 2)),
        MemoryPlugin(device="cpu", policy="all-swap", verify=verify) as memory,
    ):
        yield memory


def check(seed: int, *, is_quiet: bool = False) -> str:
    """Run one program both ways and compare.

    Args:
        seed: Of the program.
        is_quiet: Whether it is one whose steps need no dispatch mode.

    Returns:
        What happened: "same", "error" (the same one both ways), or "stale".

    Raises:
        AssertionError: Something differs, or stays behind.
    """
    program = Program.of(seed, is_quiet=is_quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = trace(program)
        with randomly_planned(program) as memory:
            pools = _note_pools(memory)
            try:
                actual = trace(program, memory)
            except StaleInputError:
                assert program.shape in ("bare", "interleaved", "accumulate", "forward"), "stale within one step"
                return "stale"
        _check_left(memory, pools)
    for i, ((name, before), (name_now, after)) in enumerate(zip(expected, actual, strict=False)):
        assert (name, before) == (name_now, after), f"{program}: {_describe(expected, actual, i)}"
    assert len(expected) == len(actual)
    return "error" if any(name == "error" for name, _ in expected) else "same"


def _describe(expected: Trace, actual: Trace, i: int) -> str:
    step = sum(name == "rng" for name, _ in expected[:i])
    values = [v if name == "error" else "bits" for name, v in (expected[i], actual[i])]
    return f"step {step}: {expected[i][0]!r} {values[0]}, with the plugin {actual[i][0]!r} {values[1]}"


def _note_pools(memory: MemoryPlugin) -> list[HostPool]:
    """The host pools that the plugin uses from now on; detaching makes it forget them."""
    pools: list[HostPool] = []
    steps = memory._steps
    hardware_for = steps.hardware_for

    def noting(inputs: Any) -> Hardware:
        hardware = hardware_for(inputs)
        pools.append(hardware.tiers.host)
        return hardware

    steps.hardware_for = noting  # type: ignore[method-assign]
    return pools


def _check_left(memory: MemoryPlugin, pools: list[HostPool]) -> None:
    torch.ones(1, requires_grad=True).sum().backward()  # autograd holds on to a backward that failed until the next
    gc.collect()
    assert not list(memory._steps.executors), "an executor stays behind"
    for pool in pools:
        pool.collect()
        assert pool.used_bytes == 0, f"{pool.used_bytes} bytes of host memory stay behind"
