"""Ranks leave with the same values, whatever happens on one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_offload.errors import TuningError
from lightning_offload.tuning.ranks import STOPPED, Coordinator, GlooCoordinator, agreed
from lightning_offload.tuning.trial import Trial
from tests.shares import is_all

ROOT = Path(__file__).parents[2]
TIMEOUT = 120


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks, in processes of their own, found in each scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = [sys.executable, str(Path(__file__).with_name("search_ranks.py"))]
    children = [
        subprocess.Popen(
            [*script, str(rank), "2", str(folder / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [child.communicate(timeout=TIMEOUT) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0, 0], "".join(errors for _, errors in outputs)
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_two_ranks_agree_on_a_size_though_one_runs_out_of_memory(ranks: list[dict[str, Any]]) -> None:
    """One rank's OutOfMemoryError ends no rank: both try the same sizes and leave with the same one, which fits."""
    first, second = (rank["search"] for rank in ranks)
    assert first == second
    assert 0.94 * 300 <= first["size"] <= first["largest"] <= 300
    assert len(first["sizes"]) <= 12
    assert first["reasons"]
    assert all(reason.startswith("rank 1: CUDA out of memory at") for reason in first["reasons"])


def test_two_ranks_find_right_sizes_of_many_noisy_curves(ranks: list[dict[str, Any]]) -> None:
    """At least 95 of 100 are right, 11 of 12 here, and the same on both; 12 trials with a prediction, 24 without."""
    first, second = (rank["many"] for rank in ranks)
    assert first == second
    assert len(first) == (60 if is_all() else 12)
    assert all(case["num_trials"] <= (12 if case["is_predicted"] else 24) for case in first)
    wrong = [case for case in first if not case["is_right"]]
    assert len(wrong) <= (3 if is_all() else 1), wrong


def test_two_ranks_agree_on_values(ranks: list[dict[str, Any]]) -> None:
    """Smallest, largest, flags, broadcast and gathered values are the same on both ranks."""
    first, second = (rank["values"] for rank in ranks)
    assert first == second
    assert first == {
        "smallest": [0, 5],
        "largest": [1, 5],
        "all": [False, True],
        "first": {"from": 0},
        "gathered": ["rank 0", "rank 1"],
        "num_ranks": 2,
    }


def test_a_model_that_fails_on_rank_0_fails_on_all(ranks: list[dict[str, Any]]) -> None:
    """No rank waits for a decision that never comes: rank 0 raises its error, which all know of, the others tell it."""
    first, second = (rank["failing_model"] for rank in ranks)
    assert first == ["KeyError", "'no such op'", True]
    assert second == [
        "TuningError", "deciding failed on rank 0 (KeyError: 'no such op'): see the error there", False
    ]  # fmt: skip


def test_an_error_of_one_rank_is_one_of_all(ranks: list[dict[str, Any]]) -> None:
    """Where it is raised in common work the others are told why; where a rank just leaves, their wait ends at once."""
    first, second = (rank["failing_rank"] for rank in ranks)
    assert first["errors"] == ["TuningError: the work failed on rank 1 (KeyError: 1): see the error there", "told"]
    assert second["errors"] == ["KeyError: 1"]
    assert first["was_quick"]
    assert second["was_quick"]


def test_a_rank_that_never_comes(ranks: list[dict[str, Any]]) -> None:
    """The wait ends after the time-out, in one line that says who waited and for how long."""
    first, second = (rank["lost_rank"] for rank in ranks)
    assert second == "left"
    assert first.startswith("rank 0 waited for the other ranks to agree on a trial and failed, after at most 3 s")


def test_alone() -> None:
    """One process agrees with itself."""
    alone = Coordinator()
    assert alone.together(lambda: 3, "counting") == 3
    assert (alone.rank, alone.num_ranks) == (0, 1)
    assert alone.smallest(2) == alone.largest(2) == 2
    assert alone.is_true_on_all(True)
    assert not alone.is_true_on_all(False)
    assert alone.broadcast("x") == "x"


def test_without_torch_distributed() -> None:
    """A group of ranks without torch.distributed is one clear error."""
    with pytest.raises(TuningError, match="call init_process_group first"):
        GlooCoordinator().gather(1)


def test_importing_the_search_needs_no_torch() -> None:
    """The search and the agreement can be imported where torch is not loaded."""
    code = "import sys, lightning_offload.tuning.search, lightning_offload.tuning.ranks; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    assert done.stdout.strip() == "False"


class Recorded(Coordinator):
    """Plays one rank of several: the others' trials are given."""

    def __init__(self, *others: Any) -> None:
        self.others = others

    num_ranks = property(lambda self: 1 + len(self.others))  # type: ignore[assignment]
    rank = property(lambda self: 0)  # type: ignore[assignment]

    def gather(self, value: Any) -> tuple[Any, ...]:
        return (value, *self.others)

    def broadcast(self, value: Any) -> Any:
        return value


def test_the_slowest_rank_sets_the_pace() -> None:
    """Throughput is the slowest rank's times the ranks, with its steps; the peak is the largest."""
    fast = Trial.from_steps(8, (1.0, 1.0), peak_bytes=5)
    slow = Trial.from_steps(8, (2.0, 2.0, 2.0), peak_bytes=3)
    for mine, other in ((fast, slow), (slow, fast)):
        assert agreed(mine, Recorded(other)) == Trial(
            batch_size=8, is_ok=True, samples_per_second=8.0, peak_bytes=5, step_seconds=(2.0, 2.0, 2.0)
        )


def test_one_failure_fails_all() -> None:
    """A trial is ok only where it is on all ranks; the first rank that failed by itself gives the reason."""
    fine = Trial.from_steps(8, (1.0,), peak_bytes=5)
    failed = Trial(batch_size=8, is_ok=False, peak_bytes=9, reason="out of memory")
    expected = Trial(batch_size=8, is_ok=False, peak_bytes=9, reason="rank 1: out of memory")
    assert agreed(fine, Recorded(failed, failed)) == expected
    assert agreed(failed, Coordinator()) == failed
    stopped = Trial(batch_size=8, is_ok=False, peak_bytes=5, reason=STOPPED)
    assert agreed(stopped, Recorded(failed)) == expected
    assert agreed(stopped, Recorded(stopped)).reason == f"rank 0: {STOPPED}"


def test_ranks_that_tried_different_sizes() -> None:
    """Trials of different sizes are not one trial."""
    with pytest.raises(TuningError, match=r"different batch sizes, \[8, 4\]"):
        agreed(Trial.from_steps(8, (1.0,)), Recorded(Trial.from_steps(4, (1.0,))))
