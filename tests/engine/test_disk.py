"""Where host memory is short, what has no room goes to disk, or stays, and no bit changes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from lightning_offload import MemoryPlugin
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.plugins.report import Report
from tests.engine.harness import Outcome, assert_same, run
from tests.engine.probing import NUM_RETRIES, levels, plain_outcome
from tests.zoo.case import Case
from tests.zoo.cases import BY_NAME

TYPICAL = [BY_NAME[name] for name in ("resnet-basic", "gpt2-sdpa", "lstm", "views-of-one-storage")]
MIB = 1 << 20


def train(case: Case, memory: MemoryPlugin) -> tuple[Outcome, Report]:
    """Train a case under a plugin; what that report in the end."""
    return run(case, memory=memory), memory.report()


def train_within(case: Case, budget_bytes: int, **keywords: Any) -> tuple[Outcome, Report]:
    """Train a case; a budget that a short host makes infeasible is raised to what is needed."""
    for _ in range(NUM_RETRIES):
        try:
            return train(case, MemoryPlugin(budget=budget_bytes, **keywords))
        except BudgetInfeasibleError as error:
            budget_bytes = max(budget_bytes + 1, error.floor_bytes)
    raise AssertionError(f"{case.name} found no feasible budget, the last was {budget_bytes}")


@functools.lru_cache(maxsize=8)
def all_swapped_bytes(name: str) -> int:
    """What a case's final plan swaps where everything is."""
    return train(BY_NAME[name], MemoryPlugin(policy="all-swap"))[1].swapped_bytes


@pytest.mark.parametrize("case", TYPICAL, ids=str)
def test_small_host_budget_spills_to_disk(case: Case, tmp_path: Path) -> None:
    """With tier="auto" and half the host memory that swapping everything takes, both tiers are used, exactly."""
    host_budget = max(MIB, all_swapped_bytes(case.name) // 2)
    memory = MemoryPlugin(policy="all-swap", host_budget=host_budget, spill_dir=tmp_path)
    outcome, report = train(case, memory)
    assert_same(plain_outcome(case.name), outcome)
    assert 0 < report.host_peak_bytes <= report.host_bytes <= host_budget
    assert 0 < report.disk_peak_bytes <= report.disk_bytes
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", TYPICAL, ids=str)
def test_ample_host_budget_needs_no_disk(case: Case, tmp_path: Path) -> None:
    """With tier="auto" nothing goes to disk that has room on the host; no file is made."""
    host_budget = 4 * all_swapped_bytes(case.name) + 64 * MIB
    memory = MemoryPlugin(policy="all-swap", host_budget=host_budget, spill_dir=tmp_path)
    outcome, report = train(case, memory)
    assert_same(plain_outcome(case.name), outcome)
    assert report.host_peak_bytes > 0
    assert (report.disk_bytes, report.disk_peak_bytes) == (0, 0)


@pytest.mark.parametrize("case", TYPICAL, ids=str)
@pytest.mark.parametrize("policy", ["auto", "all-swap"])
def test_tiny_host_budget_without_a_disk(case: Case, policy: str) -> None:
    """With tier="host" what has no room is recomputed or kept: exact, and within its budget or refused."""
    keywords: dict[str, Any] = {"policy": policy, "tier": "host", "host_budget": MIB}
    if policy == "auto":
        outcome, report = train_within(case, levels(case.name).budget(0.5), **keywords)
        assert report.measured_peak_bytes is not None
        assert report.budget_bytes is not None
        assert report.measured_peak_bytes <= report.budget_bytes
    else:
        outcome, report = train(case, MemoryPlugin(**keywords))
    assert_same(plain_outcome(case.name), outcome)
    assert report.disk_bytes == 0
    assert report.host_peak_bytes <= report.host_bytes <= MIB
