"""Random programs under random decisions, by the executor alone: the gradients of plain PyTorch, or its error."""

from __future__ import annotations

import copy
import random
import re
import warnings

import pytest
import torch

from lightning_offload.graph.memory_plan import Decision
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.planning.problem import Problem
from lightning_offload.runtime.program import Program as Compiled
from lightning_offload.runtime.program import compile_plan
from tests.capture.recording import record
from tests.fuzz.programs import SIDE, Machine, Net
from tests.fuzz.running import Program, decide
from tests.runtime.executing import plan_of, under

NUM_CHUNKS = 10
SEEDS_PER_CHUNK = 15


def _step(program: Program, net: Net) -> None:
    torch.manual_seed(program.seed)
    batch = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(program.seed))
    Machine(net, str(program.seed), program.writes).run(batch, program.num_instructions).backward()


def _outcome(program: Program, net: Net) -> list[bytes | None] | str:
    """Gradients, parameters, buffers and the generator's state after a step, or the kind of error that it ends in."""
    try:
        _step(program, net)
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
