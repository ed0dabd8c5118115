"""The finder under DDP, in two gloo processes of torchrun: bits, agreement, and ranks that fail alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.ddp_job import EDGE

LIMIT_SECONDS = 120
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found in each case."""
    folder = tmp_path_factory.mktemp("ddp")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    job = [sys.executable, "-m", "tests.callbacks.ddp_job", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LIGHTNING_OFFLOAD_CACHE": str(folder / "cache")}
    # in its own group, so that the ranks go with their launcher where it takes too long
    process = subprocess.Popen(
        [*command, *job], cwd=ROOT, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    assert process.returncode == 0, output[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", ["plain", "bf16-accumulated", "static-graph", "bucket-view", "offload"])
def test_a_tuned_run_equals_an_untuned_one(ranks: list[dict[str, Any]], case: str) -> None:
    """On both ranks everything is bit for bit that of plain DDP at the found values, which are the same on both."""
    first, second = (rank[case] for rank in ranks)
    assert "error" not in first, first["error"]
    assert first == second
    # the most that a rank has for each of its micro-batches: 48 samples
    assert first["batch_size"] == (12 if case == "bf16-accumulated" else 16)
    assert first["steps"] > 0
    assert first["note"] == ""


def test_a_rank_that_runs_out_of_memory_alone(ranks: list[dict[str, Any]]) -> None:
    """Nobody hangs, the size is not ok on either rank, and both train on with one below the edge, bit for bit."""
    first, second = (rank["out-of-memory"] for rank in ranks)
    assert "error" not in first, first["error"]
    assert first == second
    assert 0.75 * EDGE <= first["batch_size"] <= EDGE
    failed = [trial for trial in first["trials"] if not trial["is_ok"]]
    assert failed
    assert all(trial["batch_size"] > EDGE and trial["reason"] for trial in failed)


@pytest.mark.parametrize(("case", "why"), [("not-provoked", "provoke_oom=False"), ("collectives", "collectives")])
def test_no_rank_is_made_to_run_out_where_others_would_wait(ranks: list[dict[str, Any]], case: str, why: str) -> None:
    """Sizes are predicted there, the result says why, and the training is that of an untuned run."""
    first, second = (rank[case] for rank in ranks)
    assert "error" not in first, first["error"]
    assert first == second
    assert why in first["note"]


def test_an_error_of_one_rank_is_raised_on_all(ranks: list[dict[str, Any]]) -> None:
    """The rank that failed raises its own error, the other one tells of it."""
    first, second = (rank["broken"] for rank in ranks)
    assert second == {"type": "KeyError", "text": "'mine'"}
    assert first["type"] == "TuningError"
    assert "rank 1" in first["text"]
    assert "mine" in first["text"]
