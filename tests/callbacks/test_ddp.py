"""The finder under DDP, in two gloo processes: bits, agreement, and ranks that fail alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.ddp_job import EDGE, EXCHANGE_SECONDS, NOISE_SCALE
from tests.distributed.launching import run, torchrun
from tests.shares import is_all

JOB = Path(__file__).with_name("ddp_job.py")

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What each rank found in each case."""
    folder = tmp_path_factory.mktemp("ddp")
    torchrun(JOB, folder)
    return found_in(folder)


def found_in(folder: Path) -> Ranks:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_lightnings_own_launcher(tmp_path: Path) -> None:
    """Where the Trainer starts the second process itself: in bf16 with 4 accumulated batches, and in fp32."""
    run(JOB, tmp_path, "bf16-accumulated", *(["plain"] if is_all() else []))
    first, second = found_in(tmp_path)
    assert all("error" not in case for case in first.values()), first
    assert first == second
    assert [case["batch_size"] for case in first.values()] == ([12, 16] if is_all() else [12])


@pytest.mark.parametrize("case", ["plain", "bf16-accumulated", "static-graph", "bucket-view", "offload", "reading"])
def test_a_tuned_run_equals_an_untuned_one(ranks: Ranks, case: str) -> None:
    """On both ranks everything is bit for bit that of plain DDP at the found values, which are the same on both."""
    first, second = (rank[case] for rank in ranks)
    assert "error" not in first, first["error"]
    assert first == second
    # the most that a rank has for each of its micro-batches: 48 samples
    assert first["batch_size"] == (12 if case == "bf16-accumulated" else 16)
    assert first["steps"] > 0
    assert first["note"] == ""


@pytest.mark.parametrize("case", ["out-of-memory", "out-of-memory-manual"])
def test_a_rank_that_runs_out_of_memory_alone(ranks: Ranks, case: str) -> None:
    """Nobody hangs, the size is not ok on either rank, and both train on with one below the edge, bit for bit."""
    first, second = (rank[case] for rank in ranks)
    assert "error" not in first, first["error"]
    assert first == second
    assert 0.75 * EDGE <= first["batch_size"] <= EDGE
    failed = [trial for trial in first["trials"] if not trial["is_ok"]]
    assert failed
    assert all(trial["batch_size"] > EDGE and trial["reason"] for trial in failed)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("not-provoked", "allow_oom=False"),
        ("collectives", "collectives"),
        ("collectives-in-hook", "collectives"),
        ("synchronised", "predicted, not tried: SyncBatchNorm talks to other ranks"),
        ("sharded", "predicted, not tried: ModelParallelStrategy gathers parameters"),
    ],
)
def test_no_rank_is_made_to_run_out_where_others_would_wait(ranks: Ranks, case: str, why: str) -> None:
    """Sizes are predicted there, the result says why, and the training is that of an untuned run."""
    first, second = (rank[case] for rank in ranks)
    assert "error" not in first, first["error"]
    assert first == second
    assert why in first["note"]


def test_the_configured_size_shows_first_whether_ranks_talk(ranks: Ranks) -> None:
    """No larger one is tried before, not even `init_val`: where it is too much for one rank, others would wait."""
    assert [rank["collectives"]["first"] for rank in ranks] == [4, 4]


@pytest.mark.parametrize("case", ["noise", "noise-accumulated"])
def test_ranks_measure_the_noise_scale_together(ranks: Ranks, case: str) -> None:
    """From each rank's first micro-gradient and from what they reduce; the same interval, with the true value in it."""
    first, second = (rank[case] for rank in ranks)
    assert "error" not in first, first["error"]
    assert first == second
    low, high = first["noise"]
    assert NOISE_SCALE / 4 < low <= NOISE_SCALE <= high < 4 * NOISE_SCALE


def test_ranks_keep_the_effective_batch(ranks: Ranks) -> None:
    """All accumulate less, and train as without a finder at the same values, bit for bit."""
    first, second = (rank["kept"] for rank in ranks)
    assert "error" not in first, first["error"]
    assert first == second == {"batch_size": 16, "accumulation": 1, "lr": 0.01}


def test_a_slow_hook_counts_as_it_does_in_the_run(ranks: Ranks) -> None:
    """The finder's throughput is the run's."""
    first, second = (rank["hooked"] for rank in ranks)
    assert "error" not in first, first["error"]
    assert first == second
    assert first["found"] == pytest.approx(first["real"], rel=0.1)


@pytest.mark.parametrize("case", ["refusing", "shy"])
def test_ranks_go_on_together_where_they_cannot_be_tuned(ranks: Ranks, case: str) -> None:
    """Be it that one of them fails where others wait for nothing, or all by an error of the model's own."""
    first, second = (rank[case] for rank in ranks)
    assert "error" not in first, first["error"]
    assert first == second == {"is_kept": True}


def test_an_error_of_one_rank_is_raised_on_all(ranks: Ranks) -> None:
    """The rank that failed raises its own error, the other one tells of it."""
    first, second = (rank["broken"] for rank in ranks)
    assert second == {"type": "KeyError", "text": "'mine'"}
    assert first["type"] == "TuningError"
    assert "rank 1" in first["text"]
    assert "mine" in first["text"]


def test_the_exchange_of_gradients_counts_as_it_does_for_the_decorator(ranks: Ranks) -> None:
    """Timed steps exchange gradients, which is in the throughput of both, and both choose alike."""
    first, second = (rank["alike"] for rank in ranks)
    assert "error" not in first, first["error"]
    assert first == second
    callback, decorator = first["callback"], first["decorator"]
    assert callback["batch_size"] == decorator["batch_size"]
    for found in (callback, decorator):
        for size, speed in found["speeds"].items():
            step_seconds = 1.0 + int(size) / 16 + EXCHANGE_SECONDS
            assert speed == pytest.approx(2 * int(size) / step_seconds)
