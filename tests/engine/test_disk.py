"""Every case of the zoo gives the same bits when what is swapped goes to disk, or where host memory is short."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from lightning_offload import MemoryPlugin
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.plugins.report import Report
from tests.engine.harness import Outcome, Wrap, assert_same, run
from tests.engine.probing import MARGIN, NUM_RETRIES, levels, plain_outcome
from tests.shares import is_all
from tests.zoo.case import Case
from tests.zoo.cases import BY_NAME, CASES

SPARSE = 3
"""At a height of 0.25 every third case runs; at the floor, where most is swapped, two of three, or all."""

TYPICAL = [BY_NAME[name] for name in ("resnet-basic", "gpt2-sdpa", "lstm", "views-of-one-storage")]
MIB = 1 << 20


def _heights(number: int) -> tuple[float, ...]:
    """At which a case runs."""
    if number % SPARSE == 0:
        return 0.25, 0.0
    return (0.0,) if is_all() or number % 2 == 0 else ()


def _by_height() -> list[object]:
    return [
        pytest.param(case, height, id=f"{case.name}-{height}")
        for number, case in enumerate(CASES)
        for height in _heights(number)
    ]


def train(case: Case, memory: MemoryPlugin, wrap: Wrap = Wrap.WHOLE) -> tuple[Outcome, Report]:
    """Train a case under a plugin; what that report in the end."""
    outcome = run(case, memory=memory, wrap=wrap)
    return outcome, memory.report()


def train_within(case: Case, budget_bytes: int, wrap: Wrap = Wrap.WHOLE, **keywords: Any) -> tuple[Outcome, Report]:
    """Train a case; a budget that a new graph, or another tier, makes infeasible is raised to what is needed."""
    for _ in range(NUM_RETRIES):
        try:
            return train(case, MemoryPlugin(budget=budget_bytes, **keywords), wrap)
        except BudgetInfeasibleError as error:
            budget_bytes = max(budget_bytes + 1, error.floor_bytes)
    raise AssertionError(f"{case.name} found no feasible budget, the last was {budget_bytes}")


@functools.lru_cache(maxsize=8)
def all_swapped_bytes(name: str) -> int:
    """What a case's final plan swaps where everything is."""
    return train(BY_NAME[name], MemoryPlugin(policy="all-swap"))[1].swapped_bytes


@pytest.mark.parametrize(("case", "height"), _by_height())
def test_same_bits_on_disk(case: Case, height: float, tmp_path: Path) -> None:
    """Within a budget, bits are those of plain PyTorch; what leaves goes to disk alone, and nothing of it is left."""
    budget = levels(case.name).budget(height)
    outcome, report = train_within(case, budget, tier="disk", spill_dir=tmp_path)
    assert_same(plain_outcome(case.name), outcome)
    assert report.disk_bytes >= report.disk_peak_bytes
    assert report.disk_peak_bytes > 0 or not report.swapped_bytes
    assert (report.host_bytes, report.host_peak_bytes) == (0, 0)
    if case.static:
        assert report.phase == "planned"
        assert report.budget_bytes is not None
        assert report.budget_bytes <= MARGIN * budget or case.grows, "the disk makes no budget infeasible"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrap", [Wrap.FORWARD, Wrap.BARE], ids=lambda wrap: wrap.value)
@pytest.mark.parametrize("case", TYPICAL, ids=str)
def test_same_bits_on_disk_when_split(case: Case, wrap: Wrap, tmp_path: Path) -> None:
    """With `step()` around forward alone as well."""
    outcome, report = train_within(case, levels(case.name, wrap).budget(0.0), wrap, tier="disk", spill_dir=tmp_path)
    assert_same(plain_outcome(case.name), outcome)
    assert report.disk_bytes > 0


@pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
@pytest.mark.parametrize("case", TYPICAL, ids=str)
def test_same_bits_on_disk_under_a_policy(case: Case, policy: str, tmp_path: Path) -> None:
    """Whoever plans."""
    outcome, report = train(case, MemoryPlugin(policy=policy, tier="disk", spill_dir=tmp_path))
    assert_same(plain_outcome(case.name), outcome)
    assert report.phase == "planned"
    assert report.disk_peak_bytes > 0 or not report.swapped_bytes
    assert report.swapped_bytes > 0 or policy != "all-swap"


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
