"""The command line of the benchmarks, run on tiny models: its contract, not its figures."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks import __main__ as command
from benchmarks.__main__ import main
from benchmarks.registry import SUITES, load_suite
from benchmarks.results import Measurements, Options, Row


@pytest.fixture
def nothing_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if the run would store anything."""

    def store(*_: object, **__: object) -> None:
        pytest.fail("a quick run must not store its figures")

    monkeypatch.setattr(command, "store", store)


@pytest.mark.usefixtures("nothing_stored")
def test_host_has_a_ratio_for_each_kind_of_plan(capsys: pytest.CaptureFixture[str]):
    """Goals stand at those that have one; what is kept, swapped and recomputed is as the policy says."""
    assert main(["host", "--quick", "--json", "--pairs", "3"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    goals = {row["case"]: row["goal"] for row in rows if row["metric"] == "ratio"}
    assert goals == {
        "keep-all": 1.05, "auto, h = 0.8": None, "auto, h = 0.5": 1.3, "auto, h = 0.2": None, "all-swap": 2.2,
        "all-recompute": 1.6, "torch, checkpoint per layer": None, "torch, save_on_cpu": None,
        "hooks that do nothing": None, "a mode and hooks that do nothing": None,
    }  # fmt: skip
    found = {(row["case"], row["metric"]): row["value"] for row in rows}
    assert found["keep-all", "swapped_bytes"] == found["keep-all", "recomputed_bytes"] == 0
    assert found["all-swap", "swapped_bytes"] > 0 == found["all-swap", "recomputed_bytes"]
    assert found["all-recompute", "recomputed_bytes"] > 0
    assert found["all-recompute", "mean_ratio"] > 0


@pytest.mark.usefixtures("nothing_stored")
def test_shapes_are_planned_at_first_sight(capsys: pytest.CaptureFixture[str]):
    """All but those that are the largest so far; goals stand at what all steps took, and at planning."""
    assert main(["shapes", "--quick", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    goals = [(row["metric"], row["goal"]) for row in rows if row["goal"] is not None]
    assert goals == [
        ("changing_over_one_length", 1.05), ("changing_over_one_length", 1.05), ("planning_seconds", 0.01),
        ("planning_seconds", 0.03),
    ]  # fmt: skip
    found = {(row["case"], row["metric"]): row["value"] for row in rows}
    assert all(math.isfinite(value) and value >= 0 for value in found.values())
    for height in (0.5, 0.2):
        case = f"GPT-2, 16 to 48 tokens, h = {height}"
        assert found[case, "num_shapes"] // 2 <= found[case, "num_at_first_sight"] <= found[case, "num_shapes"] - 3


@pytest.mark.usefixtures("nothing_stored")
def test_overhead_ends_with_one_json_object(capsys: pytest.CaptureFixture[str]):
    """The last line has suite, device and rows; the goals stand at the ratios that have one."""
    assert main(["overhead", "--quick", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result) == ["suite", "device", "rows"]
    assert result["suite"] == "overhead"
    assert all(list(row) == ["case", "metric", "value", "goal"] for row in result["rows"])
    assert all(math.isfinite(row["value"]) for row in result["rows"])
    goals = sorted((row["metric"], row["goal"]) for row in result["rows"] if row["goal"] is not None)
    ratios, stalls = [("ratio", goal) for goal in (1.03, 1.03, 1.15, 3.0)], [("stall_share_of_transfers", 0.25)] * 2
    assert goals == [*ratios, ("recording_host_microseconds_per_op", 60.0), *stalls]
    cases = {row["case"] for row in result["rows"]}
    for case in cases:
        metrics = [row["metric"] for row in result["rows"] if row["case"] == case]
        assert {"ratio", "ratio_low", "ratio_high", "plain_step_seconds", "step_seconds"} <= set(metrics)
        assert len(metrics) == len(set(metrics))
    per_op = [row for row in result["rows"] if row["metric"].endswith("_host_microseconds_per_op")]
    assert len(per_op) == 10


def test_full_run_is_stored_and_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Without --quick the result goes to `store`; without --json a table is shown."""
    measured = Measurements(rows=[Row(case="some case", metric="ratio", value=1.5, goal=2.0)], config={}, repeats=30)
    asked: list[tuple[str, Options]] = []
    stored: list[tuple[Measurements, str]] = []
    has_run = False

    def run_suite(name: str, options: Options) -> Measurements:
        nonlocal has_run
        asked.append((name, options))
        has_run = True
        return measured

    def describe(kind: str) -> dict[str, str]:
        return {"commit": "c with changes" if has_run else "c"}

    monkeypatch.setattr(command, "run_suite", run_suite)
    monkeypatch.setattr(command.environment, "describe", describe)
    monkeypatch.setattr(
        command, "store", lambda suite, device, result, described, folder: stored.append((result, described["commit"]))
    )
    assert main(["overhead"]) == 0
    assert asked == [("overhead", Options(quick=False, num_pairs=30))]
    assert stored == [(measured, "c")]  # what the suite itself writes is no change of what was measured
    output = capsys.readouterr().out
    assert "some case" in output
    assert "<= 2.000" in output


def test_bad_input(capsys: pytest.CaptureFixture[str]):
    """An interval needs two pairs; the error of an unknown suite lists those there are, each of which can be run."""
    assert main(["overhead", "--pairs", "1"]) == 2
    assert "--pairs 1 is too few" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["nonsense"])
    assert "overhead" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"unknown suite 'nonsense'; the suites are .*overhead"):
        load_suite("nonsense")
    for name in SUITES:
        suite = load_suite(name)
        assert suite.TITLE, name
        assert callable(suite.run), name
