"""`python -m benchmarks gpu`, on the CPU with tiny models: resumable, within its minutes, errors in rows."""

from __future__ import annotations

import functools
import importlib
import json
import sys
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.gpu import max_batch
from benchmarks.gpu.cases import all_cases, chosen
from benchmarks.gpu.process import Ended, Job
from benchmarks.gpu.runner import Runner
from benchmarks.results import RESULTS_FOLDER
from benchmarks.suites import gpu
from tests.shares import is_all

TRYING = ("gpu", "--device", "cpu", "--quick")


def result(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "gpu-cpu.json").read_text())
    return content


def here(job: Job, timeout_seconds: float) -> Ended:
    """Do a job in this process, which has imported what a fresh one would have to; `test_gpu_process` has those."""
    asked = json.loads(json.dumps(asdict(job)))
    module, name = asked["function"].split(":")
    device = torch.device(asked["device"])
    done = getattr(importlib.import_module(module), name)(device, quick=asked["quick"], **asked["arguments"])
    return Ended(state="done", content=json.loads(json.dumps(asdict(done))), seconds=1.0)


def test_cases_are_kept_and_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The second call adds what is missing; --fresh measures again; the last line is the JSON of all that is known."""
    if not is_all():
        monkeypatch.setattr(gpu, "Runner", functools.partial(Runner, launch=here))
    results = ["--results", str(tmp_path), "--minutes", "5"]
    assert main([*TRYING, *results, "--cases", "overhead-resnet50"]) == 0
    first = result(tmp_path)
    assert list(first["cases"]) == ["overhead-resnet50"]
    capsys.readouterr()
    assert main([*TRYING, *results, "--cases", "overhead-*", "--json"]) == 0
    printed = capsys.readouterr()
    second = result(tmp_path)
    assert list(second["cases"]) == ["overhead-resnet50", "overhead-gpt2-medium"]
    assert second["cases"]["overhead-resnet50"] == first["cases"]["overhead-resnet50"]
    assert "overhead-resnet50 ..." not in printed.err
    assert json.loads(printed.out.splitlines()[-1])["rows"] == second["rows"]
    assert main([*TRYING, *results, "--cases", "overhead-resnet50", "--fresh"]) == 0
    assert [row["value"] for row in result(tmp_path)["rows"]] != [row["value"] for row in second["rows"]]
    assert list(result(tmp_path)["cases"]) == list(second["cases"])


@pytest.mark.parametrize("where", [(), ("--quick", "--results", str(RESULTS_FOLDER / "more"))], ids=["usual", "below"])
def test_no_figure_of_the_emulated_device_is_committed(
    where: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Neither in the usual place nor in a folder below it."""
    monkeypatch.setitem(sys.modules, "emulated_cuda", types.ModuleType("emulated_cuda"))
    assert main(["gpu", "--device", "cpu", "--minutes", "0", *where]) == 2
    assert "the emulated device has no figures to keep" in capsys.readouterr().err


def test_every_case_has_its_own_rows():
    """No two cases have the same key or title, and their jobs survive JSON; patterns choose among them."""
    cases = all_cases("cuda", quick=False)
    assert len({case.key for case in cases}) == len({case.title for case in cases}) == len(cases)
    assert [case.key for case in chosen(cases, ["links", "contest-v*"])] == [
        "links", "contest-vgg19", "contest-vit-large",
    ]  # fmt: skip
    assert sum(case.search is not None for case in cases) == 10
    for case in cases:
        job = case.search.job(case.job, 7) if case.search is not None else case.job
        assert isinstance(job, Job)
        json.dumps(dict(job.arguments))
        assert job.function.startswith("benchmarks.gpu.")


@pytest.mark.parametrize("is_managed", [False, True])
def test_a_trial_knows_what_fits(is_managed: bool):
    """A roomy cap fits, a tight one does not; either way it says what is needed."""
    outcomes = [
        max_batch.trial(
            torch.device("cpu"), quick=True, model="resnet50", cap_bytes=cap << 20, is_managed=is_managed, batch_size=4
        )
        for cap in (64, 4)
    ]
    assert [outcome["fits"] for outcome in outcomes] == [True, False]
    assert outcomes[0]["figures"]["samples_per_second"] > 0
    assert outcomes[0]["figures"]["peak_bytes"] <= 64 << 20
    assert outcomes[1]["need_bytes"] > 4 << 20
    assert outcomes[1]["reason"]
