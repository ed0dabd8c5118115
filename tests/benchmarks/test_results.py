"""Results on one line and on disk."""

from __future__ import annotations

import json

from benchmarks.results import Row, json_line

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
