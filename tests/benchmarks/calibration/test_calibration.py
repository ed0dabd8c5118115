"""The calibration: its numbers are what the data give, its errors what the documents say."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from benchmarks.calibration import fitting, own, recording
from benchmarks.calibration.checking import check, seconds_of, share_close
from benchmarks.calibration.page import page
from benchmarks.calibration.public import is_held, rows
from benchmarks.calibration.recording import Step
from benchmarks.results import RESULTS_FOLDER
from lightning_offload.capture.roofline import Work
from lightning_offload.graph.catalog import find_card, spec_of
from lightning_offload.graph.work_kinds import WorkKind

ROWS = rows()
STORED: dict[str, Any] = json.loads((RESULTS_FOLDER / "calibration-cpu.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    """The stored step of each row."""
    return recording.stored_steps(ROWS)


def test_figures_of_the_review_are_among_them() -> None:
    """As their sources have them."""
    seconds = {row.name: round(row.seconds, 12) for row in ROWS}
    assert seconds["resnet50 b16 float32 k40c (cnn-benchmarks)"] == 0.4499
    assert seconds["resnet152 b16 float32 k40c (cnn-benchmarks)"] == 1.14673
    assert seconds["vgg16 b16 float32 k40c (cnn-benchmarks)"] == 0.92021
    assert seconds["resnet152 b16 float32 gtx-titan-x (cnn-benchmarks)"] == 0.36697
    assert seconds["resnet50 b256 tf32 a100-80gb (DeepLearningExamples)"] == round(256 / 938, 12)
    assert seconds["gpt2-nanogpt b8 amp a100-40gb (nanoGPT)"] == 0.25


def test_refitting_gives_the_committed_numbers(steps: list[Step]) -> None:
    """Those of the package, from the half that is not held out, within 1%."""
    fitted = [at for at in range(len(ROWS)) if not is_held(at)]
    found = fitting.fit([ROWS[at] for at in fitted], [steps[at] for at in fitted])
    assert _numbers(found) == pytest.approx(_numbers(fitting.COMMITTED), rel=0.01)


def _numbers(fit: fitting.Fit) -> dict[str, float]:
    found = {f"{core} {kind}": share for core, line in fit.shares.items() for kind, share in _items(line)}
    found |= {" ".join(key): factor for key, factor in fit.factors.items()} | fit.bandwidth_factors
    names = ("launch_seconds", "reduction_bandwidth", "elementwise_bandwidth")
    return found | {name: getattr(fit, name) for name in names}


def _items(line: Any) -> list[tuple[str, float]]:
    return list(dataclasses.asdict(line).items())


def test_errors_are_those_that_the_documents_tell(steps: list[Step]) -> None:
    """44 of 48 held rows within 25%, of which 16 are at the peaks; the stored result has the same predictions."""
    found = check(ROWS, steps)
    held = [checked for checked in found if checked.held]
    assert (sum(checked.is_close for checked in held), len(held)) == (44, 48)
    assert share_close(checked.peak_error for checked in held) == 16 / 48
    for checked, stored in zip(found, STORED["config"]["checked"], strict=True):
        assert dataclasses.asdict(checked.row) == stored["row"]
        assert checked.seconds == pytest.approx(stored["seconds"], rel=1e-9)
    assert "| **held out** | 48 | 44 (92%) | 10% | +57% |" in page(STORED)


def test_rows_of_a_new_source_are_predicted_less_well(steps: list[Step]) -> None:
    """The page says how many of all are close by fits without their like; two of them once more."""
    assert "| the same source | 62 of 96 (65%) | 17% | -66% |" in page(STORED)
    errors = STORED["config"]["left_out"]
    assert set(errors) == {"model", "card", "source"}
    assert {len(found) for found in errors.values()} == {len(ROWS)}
    places = {row.name: at for at, row in enumerate(ROWS)}
    for name, key in (
        ("gpt2-nanogpt b8 amp a100-40gb (nanoGPT)", "source"),
        ("vgg11 b64 float32 gtx-titan-x (convnet-benchmarks)", "model"),
    ):
        at = places[name]
        left_out = getattr(ROWS[at], key)
        chosen = [i for i, row in enumerate(ROWS) if getattr(row, key) != left_out]
        numbers = fitting.fit([ROWS[i] for i in chosen], [steps[i] for i in chosen])
        seconds = seconds_of(steps[at], fitting.device_of(ROWS[at], numbers))
        assert seconds / ROWS[at].seconds - 1 == pytest.approx(errors[key][at], abs=0.01)


@pytest.mark.parametrize("name", ["resnet18 b16 float32", "alexnet-owt b128 float32", "mpt-125m b32 half"])
def test_stored_steps_are_what_recording_gives(name: str) -> None:
    """Some of them; `python -m benchmarks calibration --fresh` makes all of them again."""
    row = next(row for row in ROWS if row.step == name)
    assert recording._encoded(*recording.record(row)) == recording._load()[name]


def test_the_optimizers_traffic_and_transposes() -> None:
    """Eleven passes of SGD; two more movements of what a convolution reads and writes, on tensor cores alone."""
    step: Step = ((Work(5.0, 3, WorkKind.CONVOLUTION), 2), (Work(1.0, 7, WorkKind.MATMUL), 1))
    assert recording.with_optimizer(step, 10, "none") == step
    assert recording.with_optimizer(step, 10, "sgd") == (*step, (Work(0.0, 440), 1))
    assert recording.with_transposes(step, "float32") == step
    assert recording.with_transposes(step, "tf32") == (*step, (Work(0.0, 6), 2))


def test_own_measurements_are_those_of_the_stored_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each float32 step that the GPU suite stored, with what is modelled for it; a step on another GPU is left out."""
    monkeypatch.setattr(own, "_record", lambda name, batch_size: ((Work(0.0, 1 << 40), batch_size),))
    found = own.measured_here(RESULTS_FOLDER)
    stored = [own.Own(**entry) for entry in STORED["config"]["own"]]
    assert [dataclasses.replace(step, modelled_seconds=0.0) for step in found] == [
        dataclasses.replace(step, modelled_seconds=0.0) for step in stored
    ]
    assert {step.model for step in stored} >= {"ResNet-50", "ResNet-152", "GPT-2 medium"}
    h200 = spec_of(find_card("h200"), "float32")
    for step in found:
        assert step.modelled_seconds == seconds_of(((Work(0.0, 1 << 40), step.sizes["batch_size"]),), h200)
    for step in stored:
        assert f"| {step.model} | {step.sizes['batch_size']} | {step.device} |" in page(STORED)
