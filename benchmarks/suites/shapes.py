"""Training whose lengths or layers change from step to step, against the same trained one at a time.

A GPT-2 trains on sequences whose lengths are drawn anew for each step, within a budget of which a half, or a fifth, of
what the longest could save is granted. Beside it, in turns, a plain copy takes the same steps. What each length costs
where nothing else is trained is measured by itself, at eight lengths, steps and budgets alike, in turns as well;
between them it is interpolated. `changing_over_one_length` is what all steps took together, those included that were
recorded and all planning, over what they would have taken had each length been trained alone, once it had its final
plan.

The same GPT-2 at one length, each of whose blocks is left out with a probability of a tenth:
`changing_over_one_structure` is what all steps took, recordings included, over what they would have taken had each cost
as much more than a plain one as a step with all blocks does under its final plan.

The same changing lengths on an A100, by the planner's own simulator; cf. `benchmarks/shapes/simulated.py`.

Planning: how long the plugin takes from a shape that it has not seen to its plan, once three were recorded, for steps
of some thousand ops; the median over shapes.
"""

from __future__ import annotations

import functools
import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor, nn

from benchmarks import environment
from benchmarks.pairs import synchronize
from benchmarks.results import Measurements, Options, Row
from benchmarks.shapes.picture import draw
from benchmarks.shapes.simulated import simulated
from benchmarks.workloads import learn_limits, plan_steps
from examples.models import resnet152
from lightning_offload import MemoryPlugin
from lightning_offload.errors import UnsupportedError

TITLE = "Changing shapes"

_GOAL = 1.05
_GPT2_PLANNING_GOAL = 0.010
_RESNET_PLANNING_GOAL = 0.030
_HEIGHTS = (0.5, 0.2)
_NUM_STEPS = 300
_NUM_DROPPING = 120  # steps in which blocks are left out
_NUM_ALONE = 8  # lengths that are trained by themselves
_NUM_STEADY = 7  # steps each, under the final plan
_NUM_NEW = 9  # shapes that are planned
_SHORTEST, _LONGEST, _LONGEST_QUICK, _LONGEST_SIMULATED = 16, 512, 48, 1024
_DROPPED = 0.1  # of the blocks
_NUM_FIRST = 20
"""Steps that are told apart: those in which shapes are learned."""

_Context = Callable[[], AbstractContextManager[object]]


class _Training:
    """A model with what it is trained on at any length."""

    def __init__(self, device: torch.device, *, quick: bool, layers: int, width: int) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            n_layer=layers, n_embd=width, n_head=4, vocab_size=1000, n_positions=_LONGEST, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        self.model: nn.Module = GPT2LMHeadModel(config).train().to(device)
        self.model.blocks = nn.ModuleList(self.model.transformer.h)  # all of them stay known where some are left out
        self._device = device
        self._batch_size = 2 if quick else 4

    def batch(self, length: int) -> Tensor:
        """Tokens."""
        return torch.randint(0, 1000, (self._batch_size, length), device=self._device)

    def leave_out(self, kept: Sequence[bool]) -> None:
        """Have the next steps without some blocks."""
        blocks = zip(self.model.blocks, kept, strict=True)
        self.model.transformer.h = nn.ModuleList(block for block, is_kept in blocks if is_kept)

    def seconds(self, tokens: Tensor, context: _Context = nullcontext) -> float:
        """Take a step; how long it took, with all that comes before its first op."""
        self.model.zero_grad(set_to_none=True)
        synchronize()
        start = time.perf_counter()
        with context():
            self.model(input_ids=tokens, labels=tokens).loss.backward()
        synchronize()
        return time.perf_counter() - start

    def managed_step(self, memory: MemoryPlugin, length: int) -> None:
        """Take a step of a length under a plugin."""
        tokens = self.batch(length)
        self.seconds(tokens, functools.partial(memory.step, tokens))


