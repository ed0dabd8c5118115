"""``max-batch``: the batch sizes that matter."""

from __future__ import annotations

import pytest

from tests.cli.running import json_of, option, output_of, refused, rows_of
from tests.cli.test_compare import NO_BATCH
from tests.cli.test_compare import narrow as narrow

BATCH_KEYS = {
    "batch_size", "samples_per_second", "predicted_step_seconds", "overhead", "predicted_peak_bytes",
    "plain_peak_bytes",
}  # fmt: skip


def test_batch_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """Each size fits, and one sample more does not; planned ones are larger than plain ones."""
    budget = 6 << 20
    found = json_of(capsys, "max-batch", *NO_BATCH, "--budget", "6MiB")
    for name in ("plain", "efficient", "best", "largest_efficient", "max"):
        assert set(found[name]) == BATCH_KEYS
        assert found[name]["predicted_peak_bytes"] <= budget
    plain, largest = found["plain"]["batch_size"], found["max"]["batch_size"]
    assert plain < largest
    assert found["plain"]["plain_peak_bytes"] <= budget < found["max"]["plain_peak_bytes"]
    at = {batch: json_of(capsys, "plan", *option("--batch-size", str(batch)), "--output", "") for batch in (plain + 1,)}
    assert at[plain + 1]["plain_peak_bytes"] > budget
    beyond = option("--batch-size", str(largest + 1))
    assert "infeasible" in refused(capsys, "plan", *beyond, "--budget", "6MiB", "--output", "", code=3)
    best = found["best"]["samples_per_second"]
    assert found["efficient"]["samples_per_second"] >= 0.97 * best
    assert found["largest_efficient"]["samples_per_second"] >= 0.97 * best
    assert found["efficient"]["batch_size"] <= found["best"]["batch_size"] <= found["largest_efficient"]["batch_size"]


def test_the_largest_batch_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """--only-max leaves throughput out and keeps the keys; a limit ends the search."""
    found = json_of(capsys, "max-batch", *NO_BATCH, "--budget", "6MiB", "--only-max", "--limit", "9")
    assert (found["max"]["batch_size"], found["best"], found["efficient"]) == (9, None, None)
    assert found["num_captures"] < 10
    out = output_of(capsys, "max-batch", *NO_BATCH, "--budget", "6MiB", "--only-max", "--limit", "9")
    assert [row[0] for row in rows_of(out)] == ["everything kept", "limit reached"]


def test_batches_of_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    """The largest batch of keep-all is the plain one."""
    found = json_of(capsys, "max-batch", *NO_BATCH, "--budget", "6MiB", "--only-max", "--policy", "keep-all")
    assert found["plain"]["batch_size"] == found["max"]["batch_size"]
    assert found["policy"] == "keep-all"


def test_not_even_one_sample(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3, with the smallest feasible budget of one sample."""
    err = refused(capsys, "max-batch", *NO_BATCH, "--budget", "200000B", code=3)
    assert "200000" in err or "infeasible" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "--limit 0 is not positive"),
        (["--tolerance", "1"], "--tolerance 1.0 is not in [0, 1)"),
    ],
)
def test_bad_searches(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says what is allowed."""
    assert message in refused(capsys, "max-batch", *NO_BATCH, *arguments)
