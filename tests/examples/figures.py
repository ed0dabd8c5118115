"""The figures that an example prints: those of a report's table, to its digits."""

from __future__ import annotations

import re

from lightning_offload.units import parse_bytes

ROWS = {
    "budget_bytes": "Budget", "plain_peak_bytes": "Peak without a plan", "measured_peak_bytes": "Peak measured",
    "swapped_bytes": "Swapped", "recomputed_bytes": "Recomputed",
}  # fmt: skip


def figures_in(output: str) -> dict[str, int]:
    """Figures by name; of the last table, whose plan is final."""
    table = output[output.rindex("Offload plan") :]
    assert "State" not in table
    found = dict(re.findall(r"│ ([A-Z][\w ]+?) +│ +([0-9.]+ ?[KMG]?i?B) │", table))
    return {name: parse_bytes(found[label]) for name, label in ROWS.items()}