def run(options: Options, progress: Progress) -> Measurements:
    """Measure all cases; see the module's description."""
    device, quick = environment.device(), options.quick
    layers, width = (2, 32) if quick else (6, 256)
    make = functools.partial(_Training, device, quick=quick, layers=layers, width=width)
    num_steps, longest = (12, _LONGEST_QUICK) if quick else (_NUM_STEPS, _LONGEST)
    rng = random.Random(0)
    lengths = [rng.randrange(_SHORTEST, longest + 1) for _ in range(num_steps)]
    alone = np.linspace(_SHORTEST, longest, 2 if quick else _NUM_ALONE).round().astype(int).tolist()
    task = progress.add_task("shapes", total=len(_HEIGHTS) * (num_steps + len(alone)) + 2 + len(_HEIGHTS))
    rows: list[Row] = []
    runs: list[dict[str, Any]] = []
    advance = functools.partial(progress.advance, task)
    for height in _HEIGHTS:
        case = f"GPT-2, {_SHORTEST} to {longest} tokens, h = {height}"
        progress.update(task, description=case)
        gc.collect()  # the models of the case before are beside no step of this one
        run, found = _changing(case, make, lengths, alone, height, advance)
        rows += found
        runs.append(run)
    num_dropping = min(num_steps, _NUM_DROPPING)
    kept = [[rng.random() >= _DROPPED for _ in range(layers)] for _ in range(num_dropping)]
    for height in _HEIGHTS:
        case = f"GPT-2, blocks left out at random, h = {height}"
        progress.update(task, description=case)
        gc.collect()
        rows += _dropping(case, make, longest // 2, kept, height)
        advance()
    progress.update(task, description="simulated")
    longer = [
        _SHORTEST + round((n - _SHORTEST) * (_LONGEST_SIMULATED - _SHORTEST) / (longest - _SHORTEST)) for n in lengths
    ]
    rows += simulated(longer if not quick else lengths, _HEIGHTS, _GOAL, quick=quick)
    for name, goal, seconds in (
        ("GPT-2, 12 layers", _GPT2_PLANNING_GOAL, _planning_of_gpt2(device, quick=quick)),
        ("ResNet-152", _RESNET_PLANNING_GOAL, _planning_of_resnet(device, quick=quick)),
    ):
        case = f"{name}, a shape that was not seen"
        rows.append(Row(case=case, metric="planning_seconds", value=statistics.median(seconds), goal=goal))
        rows.append(Row(case=case, metric="most_planning_seconds", value=max(seconds)))
        advance()
    gc.collect()
    config = {
        "gpt2": {
            "num_layers": layers,
            "width": width,
            "batch_size": 2 if quick else 4,
            "num_steps": num_steps,
            "num_dropping": num_dropping,
        },
        "alone": {"lengths": alone},
        "runs": runs,
    }
    if not quick:
        try:
            draw(runs)
        except UnsupportedError as error:
            progress.console.print(error)
    return Measurements(rows=rows, config=config, repeats=num_steps)


def _changing(
    case: str,
    make: Callable[[], _Training],
    lengths: Sequence[int],
    alone: Sequence[int],
    height: float,
    advance: Callable[[], None],
) -> tuple[dict[str, Any], list[Row]]:
    """All steps with changing lengths, and what they would have cost one at a time."""
    plain, managed = make(), make()
    budget = _budget(plain, managed, alone[-1], height)
    plain_seconds, managed_seconds, phases = [], [], []
    with MemoryPlugin(f"{budget}B", module=managed.model) as memory:
        for count, length in enumerate(lengths):
            tokens = managed.batch(length)
            for is_plain in (True, False) if count % 2 == 0 else (False, True):
                if is_plain:
                    plain_seconds.append(plain.seconds(tokens))
                else:
                    managed_seconds.append(managed.seconds(tokens, functools.partial(memory.step, tokens)))
                    phases.append(memory.report().phase)
            advance()
        report = memory.report()
    del plain, managed, tokens
    gc.collect()  # beside other models' steps they would count
    ratios = []
    for length in alone:
        ratios.append(_alone(make, length, budget))
        advance()
    expected = sum(np.interp(lengths, alone, ratios) * np.array(plain_seconds))
    first_later = min(_NUM_FIRST, len(lengths) // 2)
    figures = {
        "ratio": sum(managed_seconds) / sum(plain_seconds),
        "ratio_from_step_20": sum(managed_seconds[first_later:]) / sum(plain_seconds[first_later:]),
        "one_length_ratio": expected / sum(plain_seconds),
        "num_shapes": report.num_shapes,
        "num_at_first_sight": report.num_at_first_sight,
        "num_deviations": report.num_deviations,
        "planning_share": report.planning_seconds / sum(managed_seconds),
        "budget_bytes": budget,
    }
    goal = _GOAL if height == _HEIGHTS[0] else None
    first = Row(case=case, metric="changing_over_one_length", value=sum(managed_seconds) / expected, goal=goal)
    run = {
        "title": case, "lengths": list(lengths), "phases": phases, "plain_seconds": plain_seconds,
        "seconds": managed_seconds,
    }  # fmt: skip
    return run, [first, *(Row(case=case, metric=metric, value=float(value)) for metric, value in figures.items())]


def _dropping(
    case: str, make: Callable[[], _Training], length: int, kept: Sequence[Sequence[bool]], height: float
) -> list[Row]:
    """All steps with other blocks each, and what they would have cost with one structure."""
    plain, managed = make(), make()
    budget = _budget(plain, managed, length, height)
    tokens = managed.batch(length)
    plain_seconds, managed_seconds = [], []
    with MemoryPlugin(f"{budget}B", module=managed.model) as memory:
        for count, blocks in enumerate(kept):
            for is_plain in (True, False) if count % 2 == 0 else (False, True):
                training = plain if is_plain else managed
                training.leave_out(blocks)
                context = nullcontext if is_plain else functools.partial(memory.step, tokens)
                (plain_seconds if is_plain else managed_seconds).append(training.seconds(tokens, context))
        report = memory.report()
    del plain, managed, training
    gc.collect()
    whole = _alone(make, length, budget)
    first_later = min(_NUM_FIRST, len(kept) // 2)
    figures = {
        "ratio": sum(managed_seconds) / sum(plain_seconds),
        "ratio_from_step_20": sum(managed_seconds[first_later:]) / sum(plain_seconds[first_later:]),
        "one_structure_ratio": whole,
        "num_aligned": report.num_aligned,
        "num_deviations": report.num_deviations,
        "budget_bytes": budget,
    }
    over_one = sum(managed_seconds) / (whole * sum(plain_seconds))
    first = Row(case=case, metric="changing_over_one_structure", value=over_one)
    return [first, *(Row(case=case, metric=metric, value=float(value)) for metric, value in figures.items())]


def _alone(make: Callable[[], _Training], length: int, budget: int) -> float:
    """What steps of one length take over plain ones, under their final plan."""
    plain, managed = make(), make()
    tokens = managed.batch(length)
    found = []
    with MemoryPlugin(f"{budget}B", module=managed.model) as memory:
        context = functools.partial(memory.step, tokens)

        def both() -> None:
            managed.seconds(tokens, context)
            plain.seconds(tokens)

        plan_steps(memory, both)
        for _ in range(_NUM_STEADY):
            found.append(managed.seconds(tokens, context) / plain.seconds(tokens))
    return statistics.median(found)


def _budget(plain: _Training, managed: _Training, longest: int, height: float) -> int:
    """Between the floor (0) and the plain peak (1) of the longest, beside all that is there: a plain copy above all."""
    tokens = managed.batch(longest)
    plain.seconds(tokens)  # its gradients stay
    limits = learn_limits(managed.model, lambda memory: managed.managed_step(memory, longest))
    managed.model.zero_grad(set_to_none=True)
    return limits.budget(height)


def _planning_of_gpt2(device: torch.device, *, quick: bool) -> list[float]:
    training = _Training(device, quick=quick, layers=2 if quick else 12, width=32)

    return _planning(
        training.model, training.managed_step, [64, 448, 160, *range(256, 256 + 20 * (3 if quick else _NUM_NEW), 20)]
    )


def _planning_of_resnet(device: torch.device, *, quick: bool) -> list[float]:
    model = (resnet152() if not quick else nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))).to(device)

    def step(memory: MemoryPlugin, size: int) -> None:
        images = torch.randn(2, 3, size, size, device=device)
        model.zero_grad(set_to_none=True)
        with memory.step(images):
            model(images).square().mean().backward()

    return _planning(model, step, [64, 224, 72, *range(144, 144 + 8 * (3 if quick else _NUM_NEW), 8)])


def _planning(model: nn.Module, step: Callable[[MemoryPlugin, int], None], sizes: Sequence[int]) -> list[float]:
    """Seconds that plans of shapes take that were not seen, under a budget that not all of them fit."""
    budget = learn_limits(model, lambda memory: step(memory, max(sizes))).budget(0.2)
    found, before = [], 0.0
    with MemoryPlugin(f"{budget}B", module=model) as memory:
        for size in sizes:
            step(memory, size)
            now = memory.report().planning_seconds
            found.append(now - before)
            before = now
    return found[4:]  # the first that is derived fits the model of the step
