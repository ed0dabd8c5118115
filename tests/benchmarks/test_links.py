"""The links suite: all directions, both at once, and the disk, or why not."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks.__main__ import main

CPU = torch.device("cpu")


def test_links_are_measured_in_all_directions(capsys: pytest.CaptureFixture[str]):
    """Plain copies, lanes and disk have a rate each way and both at once; the lanes' goal is nine tenths."""
    assert main(["links", "--quick", "--device", "cpu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    rates = {(row["case"].split(",")[0], row["metric"]): row["value"] for row in rows}
    for kind in ("plain copies", "lanes"):
        for direction in ("d2h", "h2d", "both"):
            assert rates[kind, f"{direction}_bytes_per_second"] > 0
    for direction in ("write", "read", "both"):
        assert rates["disk", f"{direction}_bytes_per_second"] > 0
    goals = {row["metric"]: row["goal"] for row in rows if row["goal"] is not None}
    assert goals == {f"{name}_plain_over_lane": pytest.approx(1 / 0.9) for name in ("d2h", "h2d", "both")}
    assert all(math.isfinite(row["value"]) for row in rows)
