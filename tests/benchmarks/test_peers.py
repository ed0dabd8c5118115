"""The suite of peers finds a budget at which our true peak is no higher than theirs, and compares what both cost."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from rich.progress import Progress
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.checkpoints import KEPT_OPS, BlockCheckpoints, blocks_of
from benchmarks.results import Measurements, Options
from benchmarks.suites import peers

CPU = torch.device("cpu")
NAMES = [*peers.PEERS, *(f"ours at the peak of {name}" for name in peers.PEERS)]


@pytest.fixture(scope="module")
def measured() -> Measurements:
    """What the quick mode gives of one model."""
    beside = torch.zeros(1 << 20)  # as much as the model itself: what else is alive is no part of anybody's peak
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "MODELS", {"Llama-like": peers.MODELS["Llama-like"]})
        measured = peers.run(Options(quick=True, num_pairs=3), Progress(disable=True))
    assert not beside.any()
    return measured


def _values(measured: Measurements, metric: str) -> dict[str, float]:
    rows = {row.case.removeprefix("Llama-like, "): row.value for row in measured.rows if row.metric == metric}
    return {name: rows[name] for name in rows}


def test_every_contender_has_its_overhead(measured: Measurements) -> None:
    """With an interval around it; spreads are there for the plain step, too."""
    overheads, lows, highs = (_values(measured, f"overhead{end}") for end in ("", "_low", "_high"))
    assert sorted(overheads) == sorted(NAMES)
    assert all(lows[name] <= overheads[name] <= highs[name] for name in NAMES)
    assert {f"Llama-like, {name}" for name in ("plain", *NAMES)} == set(measured.spread)


def test_ours_peaks_at_no_more_than_the_peer(measured: Measurements) -> None:
    """By the same tracker, which sees that both are below the plain step's peak."""
    peaks = _values(measured, "peak_bytes")
    for name in peers.PEERS:
        assert 0.9 * peaks[name] <= peaks[f"ours at the peak of {name}"] <= peaks[name] < peaks["plain"]


def test_ratios_are_those_of_the_overheads(measured: Measurements) -> None:
    """And the error of a prediction is that of the times that stand beside it."""
    overheads, ratios = _values(measured, "overhead"), _values(measured, "overhead_over_peer")
    seconds, predicted = _values(measured, "step_seconds"), _values(measured, "predicted_step_seconds")
    errors = _values(measured, "prediction_error")
    for name in peers.PEERS:
        ours = f"ours at the peak of {name}"
        assert ratios[ours] == pytest.approx(overheads[ours] / overheads[name])
        assert errors[ours] == pytest.approx(abs(predicted[ours] / seconds[ours] - 1))
    assert {row.goal for row in measured.rows if row.metric == "overhead_over_peer"} == {0.5}


class _Counter(TorchDispatchMode):
    """Counts ops by kind: those that selective checkpointing keeps, and all others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_kept = self.num_others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KEPT_OPS:
            self.num_kept += 1
        else:
            self.num_others += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("title", peers.MODELS)
def test_checkpoints_change_no_gradient(title: str) -> None:
    """Blocks are computed again in backward, the selected ops of them only where all are; off again, nothing is."""
    trained = peers.MODELS[title](CPU, True)
    checkpoints = BlockCheckpoints(blocks_of(trained.model))
    counters, gradients = [], []
    for context in (nullcontext, checkpoints.on, checkpoints.selective, nullcontext):
        torch.manual_seed(0)
        with _Counter() as counter:
            trained.step(context)
        counters.append(counter)
        gradients.append([weight.grad.clone() for weight in trained.model.parameters() if weight.grad is not None])
    for other in gradients[1:]:
        assert all(map(torch.equal, gradients[0], other))
    plain, everything, selective, off = counters
    assert everything.num_kept > selective.num_kept == plain.num_kept == off.num_kept
    assert everything.num_others > plain.num_others == off.num_others
    assert selective.num_others > plain.num_others
