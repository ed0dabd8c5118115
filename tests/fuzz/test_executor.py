"""Random programs under random decisions, by the executor alone: the gradients of plain PyTorch, or its error."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
import re
import warnings
from collections.abc import Iterator

import pytest
import torch

from lightning_offload.capture.recorder import Recorder
from lightning_offload.graph.hook_points import hooks_before_ops
from lightning_offload.graph.memory_plan import Decision
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.problem import Problem
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.hooks import executing, patch_data_escapes
from lightning_offload.runtime.host_pool import HostPool
from lightning_offload.runtime.program import Program as Compiled
from lightning_offload.runtime.program import compile_plan
from lightning_offload.runtime.tiers import Tiers
from tests.capture.recording import observe, record
from tests.fuzz.programs import SIDE, Machine, Net
from tests.fuzz.running import Program, at_a_hook, decide
from tests.runtime.executing import CPU, plan_of, under
from tests.runtime.inline import inline_lanes
from tests.shares import is_all

NUM_CHUNKS = 10 if is_all() else 2
SEEDS_PER_CHUNK = 15


def _step(program: Program, net: Net, *, sneaks: bool = False) -> None:
    torch.manual_seed(program.seed)
    batch = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(program.seed))
    Machine(net, str(program.seed), program.writes, sneaks=sneaks).run(batch, program.num_instructions).backward()


def _outcome(program: Program, net: Net, *, sneaks: bool = False) -> list[bytes | None] | str:
    """Gradients, parameters, buffers and the generator's state after a step, or the kind of error that it ends in."""
    try:
        _step(program, net, sneaks=sneaks)
    except RuntimeError as error:
        return "written in place" if re.search("modified .*in-?place", str(error)) else str(error)[:60]
    gradients = [parameter.grad for parameter in net.parameters()]
    tensors = [*gradients, *net.parameters(), *net.buffers(), torch.get_rng_state()]
    return [None if each is None else each.detach().contiguous().numpy().tobytes() for each in tensors]


def _compiled(graph: StepGraph, rng: random.Random) -> Compiled:
    problem = Problem(graph)
    weights = rng.choice([(1, 1, 1), (0, 1, 1), (0, 0, 1), (1, 0, 4)])
    decisions: list[Decision] = []
    for candidate in problem.candidates.values():
        decision = decide(rng, graph, problem, candidate, weights)
        if decision is not None:
            decisions.append(decision)
    return compile_plan(graph, plan_of(graph, *decisions))


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_random_program_is_exact(chunk: int) -> None:
    """Whatever is kept, swapped and recomputed: equal bits, the same random numbers, the same errors, nothing left."""
    for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK):
        _check(seed)


def _check(seed: int) -> None:
    program, rng = Program.of(seed), random.Random(f"decisions {seed}")
    torch.manual_seed(seed)
    start = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nets = [copy.deepcopy(start) for _ in range(3)]
        expected = _outcome(program, start)
        with under(None):
            assert _outcome(program, nets[0]) == expected, program
        if isinstance(expected, str):
            return
        graph = record(lambda: _step(program, nets[1]))
        with under(_compiled(graph, rng), verify=rng.random() < 0.5) as ran:
            assert _outcome(program, nets[2]) == expected, program
    assert not ran.executor.deviation, (program, ran.executor.deviation)
    assert ran.verifier is None or not ran.verifier.mismatched, program
    ran.pool.collect()
    assert ran.pool.used_bytes == 0, program


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_the_rest_of_a_step_that_was_to_keep_everything_is_exact(chunk: int) -> None:
    """A step that goes on where its plan ends: what it saves from then on leaves the device, also if written unseen."""
    num_left = sum(_has_left(seed) for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK))
    assert num_left > SEEDS_PER_CHUNK // 4


def _has_left(seed: int) -> bool:
    """Whether a step left a plan for its first half, and tensors the device."""
    whole = Program.of(seed)
    begun = dataclasses.replace(whole, num_instructions=whole.num_instructions // 2)
    torch.manual_seed(seed)
    start, pool = Net(), HostPool()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nets = [copy.deepcopy(start) for _ in range(3)]
        expected = _outcome(whole, start, sneaks=True)
        if isinstance(expected, str) or isinstance(_outcome(begun, nets[0]), str):
            return False
        program = compile_plan(graph := record(lambda: _step(begun, nets[1])), plan_of(graph))
        tiers = Tiers(inline_lanes(), pool)
        executor = StepExecutor(
            device=CPU, tiers=tiers, program=program, observer=None, verifier=None, sees_ops=False, keeps_all=True
        )
        with contextlib.ExitStack() as stack:
            stack.callback(patch_data_escapes())
            stack.enter_context(executing(executor))
            assert _outcome(whole, nets[2], sneaks=True) == expected, whole
    pool.collect()
    assert pool.used_bytes == 0, whole
    return pool.peak_bytes > 0


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_a_step_that_lacks_ops_or_has_more_is_exact(chunk: int) -> None:
    """Under a plan that recomputes as well, which it comes back to or leaves."""
    found = [_comes_back(seed) for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK)]
    assert sum(found) > SEEDS_PER_CHUNK // 4


