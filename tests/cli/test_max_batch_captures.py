"""``max-batch`` captures a few sizes, predicts the others, and prints none that was not captured."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_offload.cli import max_batch as command
from lightning_offload.cli import workload
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.planning.step_model import StepModel
from tests.cli.running import json_of
from tests.cli.test_compare import NO_BATCH
from tests.cli.test_compare import narrow as narrow

NAMES = ("plain", "efficient", "best", "largest_efficient", "max")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that are captured, in order."""
    sizes: list[int] = []
    plain = workload.Workload.capture

    def capture(self: workload.Workload, batch_size: int, device: DeviceSpec) -> workload.Captured:
        sizes.append(batch_size)
        return plain(self, batch_size, device)

    monkeypatch.setattr(workload.Workload, "capture", capture)
    return sizes


def test_few_captures(captures: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    """Two to learn from, and one of each size that is printed."""
    found = json_of(capsys, "max-batch", *NO_BATCH, "--budget", "6MiB")
    printed = {found[name]["batch_size"] for name in NAMES}
    assert len(captures) == len(set(captures)) == found["num_captures"]
    assert printed <= set(captures)
    assert set(captures) <= printed | {8, 32}


def test_the_same_as_with_a_capture_a_try(
    captures: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is predicted is what would be captured: the sizes that memory sets are the same."""
    found = json_of(capsys, "max-batch", *NO_BATCH, "--budget", "6MiB", "--only-max")
    num_predicting = len(captures)
    assert num_predicting <= 4
    monkeypatch.setattr(command, "_MAX_ATTEMPTS", 0)
    captures.clear()
    again = json_of(capsys, "max-batch", *NO_BATCH, "--budget", "6MiB", "--only-max")
    assert (again["plain"], again["max"]) == (found["plain"], found["max"])
    assert len(captures) > num_predicting


def test_wrong_predictions_are_found_out(
    captures: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where captures show that steps need more than predicted, the sizes are those of captures all the same."""
    expected = json_of(capsys, "max-batch", *NO_BATCH, "--budget", "6MiB", "--only-max")
    plain = StepModel.at

    def too_small(self: StepModel, size: int) -> object:
        graph = plain(self, size)
        return dataclasses.replace(graph, extra_bytes=graph.extra_bytes // 2)

    monkeypatch.setattr(StepModel, "at", too_small)
    found = json_of(capsys, "max-batch", *NO_BATCH, "--budget", "6MiB", "--only-max")
    assert (found["plain"], found["max"]) == (expected["plain"], expected["max"])
