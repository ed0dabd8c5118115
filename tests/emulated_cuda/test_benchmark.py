"""`python -m benchmarks gpu` from its first case to its last, tiny: on a GPU nothing but the figures is new."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.cases import all_cases
from benchmarks.gpu.process import launch
from benchmarks.results import ERROR

pytest.importorskip("emulated_cuda", reason="needs the emulated device: make test-emulated")

CHECKOUT = Path(__file__).resolve().parents[2]
ALL_SECONDS = 1800
QUICK = {"EMULATED_CUDA_MODE": "eager", "EMULATED_CUDA_RACES": "0"}
SOME = ("links", "activations-resnet152", "links-disk")


def measured(folder: Path, *options: str, limit_seconds: float) -> dict[str, Any]:
    """The result file of a run in its quick size; links are measured by the first case that plans, and kept."""
    command = [sys.executable, "-m", "benchmarks", "gpu", "--quick", "--minutes", "30", "--results", str(folder)]
    done = subprocess.run(
        [*command, *options],
        cwd=CHECKOUT,
        env={**os.environ, **QUICK, "LIGHTNING_OFFLOAD_CACHE": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert [path.name for path in folder.glob("*.json")] == ["gpu-emulated-cuda.json"], done.stdout
    content: dict[str, Any] = json.loads((folder / "gpu-emulated-cuda.json").read_text())
    return content


def check(content: dict[str, Any], keys: list[str]) -> None:
    """Each case is done, its rows say something, and the file says where they are from."""
    assert content["device"] == "Emulated CUDA"
    assert content["environment"]["emulated"] is True
    assert list(content["cases"]) == keys
    metrics: dict[str, set[str]] = {}
    for row in content["rows"]:
        metrics.setdefault(row["case"], set()).add(row["metric"])
    for key, case in content["cases"].items():
        assert case["state"] == "done", key
        assert case["titles"], key
        assert all(metrics[title] - {ERROR} == metrics[title] for title in case["titles"]), (key, content["notes"])
    searches = {case.title: case.search.varies for case in all_cases("cuda", quick=True) if case.search is not None}
    sizes = {row["case"]: row["value"] for row in content["rows"] if row["metric"] == searches.get(row["case"])}
    assert set(sizes) == searches.keys() & set(metrics)
    assert all(size >= 1 for size in sizes.values()), sizes


def test_some_cases_have_their_rows(tmp_path: Path) -> None:
    """One of each function that cases call, searches aside."""
    check(measured(tmp_path, "--cases", *SOME, limit_seconds=240), list(SOME))


def test_a_trial_of_a_search_says_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a cap on the device's memory, in a process of its own."""
    for name, value in QUICK.items():
        monkeypatch.setenv(name, value)
    searches = (case for case in all_cases("cuda", quick=True) if case.search is not None)
    case = next(case for case in searches if case.search is not None and case.search.varies == "batch_size")
    assert case.search is not None
    ended = launch(case.search.job(case.job, 4), 120)
    assert ended.state == "done", ended.log
    assert ended.content["fits"]
    assert 0 < ended.content["figures"]["peak_bytes"] <= ended.content["figures"]["reserved_bytes"] <= 24 << 20


@pytest.mark.timeout(ALL_SECONDS)
def test_every_case_has_its_rows(tmp_path: Path) -> None:
    """Minutes, so it is no part of the share."""
    check(measured(tmp_path, limit_seconds=ALL_SECONDS - 60), keys_of_all())


def keys_of_all() -> list[str]:
    return [case.key for case in all_cases("cuda", quick=True)]
