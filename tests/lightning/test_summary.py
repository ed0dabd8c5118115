"""The table of the plan, and when it is printed."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from rich.console import Console

from lightning_offload import OffloadStrategy
from lightning_offload.plugins.report import TITLE, Report, plan_rows
from lightning_offload.report.fields import plain_table, rich_table
from tests.lightning.conftest import MakeTrainer
from tests.lightning.models import ConvNet, images


def report(**values: Any) -> Report:
    """A report in which nothing is known but `values`."""
    unknown = {field.name: None if "None" in str(field.type) else 0 for field in dataclasses.fields(Report)}
    return Report(**{**unknown, "policy": "auto", "phase": "planned", **values})


def test_rows() -> None:
    """Known values are listed with their units, unknown ones are left out."""
    known = report(
        budget_bytes=12 << 30,
        floor_bytes=3 << 30,
        swapped_bytes=5 << 20,
        predicted_step_seconds=1.5,
        plain_step_seconds=1.2,
    )
    rows = dict(plan_rows(known))
    assert rows["Budget"] == "12.0 GiB"
    assert rows["Smallest feasible budget"] == "3.0 GiB"
    assert rows["Swapped"] == "5.0 MiB"
    assert rows["Step predicted"] == "1.50 s (+25.0%)"
    assert "Peak measured" not in rows
    assert "Step, lower bound" not in rows


def test_tables_hold_the_rows() -> None:
    """Both layouts show every label and value, the plain one in columns."""
    rows = [("Budget", "12.0 GiB"), ("Policy", "auto")]
    lines = plain_table(rows, TITLE).splitlines()
    assert lines[0].startswith("Offload plan |")
    assert lines[2:4] == ["Budget       | 12.0 GiB", "Policy       |     auto"]
    console = Console(width=60)
    with console.capture() as capture:
        console.print(rich_table(rows, TITLE))
    text = capture.get()
    assert all(word in text for word in ("Offload plan", "Budget", "12.0 GiB", "Policy", "auto"))


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
def test_printed_once_when_planned(
    make_trainer: MakeTrainer,
    rich: bool,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The budget is named at fit start, the table printed once, in ModelSummary's style."""
    summary = RichModelSummary() if rich else ModelSummary()
    log = logging.getLogger("lightning.pytorch")
    log.setLevel(logging.INFO)
    monkeypatch.setattr(log, "propagate", False)  # else the root logger's handler notes each line once more
    log.addHandler(caplog.handler)
    try:
        make_trainer(strategy=OffloadStrategy("1GiB"), callbacks=[summary], enable_model_summary=True).fit(
            ConvNet(), images()
        )
    finally:
        log.removeHandler(caplog.handler)
    assert caplog.text.count("Offload budget: 1GiB on cpu") == 1
    printed = capsys.readouterr().out if rich else caplog.text
    assert printed.count("Offload plan") == 1
    assert printed.count("Smallest feasible budget") == 1


def test_silent_without_model_summary(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    """`enable_model_summary=False` silences the table too."""
    make_trainer(strategy=OffloadStrategy("1GiB")).fit(ConvNet(), images())
    assert "Offload" not in "".join(capsys.readouterr())
