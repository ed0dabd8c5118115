"""Tables in the documents come from the stored results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.store import CaseResult, Store, failed
from benchmarks.results import RESULTS_FOLDER, Measurements, Row, write_result
from benchmarks.tables import fill_markers, format_value, own_documents, performance_page, table_lines, write_documents

CHECKOUT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "processor": "a processor",
    "num_threads": 2,
    "system": "Linux",
    "versions": {"torch": "2.13"},
    "commit": "abc",
}
ROWS = [
    Row(case="ResNet-50", metric="ratio", value=1.012, goal=1.03),
    Row(case="ResNet-50", metric="ratio_low", value=1.001),
    Row(case="ResNet-50", metric="ratio_high", value=1.02),
    Row(case="ResNet-50", metric="step_seconds", value=0.5),
    Row(case="ResNet-50", metric="peak_bytes", value=3 << 20),
    Row(case="tiny ops", metric="host_microseconds_per_op", value=2.5),
]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with one stored result."""
    folder = tmp_path / "results"
    measured = Measurements(rows=ROWS, config={"resnet50": {"batch_size": 64}}, repeats=30)
    write_result(folder / "overhead-cpu.json", "overhead", "cpu", measured, ENVIRONMENT)
    return folder


def test_interval_goes_beside_its_figure():
    """Rows that end in _low and _high have no line of their own, unless they are figures; all keep order and units."""
    assert table_lines([Row(case="a", metric="water_low", value=1.0)]) == [("a", "water_low", "1.000", "", "")]
    assert table_lines(ROWS) == [
        ("ResNet-50", "ratio", "1.012", "1.001 to 1.020", "<= 1.030"),
        ("ResNet-50", "step_seconds", "500.0 ms", "", ""),
        ("ResNet-50", "peak_bytes", "3.0 MiB", "", ""),
        ("tiny ops", "host_microseconds_per_op", "2.500", "", ""),
    ]


def test_marked_places_are_filled_and_stay_marked(results: Path):
    """Between the markers stands the table of ratios; filling twice changes nothing, nor does one without a result."""
    unknown = "<!-- benchmark: overhead-tpu -->\nold\n<!-- end -->\n"
    assert fill_markers(unknown, results) == unknown
    text = "before\n<!-- benchmark: overhead-cpu -->\nold\n<!-- end -->\nafter\n"
    filled = fill_markers(text, results)
    assert "old" not in filled
    assert "| ResNet-50 | ratio | 1.012 |" in filled
    assert filled.startswith("before\n<!-- benchmark: overhead-cpu -->\n")
    assert filled.endswith("\n<!-- end -->\nafter\n")
    assert fill_markers(filled, results) == filled


def test_gpu_in_short_has_what_lost(tmp_path: Path):
    """Plans stand beside the peers at their peaks, also where these add less; what was not measured is left out."""
    ours, theirs = "GPT-2 medium bf16, at the peak of checkpoint per block", "GPT-2 medium bf16, checkpoint per block"
    rows = [
        Row(case=ours, metric="ratio", value=1.372),
        Row(case=ours, metric="peak_bytes", value=10 << 30),
        Row(case=ours, metric="predicted_plain_peak_bytes", value=42 << 30),
        Row(case=theirs, metric="ratio", value=1.29),
        Row(case=theirs, metric="peak_bytes", value=11 << 30),
    ]
    config = {"contest-gpt2-medium-bf16": {"batch_size": 16, "precision": "bf16"}}
    write_result(tmp_path / "gpu-x.json", "gpu", "x", Measurements(rows=rows, config=config, repeats=8), ENVIRONMENT)
    header, _, *lines = fill_markers("<!-- benchmark: gpu-x -->\n<!-- end -->", tmp_path).splitlines()[1:-1]
    assert header.startswith("| step | plain peak |")
    expected = "42.0 GiB (predicted) | 10.0 GiB | +37.2% | checkpoint per block | 11.0 GiB | +29.0% |"
    assert lines == [f"| GPT-2 medium, batch 16, bf16 | {expected}"]


def test_documents_are_written(results: Path, tmp_path: Path):
    """The page is written, and the readme only if it changes."""
    readme = tmp_path / "README.md"
    readme.write_text("no markers\n")
    assert write_documents(tmp_path, results) == [tmp_path / "docs" / "performance.md"]
    readme.write_text("<!-- benchmark: overhead-cpu -->\n<!-- end -->\n")
    page = tmp_path / "docs" / "page.md"
    page.write_text(readme.read_text())
    assert write_documents(tmp_path, results) == [tmp_path / "docs" / "performance.md", readme, page]
    assert "ResNet-50" in readme.read_text()
    assert page.read_text() == readme.read_text()


def test_cases_of_several_runs_are_told_apart(tmp_path: Path):
    """A file of many cases says on which commit each was measured, how often, and what failed and why."""
    store = Store(path=tmp_path / "gpu-x.json", suite="gpu", device="x", environment=ENVIRONMENT, order=["a", "b"])
    for key, repeats, commit in (("a", 30, "abc"), ("b", 8, "older")):
        row = Row(case=f"case {key}", metric="ratio", value=1.0, goal=1.1)
        measured = Measurements(rows=[row], config={"batch_size": 64}, repeats=repeats)
        store.put(key, CaseResult(state="done", seconds=1.0, commit=commit, measured=measured))
    store.put("c", failed("case c", "CUDA out of memory", seconds=1.0, commit="abc"))
    page = performance_page(tmp_path)
    for expected in (
        "## On a GPU: x",
        "8 to 30 pairs per case.",
        "Commits: abc (a, c); older (b).",
        "- a: batch_size 64",
        "| case b | ratio | 1.000 |  | <= 1.100 |",
        "Not measured:\n\n- case c: CUDA out of memory",
    ):
        assert expected in page
    assert "| case c" not in page


def test_units_follow_the_name():
    """The end of a metric's name is its unit."""
    known = {
        ("x_bytes", 1024): "1.0 KiB", ("x_seconds", 0.002): "2.0 ms", ("ratio", 1.0349): "1.035",
        ("num_trials", 7.0): "7", ("x_bytes_per_second", 1.5 * (1 << 30)): "1.5 GiB/s",
    }  # fmt: skip
    assert {(metric, value): format_value(metric, value) for metric, value in known} == known


@pytest.mark.skipif(not list(RESULTS_FOLDER.glob("*.json")), reason="no stored results")
def test_documents_are_up_to_date():
    """The documents in the checkout are what the stored results give."""
    assert (CHECKOUT / "docs" / "performance.md").read_text() == performance_page(RESULTS_FOLDER)
    for name, text in own_documents(RESULTS_FOLDER).items():
        assert (CHECKOUT / "docs" / name).read_text() == text, name
    for path in (CHECKOUT / "README.md", *CHECKOUT.glob("docs/*.md")):
        text = path.read_text()
        assert fill_markers(text, RESULTS_FOLDER) == text, path
