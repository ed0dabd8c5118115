"""Results on one line and on disk."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import environment
from benchmarks.results import Measurements, Row, json_line, result_path, write_result

ROWS = [Row(case="a", metric="ratio", value=1.01, goal=1.03), Row(case="a", metric="ratio_low", value=1.0)]


def test_line_is_the_documented_object():
    """One line, with exactly the documented keys."""
    line = json_line("overhead", "cpu", ROWS)
    assert "\n" not in line
    assert json.loads(line) == {
        "suite": "overhead",
        "device": "cpu",
        "rows": [
            {"case": "a", "metric": "ratio", "value": 1.01, "goal": 1.03},
            {"case": "a", "metric": "ratio_low", "value": 1.0, "goal": None},
        ],
    }


def test_file_name_tells_suite_and_device(tmp_path: Path):
    """A device's name becomes part of a file name."""
    assert result_path("overhead", "NVIDIA H200 (141 GB)", tmp_path) == tmp_path / "overhead-nvidia-h200-141-gb.json"


def test_file_holds_what_is_needed_to_read_it(tmp_path: Path):
    """Device, versions, commit, config, repeats and spread go with the rows."""
    path = tmp_path / "results" / "overhead-cpu.json"
    measured = Measurements(
        rows=ROWS, config={"resnet50": {"batch_size": 64}}, repeats=30, spread={"a": {"step_seconds": [1, 2, 3]}}
    )
    write_result(path, "overhead", "cpu", measured, environment.describe())
    content = json.loads(path.read_text())
    assert content["device"] == "cpu"
    assert content["repeats"] == 30
    assert content["config"] == {"resnet50": {"batch_size": 64}}
    assert content["spread"] == {"a": {"step_seconds": [1, 2, 3]}}
    assert [Row(**row) for row in content["rows"]] == ROWS
    assert {"processor", "num_threads", "versions", "commit"} <= content["environment"].keys()
    assert {"torch", "python", "lightning_offload"} <= content["environment"]["versions"].keys()
