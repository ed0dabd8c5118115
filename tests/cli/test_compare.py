"""``compare``: every policy side by side."""

from __future__ import annotations

import pytest

from lightning_offload.planning.planner import POLICIES
from tests.cli.running import SMALL, json_of, option, output_of, refused, rows_of

RESULT_KEYS = {
    "policy", "feasible", "floor_bytes", "predicted_peak_bytes", "predicted_step_seconds", "overhead",
    "predicted_stall_seconds", "swap_bytes", "recompute_bytes", "traffic_bytes",
}  # fmt: skip
NO_BATCH = SMALL[:3] + SMALL[5:]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual terminal, which tables must fit on."""
    monkeypatch.setenv("COLUMNS", "80")


def test_all_policies(capsys: pytest.CaptureFixture[str]) -> None:
    """Each has a row: a feasible one keeps to the budget, the others say what they need; auto is never slower."""
    budget = 2_500_000
    found = json_of(capsys, "compare", *SMALL, "--budget", f"{budget}B")
    assert [row["policy"] for row in found["policies"]] == list(POLICIES)
    assert found["budget_bytes"] == budget
    by_name = {row["policy"]: row for row in found["policies"]}
    assert all(set(row) == RESULT_KEYS for row in by_name.values())
    feasible = [row for row in by_name.values() if row["feasible"]]
    assert all(row["predicted_peak_bytes"] <= budget for row in feasible)
    assert all(row["traffic_bytes"] == 2 * row["swap_bytes"] for row in feasible)
    fastest = min(row["predicted_step_seconds"] for row in feasible)
    assert by_name["auto"]["predicted_step_seconds"] == pytest.approx(fastest)
    keep_all = by_name["keep-all"]
    assert not keep_all["feasible"]
    assert keep_all["floor_bytes"] > budget
    assert keep_all["predicted_step_seconds"] is None


def test_the_table_of_policies(capsys: pytest.CaptureFixture[str]) -> None:
    """Feasible ones first, the fastest at the top; what does not fit says what it needs."""
    out = output_of(capsys, "compare", *SMALL, "--budget", "2500000B")
    rows = rows_of(out)
    assert {row[0] for row in rows} == set(POLICIES)
    needs = [row[2] == "infeasible" for row in rows]
    assert needs == sorted(needs)
    assert any(needs)
    assert not all(needs)


def test_no_policy_meets_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3, with the smallest budget that any meets."""
    assert "the smallest feasible budget is" in refused(capsys, "compare", *SMALL, "--budget", "1MiB", code=3)


@pytest.mark.parametrize("command", ["compare", "max-batch"])
def test_the_same_bad_input(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Options that are shared are checked alike."""
    arguments = SMALL if command == "compare" else NO_BATCH
    assert "unknown device 'abacus'" in refused(capsys, command, *option("--device", "abacus", arguments))
    assert "is ambiguous" in refused(capsys, command, *arguments, "--budget", "12G")
