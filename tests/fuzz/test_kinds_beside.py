"""Loops of several kinds of step at random: what one is given or leaves behind lies on the device beside the others.

Which tensors are there in a step that neither is given them nor made them differs from loop to loop, and not from one
round of a loop to the next, but for gradients. Plain training's own peak is a budget that is kept, and so is the least.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from tests.bare_heap import FEW_BYTES
from tests.bare_heap import links_are_measured as links_are_measured
from tests.engine.live_tracker import LiveStorageTracker
from tests.shares import share

NUM_ROUNDS = 9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One step of a round.

    Attributes:
        model: Which model it trains.
        given: Names of what it is given, of which it uses the first.
        held: The name under which its output is held, if it is.
        dropped: Names of what the program drops after it.
        every: In every how many rounds the optimizer steps: gradients are accumulated until then.
    """

    model: int
    given: tuple[str, ...]
    held: str | None
    dropped: tuple[str, ...]
    every: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Steps that are done in each round.

    Attributes:
        rows: Rows of each of a round's batches, by name.
        turns: The steps.
        drops_batches: Whether a round's batches go before the next ones are made.
    """

    rows: dict[str, int]
    turns: tuple[Turn, ...]
    drops_batches: bool

    @property
    def accumulates(self) -> bool:
        """Whether gradients of several rounds are added up."""
        return any(turn.every > 1 for turn in self.turns)


def loop(seed: int) -> Loop:
    """A loop of two or three models."""
    rng = random.Random(seed)
    rows = {f"batch{i}": rng.choice([48, 96, 200]) for i in range(rng.choice([1, 2, 3]))}
    turns: list[Turn] = []
    for model in range(rng.choice([2, 2, 3])):
        names = [*rows, *(turn.held for turn in turns if turn.held is not None)]
        names = [name for name in names if not any(name in turn.dropped for turn in turns)]
        given = tuple(rng.sample(names, rng.randint(1, min(2, len(names))))) or (names[0],)
        held = f"out{model}" if rng.random() < 0.6 else None
        droppable = [name for name in names if name.startswith("out")]
        dropped = tuple(name for name in droppable if rng.random() < 0.4)
        turns.append(Turn(model=model, given=given, held=held, dropped=dropped, every=rng.choice([1, 1, 2, 3])))
    return Loop(rows=rows, turns=tuple(turns), drops_batches=rng.random() < 0.5)


def train(made: Loop, memory: MemoryPlugin | None) -> tuple[list[bytes], list[int]]:
    """The parameters in the end, and the peak of each step as counted from outside, which is the predicted one."""
    gc.collect()
    gc.freeze()  # nobody is to count what others left
    torch.manual_seed(0)
    widths = [200, 320, 120]
    models = [
        nn.Sequential(nn.Linear(32, w), nn.Tanh(), nn.Linear(w, w), nn.Sigmoid(), nn.Linear(w, 32)) for w in widths
    ]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]
    held: dict[str, Tensor] = {}
    peaks = []
    with LiveStorageTracker() as tracker:
        for i in range(NUM_ROUNDS):
            if made.drops_batches:
                for name in made.rows:
                    held.pop(name, None)
            for name, rows in made.rows.items():
                held[name] = torch.randn(rows, 32)
            for turn in made.turns:
                x = tuple(held[name] for name in turn.given)
                tracker.register_all()
                mark = (None,) * turn.model  # steps are told apart by what they are given
                around = memory.step(*x, mark) if memory is not None else contextlib.nullcontext()
                with tracker.window() as window, around:
                    out = models[turn.model](x[0])
                    out.square().mean().backward()
                if turn.held is not None:
                    held[turn.held] = out.detach()
                del out, x
                for name in turn.dropped:
                    held.pop(name, None)
                peaks.append(window.peak_bytes)
                predicted = memory.report(of_last=True).predicted_peak_bytes if memory is not None else None
                if predicted is not None:
                    assert window.peak_bytes <= predicted + FEW_BYTES
                    # Those of two models that are never there at once are counted as if they were.
                    assert predicted <= window.peak_bytes + FEW_BYTES or made.accumulates
                if (i + 1) % turn.every == 0:
                    optimizers[turn.model].step()
                    optimizers[turn.model].zero_grad()
    return [p.detach().numpy().tobytes() for model in models for p in model.parameters()], peaks


@pytest.mark.parametrize("seed", share(range(20), 4))
def test_budgets_are_kept(seed: int) -> None:
    """Plain training's own peak, and what everything swapped out needs."""
    made = loop(seed)
    expected, plain_peaks = train(made, None)
    with MemoryPlugin("1GiB", policy="all-swap") as memory:
        trained, least = train(made, memory)
    assert trained == expected
    for budget in (max(plain_peaks), max(least[3 * len(made.turns) :]) + FEW_BYTES):
        with MemoryPlugin(f"{budget}B") as memory:
            trained, peaks = train(made, memory)
            assert memory.report().phase == "planned"
        assert trained == expected
        assert max(peaks) <= budget
