"""What a tuning shows: a table, a page, a picture."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_offload.callbacks.tuning.result import TuningResult, curve_of, merged, save_plots, summary, trials_table
from lightning_offload.errors import UnsupportedError
from lightning_offload.report.tuning_plot import save_tuning_html, save_tuning_png, tuning_plots
from lightning_offload.tuning.trial import Prediction, Trial
from tests.callbacks.conftest import MakeTrainer
from tests.callbacks.training import Clock, Net, finder_of

GIB = 2**30
RESULT = TuningResult(
    batch_size=32,
    found_batch_size=32,
    configured_batch_size=32,
    lr=0.4,
    base_batch_size=8,
    effective_batch_size=32,
    lr_factor=4.0,
    trials=(
        Trial(
            batch_size=32, is_ok=True, samples_per_second=640.0, peak_bytes=3 * GIB, step_seconds=(0.05, 0.05, 0.05),
            predicted_samples_per_second=600.0, predicted_peak_bytes=4 * GIB,
        ),
        Trial(batch_size=64, is_ok=True, samples_per_second=650.0, peak_bytes=6 * GIB, step_seconds=(0.1,)),
        Trial(batch_size=128, is_ok=False, reason="out of memory"),
    ),
    predictions=(
        Prediction(batch_size=32, is_feasible=True, samples_per_second=600.0, peak_bytes=4 * GIB),
        Prediction(batch_size=256, is_feasible=False, floor_bytes=20 * GIB),
    ),
    largest_size=100,
    largest_plain_size=40,
    is_largest_predicted=True,
    budget_bytes=8 * GIB,
)  # fmt: skip


def test_the_table_has_predicted_beside_measured() -> None:
    """One row per trial in the order of sizes, the chosen one marked, a failed one with its reason."""
    console = Console(width=120)
    with console.capture() as capture:
        console.print(trials_table(RESULT))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capture.get().splitlines() if "│" in line]
    assert lines == [
        ["32", "50.0 ms", "640", "600", "3.0 GiB", "4.0 GiB", "chosen"],
        ["64", "100.0 ms", "650", "", "6.0 GiB", "", ""],
        ["128", "", "", "", "", "", "out of memory"],
    ]


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    """No row is cut, be its numbers as wide as they come."""
    trial = Trial(
        batch_size=65536, is_ok=True, samples_per_second=123456.0, peak_bytes=1000 * 2**20, step_seconds=(0.9996,),
        predicted_samples_per_second=123456.0, predicted_peak_bytes=1000 * 2**20,
    )  # fmt: skip
    console = Console(width=80)
    with console.capture() as capture:
        console.print(trials_table(dataclasses.replace(RESULT, batch_size=65536, trials=(trial,))))
    rows = [line for line in capture.get().splitlines() if "65536" in line and "│" in line]
    assert len(rows) == 1
    assert rows[0].strip().endswith("│")
    assert "chosen" in rows[0]


def test_a_result_prints_as_its_table() -> None:
    """By print, and in a notebook."""
    text = str(RESULT)
    assert text.lstrip().startswith("Trials of batch sizes")
    assert "chosen" in text
    assert "Trials of batch sizes" in RESULT._repr_html_()


def test_the_summary_says_what_was_chosen() -> None:
    """Size, effective size, rate, and what fits with and without a plan."""
    assert summary(RESULT) == (
        "Batch size 32 (effective 32), learning rate 0.4 (x4); largest that fits: 100 (predicted),"
        " without a memory plan 40 (predicted)."
    )


def test_the_summary_says_what_is_expected_and_what_it_took() -> None:
    """The noise scale with its interval, the speed-up of what was found, less accumulation, seconds and their share."""
    text = summary(
        dataclasses.replace(
            RESULT, largest_size=None, largest_plain_size=None, lr_factor=1.0, accumulation=2,
            configured_accumulation=8, configured_batch_size=8, found_batch_size=32, noise_scale=120.0,
            noise_scale_interval=(60.0, float("inf")), expected_speedup=1.31, expected_interval=(1.2, 1.4),
            tuning_seconds=3.0, run_seconds=600.0, note="As it is.",
        )
    )  # fmt: skip
    assert text == (
        "Batch size 32 in place of 8, accumulated 2 and not 8 times (effective 32), learning rate 0.4; with it the run"
        " ends 1.31 times as early (1.20 to 1.40), the gradient noise scale is 120 samples (60 to inf); the tuning took"
        " 3.00 s, 0.5% of the run. As it is."
    )


def test_the_table_has_one_row_for_a_size() -> None:
    """Repeats are one row, with the throughput that the search has of them; a failure of one of them is its row's."""
    again = Trial(batch_size=64, is_ok=True, samples_per_second=550.0, peak_bytes=7 * GIB, step_seconds=(0.2,))
    failed = Trial(batch_size=32, is_ok=False, reason="out of memory")
    rows = merged((*RESULT.trials, again, failed))
    assert [row.batch_size for row in rows] == [32, 64, 128]
    assert rows[0] == failed
    assert rows[1].samples_per_second == pytest.approx((650 * 550) ** 0.5)
    assert (rows[1].peak_bytes, rows[1].step_seconds) == (7 * GIB, (0.1, 0.2))


def test_the_plots_hold_the_figures_and_the_marks() -> None:
    """Measured and predicted values stand at their sizes; three sizes are marked in both."""
    plots = tuning_plots(curve_of(RESULT))
    *_, predicted, measured = plots["lanes"]["data"]
    assert (measured["x"], measured["y"]) == ([32, 64], [640.0, 650.0])
    assert (predicted["x"], predicted["y"]) == ([32], [600.0])
    *_, predicted, measured = plots["memory"]["data"]
    assert (measured["x"], measured["y"]) == ([32, 64], [3.0, 6.0])
    for plot in plots.values():
        marks = plot["data"][:3]
        assert [mark["name"] for mark in marks] == ["chosen: 32", "largest with plan: 100", "largest without plan: 40"]
        assert [mark["x"] for mark in marks] == [[32, 32], [100, 100], [40, 40]]
        assert all(mark["y"] == plot["layout"]["yaxis"]["range"] for mark in marks)
    budget = plots["memory"]["data"][3]
    assert (budget["name"], budget["y"]) == ("budget 8.0 GiB", [8.0, 8.0])