@contextlib.contextmanager
def _skipping(instructions: set[int]) -> Iterator[None]:
    before, Machine.skipped = Machine.skipped, instructions
    try:
        yield
    finally:
        Machine.skipped = before


def _comes_back(seed: int) -> bool:
    """Whether a step ran under a plan for a step with more instructions, or fewer, and tensors left the device."""
    program, rng = Program.of(seed), random.Random(f"skipped {seed}")
    skipped = set(rng.sample(range(program.num_instructions), rng.choice([1, 1, 2, 3])))
    planned, seen = rng.choice([(set(), skipped), (skipped, set())])
    torch.manual_seed(seed)
    start = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nets = [copy.deepcopy(start) for _ in range(3)]
        with _skipping(seen):
            expected = _outcome(program, start)
        with _skipping(planned):
            if isinstance(expected, str) or isinstance(_outcome(program, nets[0]), str):
                return False
            graph = record(lambda: _step(program, nets[1]))
        with _skipping(seen), under(_compiled(graph, rng), verify=rng.random() < 0.3) as ran:
            assert _outcome(program, nets[2]) == expected, program
    ran.pool.collect()
    assert ran.pool.used_bytes == 0, program
    return ran.pool.peak_bytes > 0


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_a_step_under_the_plan_of_another_is_exact(chunk: int) -> None:
    """It goes along as far as the two agree, whatever it lacks or has more, also if it writes unseen."""
    found = [_follows(seed) for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK)]
    assert sum(found) > SEEDS_PER_CHUNK // 4


def _follows(seed: int) -> bool:
    """Whether a step followed the plan of another one, and tensors left the device."""
    program, rng = Program.of(seed), random.Random(f"other {seed}")
    planned = rng.choice(
        [
            dataclasses.replace(program, num_instructions=program.num_instructions // 2),
            dataclasses.replace(program, num_instructions=2 * program.num_instructions),
            Program.of(seed + 100_000),
        ]
    )
    torch.manual_seed(seed)
    start, pool = Net(), HostPool()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nets = [copy.deepcopy(start) for _ in range(3)]
        expected = _outcome(program, start, sneaks=True)
        if isinstance(expected, str) or isinstance(_outcome(planned, nets[0]), str):
            return False
        recorder = Recorder(CPU)
        observe(lambda: _step(planned, nets[1]), recorder)
        graph = recorder.finish()
        executor = StepExecutor(
            program=_aligned(graph, recorder, rng),
            device=CPU,
            tiers=Tiers(inline_lanes(), pool),
            observer=None,
            verifier=None,
            sees_ops=rng.random() < 0.3,
            persistent=lambda: {t.untyped_storage()._cdata for t in (*nets[2].parameters(), *nets[2].buffers())},
        )
        with contextlib.ExitStack() as stack:
            stack.callback(patch_data_escapes())
            stack.enter_context(executing(executor))
            assert _outcome(program, nets[2], sneaks=True) == expected, program
    assert executor.superset is not None
    has_followed = executor.num_packs > executor.superset.num_unmatched
    del executor
    pool.collect()
    assert pool.used_bytes == 0, program
    return has_followed and pool.peak_bytes > 0


def _aligned(graph: StepGraph, recorder: Recorder, rng: random.Random) -> Compiled:
    problem, weights = Problem(graph), rng.choice([(0, 1, 0), (1, 1, 0), (1, 4, 0)])
    hooked = [index for index, hook in enumerate(hooks_before_ops(graph)) if hook is not None]
    drawn = [decide(rng, graph, problem, candidate, weights) for candidate in problem.candidates.values()]
    decisions = [at_a_hook(decision, hooked, len(graph.ops)) for decision in drawn if decision is not None]
    return compile_plan(graph, plan_of(graph, *decisions), forms=recorder.saved_forms)
