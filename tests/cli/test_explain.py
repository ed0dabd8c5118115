"""``explain``: what a plan does, from its file alone, and with names and sizes where its step is at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_offload import cli
from tests.cli.running import SMALL, json_of, option, output_of, refused
from tests.cli.test_plan import BYTES_KEYS, OUTPUT, PREDICTION_KEYS, budget_between
from tests.cli.test_plan import folder as folder

EXPLAIN_KEYS = (
    PREDICTION_KEYS | BYTES_KEYS
    | {"num_decisions", "num_swapped", "num_to_disk", "num_held_after_pack", "num_prefetched", "num_recomputed"}
    | {"num_not_memoised", "storages", "modules", "floor"}
)  # fmt: skip


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """A plan that swaps or recomputes, written with its step; what plan said of it."""
    return json_of(capsys, "plan", *SMALL, "--budget", budget_between(capsys, 0.3), *OUTPUT)


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
    assert (found["storages"], found["modules"], found["floor"]) == (None, None, None)
    assert found["num_decisions"] == found["num_swapped"] + found["num_recomputed"] > 0
    assert found["predicted_peak_bytes"] == written["predicted_peak_bytes"]
    out = output_of(capsys, "explain", "plan.json")
    assert "give --graph, or --model with its inputs" in out


def test_explain_with_the_model(capsys: pytest.CaptureFixture[str], written: dict[str, object]) -> None:
    """A step that is captured again gives the same as the file, and the floor of half the batch."""
    expected = json_of(capsys, "explain", "plan.json")
    Path("plan.graph.json").rename("elsewhere.json")
    assert json_of(capsys, "explain", "plan.json", "--graph", "elsewhere.json") == expected
    again = json_of(capsys, "explain", "plan.json", "--model", *SMALL)
    (unknown,), (half,) = expected["floor"].pop("remedies"), again["floor"].pop("remedies")
    assert again == expected
    assert (unknown["kind"], unknown["floor_bytes"], unknown["gain_bytes"]) == ("smaller-batch", None, None)
    smaller = json_of(capsys, "plan", *option("--batch-size", "4"), "--output", "")
    assert half["floor_bytes"] == smaller["floor_bytes"] == expected["floor_bytes"] - half["gain_bytes"]
    other = option("--batch-size", "9")
    assert "was made for another model or other inputs" in refused(capsys, "explain", "plan.json", "--model", *other)


def test_explain_what_sets_the_floor(capsys: pytest.CaptureFixture[str], written: dict[str, object]) -> None:
    """The same floor as the plan's, in parts that add up, in JSON and in tables."""
    floor = json_of(capsys, "explain", "plan.json")["floor"]
    assert set(floor) == {"floor_bytes", "op", "persistent_bytes", "live", "other_bytes", "remedies"}
    assert (floor["floor_bytes"], floor["op"]) == (written["floor_bytes"], written["floor_op"])
    assert floor["persistent_bytes"] == written["persistent_bytes"]
    assert (
        sum(each["num_bytes"] for each in floor["live"]) + floor["persistent_bytes"] + floor["other_bytes"]
        == (written["floor_bytes"])
    )
    assert set(floor["live"][0]) == {"storage", "num_bytes", "op", "module", "phase"}
    out = output_of(capsys, "explain", "plan.json")
    assert "What sets the smallest feasible budget" in out
    assert "under the plan's limits" not in out
    assert "lower the batch size, or the size of the micro-batches" in out


def test_explain_a_language_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The logits set its floor; a loss in chunks is predicted, with its overhead on a device that is named."""
    model = ["tests.cli.models:speaker", "--input", "int64:64", "--batch-size", "8", "--optimizer", "none"]
    plain = json_of(capsys, "plan", *model, "--device", "k40c", "--output", "")
    made = json_of(capsys, "plan", *model, "--device", "k40c", "--budget", f"{plain['floor_bytes']}B", *OUTPUT)
    (chunked, _) = json_of(capsys, "explain", "plan.json", "--device", "k40c")["floor"]["remedies"]
    assert set(chunked) == {
        "kind", "advice", "floor_bytes", "gain_bytes", "floor_op", "overhead", "num_chunks",
    }  # fmt: skip
    assert (chunked["kind"], chunked["num_chunks"]) == ("chunked-loss", 32)
    assert "the logits of `head`" in chunked["advice"]
    assert 2 * chunked["floor_bytes"] < made["floor_bytes"]
    assert 0 <= chunked["overhead"] < made["overhead"]
    assert json_of(capsys, "explain", "plan.json")["floor"]["remedies"][0]["overhead"] is None
    out = output_of(capsys, "explain", "plan.json", "--device", "k40c")
    assert "the plan's own is" in out
    assert "num_chunks=32" in out
    below = ["plan", *model, "--device", "k40c", "--budget", f"{plain['floor_bytes'] - 1}B"]
    remedy = "chunked_loss=True, or lightning_offload.chunked_linear_cross_entropy, with 32 chunks"
    assert f"the logits of `head` set it: {remedy}" in refused(capsys, *below, code=3)


def test_explain_ignores_the_step_of_another_plan(
    capsys: pytest.CaptureFixture[str], written: dict[str, object]
) -> None:
    """A stale file beside the plan is told of, not believed."""
    output_of(capsys, "plan", *option("--batch-size", "9"), "--output", "", "--graph", "plan.graph.json")
    assert cli.run(["explain", "plan.json", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["storages"] is None
    assert err == "lightning-offload: plan.graph.json is the step of another plan and is ignored\n"


def test_explain_refuses(
    capsys: pytest.CaptureFixture[str], written: dict[str, object], subtests: pytest.Subtests
) -> None:
    """One line says what is wrong."""
    for arguments, message in [
        (["none.json"], "plan 'none.json' cannot be read"),
        (["bad.json"], "plan 'bad.json': not a memory_plan file: invalid JSON"),
        (["lone.json", "--device", "abacus"], "unknown device 'abacus'"),
        (["lone.json", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["plan.json", "--graph", "none.json"], "graph 'none.json' cannot be read"),
        (["plan.json", "--graph", "plan.json"], "not a step_graph file"),
        (["plan.json", "--input", "3"], "--input means nothing without --model"),
        (["plan.json", "--graph", "g.json", "--model", "a:b"], "--graph and --model both give the step"),
        (["plan.json", "--model", "a:b", "--device", "abacus"], "unknown device 'abacus'"),
        (["plan.json", "--device", "abacus"], "unknown device 'abacus'"),
    ]:
        with subtests.test(arguments=arguments):
            Path("bad.json").write_text("{")
            Path("lone.json").write_text(Path("plan.json").read_text())
            assert message in refused(capsys, "explain", *arguments)