WORTH = dataclasses.replace(
    RESULT, configured_batch_size=8, objective="goodput", noise_scale=48.0, noise_scale_interval=(40.0, 60.0)
)


def test_goodput_stands_beside_throughput() -> None:
    """A sample in a batch of 32 is worth (48 + 8) / (48 + 32) of one in the configured 8; the axis is the same."""
    names = [trace["name"] for trace in tuning_plots(curve_of(RESULT))["lanes"]["data"]]
    assert names[-2:] == ["predicted", "measured"]
    assert not any("goodput" in name for name in names), "without a noise scale nothing is known of it"
    plots = tuning_plots(curve_of(WORTH))
    *_, predicted, measured = plots["lanes"]["data"]
    assert (predicted["name"], measured["name"]) == ("goodput, predicted", "goodput, measured")
    assert (predicted["x"], predicted["y"]) == ([32], [pytest.approx(600 * 56 / 80)])
    assert (measured["x"], measured["y"]) == ([32, 64], [pytest.approx(640 * 56 / 80), pytest.approx(650 * 56 / 112)])
    assert not any("goodput" in trace["name"] for trace in plots["memory"]["data"])
    accumulated = dataclasses.replace(WORTH, effective_batch_size=128)  # by four, so batches are 32 and 128
    assert tuning_plots(curve_of(accumulated))["lanes"]["data"][-1]["y"][0] == pytest.approx(640 * 80 / 176)


def test_the_page_has_the_goodput(tmp_path: Path) -> None:
    """It is named in the text and is a column of the table, where it is known."""
    pytest.importorskip("plotly", reason="plotly, the extra 'report', is not installed")
    save_tuning_html(tmp_path / "batch.html", curve_of(WORTH))
    page = (tmp_path / "batch.html").read_text()
    assert "<h2>Throughput and goodput</h2>" in page
    assert "<tr><td>32</td><td>640.0</td><td>448.0</td><td>3.0 GiB</td><td>yes</td></tr>" in page


def test_the_page_is_complete(tmp_path: Path) -> None:
    """It holds both plots and their places, the trials as a table, and loads nothing."""
    pytest.importorskip("plotly", reason="plotly, the extra 'report', is not installed")
    path = tmp_path / "batch.html"
    save_tuning_html(path, curve_of(RESULT))
    page = path.read_text()
    plots = json.loads(re.search(r'<script type="application/json" id="plots">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert set(plots) == {"lanes", "memory"}
    assert all(f'id="plot-{name}"' in page for name in plots)
    assert "<tr><td>128</td><td></td><td></td><td>no</td></tr>" in page
    assert "@@" not in page.partition("<script>")[0]
    assert "memory plan</p>" not in page


def test_without_matplotlib_there_is_one_warning_and_the_page(tmp_path: Path, monkeypatch: Any) -> None:
    """The picture is an extra; the training goes on without it."""
    pytest.importorskip("plotly", reason="plotly, the extra 'report', is not installed")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'lightning-offload\[plots\]'"):
        save_tuning_png(tmp_path / "batch.png", curve_of(RESULT))
    with pytest.warns(UserWarning, match="no PNG plot") as caught:
        save_plots(RESULT, tmp_path / "plots", "lightning.pytorch")
    assert len(caught) == 1
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["batch_size.html"]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    """It is a PNG of some size, with the goodput and without."""
    path = tmp_path / "batch.png"
    save_tuning_png(path, curve_of(WORTH))
    with_goodput = path.read_bytes()
    save_tuning_png(path, curve_of(RESULT))
    data = path.read_bytes()
    assert with_goodput != data
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000


def test_a_run_shows_one_table(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It comes before the training, and the plots lie where they were asked for."""
    pytest.importorskip("plotly", reason="plotly, the extra 'report', is not installed")
    clock = Clock()
    finder = finder_of(clock, plot_dir=tmp_path / "plots")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_offload.callbacks.tuning.result.save_tuning_png", lambda path, curve: None)
        make_trainer(callbacks=[finder], max_epochs=1).fit(Net(clock=clock))
    assert capsys.readouterr().out.count("Trials of batch sizes") == 1
    assert (tmp_path / "plots" / "batch_size.html").exists()
    marked = curve_of(finder.result)
    assert (marked.chosen, marked.largest, marked.largest_plain) == (16, None, None), "nothing limits memory here"
    assert "largest that fits" not in summary(finder.result)


def test_a_search_is_shown_while_it_runs(make_trainer: MakeTrainer) -> None:
    """By the size that is tried, where the Trainer shows its progress."""
    texts: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rich.status.Status.update", lambda self, text: texts.append(text))
        for is_visible in (False, True):
            clock = Clock()
            finder = finder_of(clock)
            make_trainer(callbacks=[finder], max_epochs=1, enable_progress_bar=is_visible).fit(Net(clock=clock))
            sizes = [trial.batch_size for trial in finder.result.trials]
            assert texts == ([f"Trying batch size {size}" for size in sizes] if is_visible else [])


def test_a_result_survives_its_state() -> None:
    """What a checkpoint holds gives an equal result, with trials and predictions."""
    state = json.loads(json.dumps(RESULT.state_dict()))
    assert TuningResult.from_state_dict(state) == RESULT
