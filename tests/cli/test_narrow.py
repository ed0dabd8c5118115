"""Every table of the commands and of the reports fits a terminal of 80 columns, and its first column is whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from rich.table import Table

from lightning_offload.capture.calibrate import LinkRates
from lightning_offload.cli import links
from lightning_offload.graph.catalog import device_spec, names
from lightning_offload.planning.planner import POLICIES, plan
from lightning_offload.plugins import devices
from lightning_offload.report import MeasuredStep, compare_policies, render_text
from lightning_offload.report.tables import add_row, make_table
from tests.cli.running import SMALL, output_of, rows_of
from tests.cli.test_plan import OUTPUT, budget_between
from tests.plugins.training import net, report_of, rows
from tests.report.steps import CARD, MIXED, SIX, plan_of

WIDTH = 80
LONG = "encoder.layers.11.attention.self.query_projection.with_a_rotary_embedding.inner"


@pytest.fixture(autouse=True)
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piped, as pytest's capture is, without colours; the usual width."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def first_cells(out: str) -> list[str]:
    """The first cell of each row of all tables in an output, whose lines fit, and which has no colour."""
    assert "\x1b" not in out
    lines = [line for line in out.splitlines() if set("│┃┏┡└") & set(line)]
    assert lines
    assert max(map(len, lines)) <= WIDTH, max(lines, key=len)
    return [row[0] for row in rows_of(out)]


def test_devices(capsys: pytest.CaptureFixture[str]) -> None:
    """Every device has its name, and each of its figures is whole."""
    out = output_of(capsys, "devices")
    cells = [cell for cell in first_cells(out) if cell]
    assert cells == [*names(), "cpu"]
    assert "…" not in out
    b200 = next(row for row in rows_of(out) if row[0] == "b200")
    assert b200[1:] == ["178.3", "7,700", "75.0", "2,250.0", "2,250.0", "54.8", "54.8"]


def test_plan_and_explain(capsys: pytest.CaptureFixture[str]) -> None:
    """Modules by their names."""
    out = output_of(capsys, "plan", *SMALL, "--budget", budget_between(capsys, 0.3), *OUTPUT)
    modules = first_cells(out)
    assert len(modules) == 10
    assert all(module == "-" or module.isdecimal() for module in modules)
    shown = first_cells(output_of(capsys, "explain", "plan.json", "--device", "k40c"))
    assert set(modules) <= set(shown)
    assert "all" in shown


def test_explain_lists_groups_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Few lines, and every module and storage with --all, which is told of."""
    model = ["tests.cli.models:deep", "--input", "32", "--batch-size", "8", "--device", "k40c"]
    output_of(capsys, "plan", *model, *OUTPUT)
    short, whole = (output_of(capsys, "explain", "plan.json", *more) for more in ((), ("--all",)))
    assert len(short.splitlines()) < 100 < len(whole.splitlines())
    assert "--all lists all" in short
    assert "--all lists all" not in whole
    cells = first_cells(whole)
    assert all(f"layers.{i}" in cells for i in range(0, 120, 2))
    assert "layers" in first_cells(short)


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    """Policies by their names."""
    out = output_of(capsys, "compare", *SMALL, "--budget", budget_between(capsys, 0.5))
    assert sorted(first_cells(out)) == sorted(POLICIES)


def test_max_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """What each row is about."""
    arguments = [*SMALL[:3], "--device", "k40c", "--budget", "4MiB", "--limit", "16", "--only-max"]
    assert first_cells(output_of(capsys, "max-batch", *arguments)) == ["everything kept", "limit reached"]


def test_bench_links(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What each rate is of."""
    rates = LinkRates(
        d2h_bytes_per_second=1e9, h2d_bytes_per_second=1e9, both_d2h_bytes_per_second=1e9, both_h2d_bytes_per_second=1e9
    )
    monkeypatch.setattr(devices, "measure_rates", lambda *_, **__: rates, raising=False)
    monkeypatch.setattr(links, "host_memory_bytes", lambda: 64 << 30)
    assert first_cells(output_of(capsys, "bench-links"))[2] == "device to host, both at once"


def test_reports() -> None:
    """Of a plugin and of a plan, with what was measured and what other policies make of it."""
    assert "Smallest feasible budget" in first_cells(str(report_of(net(), rows(32), budget="1GB")))
    comparison = compare_policies(SIX, CARD, 600)
    made = plan_of(SIX, MIXED, budget_bytes=600)
    cells = first_cells(
        str(render_text(SIX, made, CARD, measured=MeasuredStep(step_seconds=1.0), comparison=comparison))
    )
    assert {"stem", "all", "peak of the step", *POLICIES} <= set(cells)


@pytest.mark.parametrize("name", [LONG, LONG.replace(".", "_")])
def test_long_names_fold(name: str) -> None:
    """To no less than a readable width, and lose no letter; other columns fold with them."""
    graph = dataclasses.replace(SIX, saves=tuple(dataclasses.replace(save, module=name) for save in SIX.saves))
    shown = str(render_text(graph, plan(graph, device_spec("k40c"), None), CARD))
    cells = first_cells(shown)
    assert any(name[:20] in cell for cell in cells)
    assert "".join(cell for cell in cells if cell).count(name) >= 1


def test_figures_that_leave_little_room() -> None:
    """A table that is too wide keeps its first column; what does not fit any more is at its other end."""
    from rich.console import Console

    table: Table = make_table("", "name", "words", *(f">figure {i}" for i in range(4)))
    add_row(table, "a-long-name", "words that fold", *("1,234,567.8 GiB" for _ in range(4)))
    console = Console(width=WIDTH, color_system=None, file=open("out", "w", encoding="utf-8"))  # noqa: SIM115
    console.print(table)
    console.file.close()
    assert "│ a-long-name │" in Path("out").read_text(encoding="utf-8")
