"""A report as people see it, and as loggers do."""

from __future__ import annotations

import dataclasses

from lightning_offload.plugins.report import report_rows
from lightning_offload.runtime import native
from tests.plugins.training import net, report_of, rows

GIB = 1 << 30


def test_a_report_prints_as_a_table() -> None:
    """Every figure that is known has a row, the budget as it was typed; printed and in a notebook."""
    report = report_of(net(), rows(), policy="all-swap", budget="1GB")
    text = str(report)
    assert text.count("Offload plan") == 1
    assert max(map(len, text.splitlines())) <= 80
    for label, value in report_rows(report):
        assert any(label in line and value in line for line in text.splitlines()), label
    found = dict(report_rows(report))
    assert found["Budget"] == "1GB (953.7 MiB)"
    assert found["Steps"] == "5"
    assert found["Swapped"] in text
    assert found["Engine"] == report.engine == native.engine()
    assert {"Peak measured", "Step measured", "Host memory, most in use"} <= found.keys()
    assert not {"State", "Shapes of steps", "Replays that differed", "Disk, most in use"} & found.keys()
    assert "1GB (953.7 MiB)" in report._repr_html_()
    assert repr(report).startswith("Report(budget_bytes=1000000000")


def test_what_there_is_to_say_before_a_plan_and_beside_it() -> None:
    """The state, and advice under the table."""
    first = report_of(net(), rows(32), num_steps=1)
    assert dict(report_rows(first))["State"] == "recording the first step, no plan yet"
    advised = dataclasses.replace(first, advice=("mend it",), num_deviations=2, num_shapes=3, num_mismatched=1)
    assert str(advised).endswith("Advice: mend it.")
    found = dict(report_rows(advised))
    assert (found["Shapes of steps"], found["Steps that left their plan"]) == ("3", "2")
    assert found["Replays that differed"] == "1 storages"


def test_metrics_for_a_logger() -> None:
    """Numbers by name, those that are not known left out."""
    report = report_of(net(), rows(32), budget="1GiB")
    found = report.metrics()
    assert found["offload/peak_bytes"] == report.measured_peak_bytes
    assert found["offload/budget_bytes"] == GIB
    assert all(isinstance(value, (int, float)) for value in found.values())
    assert "offload-budget_bytes" in report.metrics("offload-")
    assert "offload/budget_bytes" not in dataclasses.replace(report, budget_bytes=None).metrics()
