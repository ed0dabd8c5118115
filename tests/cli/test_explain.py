"""``explain``: what a plan does, from its file alone, and with names and sizes where its step is at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_offload import cli
from tests.cli.running import SMALL, json_of, option, output_of, refused
from tests.cli.test_plan import BYTES_KEYS, PREDICTION_KEYS, budget_between
from tests.cli.test_plan import folder as folder

EXPLAIN_KEYS = (
    PREDICTION_KEYS | BYTES_KEYS
    | {"num_decisions", "num_swapped", "num_to_disk", "num_held_after_pack", "num_prefetched", "num_recomputed"}
    | {"num_not_memoised", "storages", "modules"}
)  # fmt: skip


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """A plan that swaps or recomputes, written with its step; what plan said of it."""
    return json_of(capsys, "plan", *SMALL, "--budget", budget_between(capsys, 0.3))


def test_explain_with_the_step_beside(capsys: pytest.CaptureFixture[str], written: dict[str, object]) -> None:
    """Names and sizes are those that plan gave; modules add up to the totals."""
    found = json_of(capsys, "explain", "plan.json")
    assert set(found) == EXPLAIN_KEYS
    assert found["storages"][:10] == written["storages"]
    for key in (*PREDICTION_KEYS, *BYTES_KEYS):
        assert found[key] == written[key]
    for key in BYTES_KEYS:
        assert sum(module[key] for module in found["modules"]) == found[key]
    out = output_of(capsys, "explain", "plan.json")
    assert "plan.json, made by policy 'auto': fits" in out
    assert "What each module saved" in out


def test_explain_a_plan_alone(capsys: pytest.CaptureFixture[str], written: dict[str, object]) -> None:
    """Without its step it says what it counts and predicts, and where names would come from."""
    Path("plan.graph.json").unlink()
    found = json_of(capsys, "explain", "plan.json")
    assert set(found) == EXPLAIN_KEYS - BYTES_KEYS
    assert (found["storages"], found["modules"]) == (None, None)
    assert found["num_decisions"] == found["num_swapped"] + found["num_recomputed"] > 0
    assert found["predicted_peak_bytes"] == written["predicted_peak_bytes"]
    out = output_of(capsys, "explain", "plan.json")
    assert "give --graph, or --model with its inputs" in out


def test_explain_with_the_model(capsys: pytest.CaptureFixture[str], written: dict[str, object]) -> None:
    """A step that is captured again gives the same as the file."""
    expected = json_of(capsys, "explain", "plan.json")
    Path("plan.graph.json").rename("elsewhere.json")
    assert json_of(capsys, "explain", "plan.json", "--graph", "elsewhere.json") == expected
    assert json_of(capsys, "explain", "plan.json", "--model", *SMALL) == expected
    other = option("--batch-size", "9")
    assert "was made for another model or other inputs" in refused(capsys, "explain", "plan.json", "--model", *other)


def test_explain_ignores_the_step_of_another_plan(
    capsys: pytest.CaptureFixture[str], written: dict[str, object]
) -> None:
    """A stale file beside the plan is told of, not believed."""
    output_of(capsys, "plan", *option("--batch-size", "9"), "--output", "", "--graph", "plan.graph.json")
    assert cli.run(["explain", "plan.json", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["storages"] is None
    assert err == "lightning-offload: plan.graph.json is the step of another plan and is ignored\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.json"], "plan 'none.json' cannot be read"),
        (["bad.json"], "not a memory_plan file: invalid JSON"),
        (["plan.json", "--graph", "none.json"], "graph 'none.json' cannot be read"),
        (["plan.json", "--graph", "plan.json"], "not a step_graph file"),
        (["plan.json", "--input", "3"], "--input means nothing without --model"),
        (["plan.json", "--graph", "g.json", "--model", "a:b"], "--graph and --model both give the step"),
        (["plan.json", "--model", "a:b", "--device", "abacus"], "unknown device 'abacus'"),
    ],
)
def test_explain_refuses(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], written: dict[str, object]
) -> None:
    """One line says what is wrong."""
    Path("bad.json").write_text("{")
    assert message in refused(capsys, "explain", *arguments)
