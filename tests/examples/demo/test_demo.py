"""The demo from end to end, on a small network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from examples.demo import measurement
from examples.demo import program as demo
from examples.demo.program import main
from examples.demo.state import save_state
from examples.demo.training import DemoConfig, quiet_lightning, train

SMALL = DemoConfig(batch_size=8, image_size=32, width=8, num_steps=8, num_pairs=3)


def test_demo_is_identical_and_in_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Training within the budget gives the plain run's bits, and the file says so."""
    status = main(SMALL, tmp_path)
    output = capsys.readouterr()
    assert status == 0, output.err
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["identical"] is True
    assert summary["floor_bytes"] < summary["budget_bytes"] < summary["plain_peak_bytes"]
    assert summary["measured_peak_bytes"] <= summary["budget_bytes"]
    assert summary["swapped_bytes"] + summary["recomputed_bytes"] > 0
    assert summary["num_pairs"] == 3
    assert 0 < summary["step_ratio_low"] <= summary["step_ratio"] <= summary["step_ratio_high"]
    assert "BatchNorm statistics" in output.out
    assert "step time, 3 pairs in turns" in output.out
    assert {path.name for path in tmp_path.iterdir()} >= {"plain.pt", "within_budget.pt", "summary.json"}


def test_difference_fails_with_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """One flipped bit in the second run's weights: exit status 1, `identical` false, one line of error."""

    def save_with_a_flipped_bit(path: Path, losses, module, optimizer) -> None:
        if path.name == "within_budget.pt":
            with torch.no_grad():
                next(module.parameters()).view(torch.uint8).reshape(-1)[0] ^= 1
        save_state(path, losses, module, optimizer)

    monkeypatch.setattr(measurement, "save_state", save_with_a_flipped_bit)
    assert main(SMALL, tmp_path) == 1
    assert json.loads((tmp_path / "summary.json").read_text())["identical"] is False
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("demo failed: training within the budget did not give the plain run's bits")
    assert "first difference: weights: network.stem.0.weight differs" in line


def test_failure_leaves_no_old_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A demo that cannot even start does not leave the last run's success behind."""
    (tmp_path / "summary.json").write_text('{"identical": true}')

    def refuse(*_: object, **__: object) -> None:
        raise demo.DemoError("no")

    monkeypatch.setattr(demo, "train", refuse)
    assert main(SMALL, tmp_path) == 1
    assert not (tmp_path / "summary.json").exists()
    assert "demo failed: no" in capsys.readouterr().err


def test_without_a_folder_nothing_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The saved states go to a temporary folder, which goes too, also where the demo fails."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    seen: list[Path] = []

    def refuse(*_: object, state_path: Path, **__: object) -> None:
        seen.append(state_path)
        assert state_path.parent.is_dir()
        raise demo.DemoError("no")

    monkeypatch.setattr(demo, "train", refuse)
    assert main(SMALL) == 1
    assert seen[0].parent.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It is named, before anything runs."""
    (tmp_path / "file").write_text("")
    assert main(SMALL, tmp_path / "file") == 1
    assert "file' cannot be used: File exists; name another one" in capsys.readouterr().err


def test_without_scikit_learn_the_error_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Before anything runs or is shown."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(SMALL) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "pip install 'lightning-offload[demo]'" in err


def test_other_architecture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The demo does not run on a network that is no ResNet-50."""
    monkeypatch.setattr(demo, "resnet50", lambda: nn.Linear(6, 1))
    with pytest.raises(demo.DemoError, match="has 7 parameters, a ResNet-50 has 25,557,032"):
        demo.check_architecture()


def test_plain_runs_repeat_and_measure(tmp_path: Path):
    """Two plain runs give the same bits; tracked steps give a peak, no step is timed, and every step counts."""
    ticks: list[None] = []
    with quiet_lightning():
        first = train(SMALL, None, lambda: ticks.append(None), state_path=tmp_path / "a.pt")
        train(SMALL, None, lambda: None, state_path=tmp_path / "b.pt")
    assert len(ticks) == SMALL.num_steps
    assert first.peak_bytes > 0
    assert first.times is None
    assert first.report is None
    assert demo.compare_in_process(tmp_path / "a.pt", tmp_path / "b.pt")["identical"] is True
