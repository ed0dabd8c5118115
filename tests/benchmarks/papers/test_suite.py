"""The suite gives claims beside ours, goes on after a failure, and makes its document."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from benchmarks.papers import rows_batch, rows_depth
from benchmarks.papers.figures import Figure
from benchmarks.results import ERROR, Measurements, Options, result_path, write_result
from benchmarks.suites import papers
from benchmarks.tables import performance_page, write_documents

ENVIRONMENT = {
    "processor": "a processor",
    "num_threads": 1,
    "system": "Linux",
    "versions": {"torch": "2.13"},
    "commit": "abc",
}


@pytest.fixture(scope="module")
def quick() -> Measurements:
    """What the quick mode gives."""
    return papers.run(Options(quick=True), Progress(disable=True))


def test_quick_mode_has_figures_of_every_kind(quick: Measurements) -> None:
    """Counts on layers, floors and plans are among them, and none failed."""
    figures = papers.figures_of(quick.config)
    assert quick.notes == {}
    assert {figure.how for figure in figures} == {"layers", "fake capture", "simulation"}
    assert not [row for row in quick.rows if row.metric == ERROR]
    assert len({figure.case for figure in figures}) == len(figures)


def test_counts_on_layers_are_the_papers(quick: Measurements) -> None:
    """All counts that should be the same are; what is not says why."""
    figures = [f for f in papers.figures_of(quick.config) if f.how == "layers"]
    assert sum(f.verdict == "matched" for f in figures) >= 20
    assert all(f.verdict == "matched" for f in figures if f.unit == "count")
    assert all(f.note or f.unknown for f in figures if f.verdict != "matched")


def test_batch_of_resnet50_beats_the_claim(quick: Measurements) -> None:
    """On the memory of a K40 more than SuperNeurons' 384 images fit, and more than three times what fits plainly."""
    (batch,) = [f for f in papers.figures_of(quick.config) if f.what == "largest batch"]
    assert (batch.claim, batch.claim_baseline) == (384, 128)
    assert batch.ours > 384
    assert batch.baseline is not None
    assert 80 < batch.baseline < batch.ours / 3
    assert batch.verdict == "beaten"


def test_failure_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that fails gives an error row and its reason."""

    def broken() -> Iterator[Figure]:
        raise RuntimeError("no luck")
        yield

    todo = {"broken": broken, "works": papers.tasks(quick=True)["Layrub, constant intermediates"]}
    monkeypatch.setattr(papers, "tasks", lambda *, quick: todo)
    found = papers.run(Options(), Progress(disable=True))
    assert [row.case for row in found.rows if row.metric == ERROR] == ["broken"]
    assert found.notes == {"broken": "RuntimeError: no luck"}
    assert len(papers.figures_of(found.config)) == 6


def test_document_is_made_from_the_stored_result(quick: Measurements, tmp_path: Path) -> None:
    """The page has a table for each system; the page of measured times has none of it."""
    results = tmp_path / "results"
    write_result(result_path("papers", "cpu", results), "papers", "cpu", quick, ENVIRONMENT)
    assert json.loads((results / "papers-cpu.json").read_text())["config"]["figures"]
    written = write_documents(tmp_path, results)
    assert [path.name for path in written] == ["performance.md", "papers.md"]
    page = written[1].read_text()
    assert "## SuperNeurons" in page
    assert "| peak, + liveness | AlexNet, b=200 | 1,489.36 MiB | 1,489.36 MiB | matched | layers |" in page
    assert "SuperNeurons" not in performance_page(results)


def test_document_names_what_failed() -> None:
    """An error stands on the page with its reason."""
    result = {
        "environment": ENVIRONMENT,
        "config": {"figures": []},
        "rows": [{"case": "broken", "metric": "error", "value": 1.0, "goal": None}],
        "notes": {"broken": "RuntimeError: no luck"},
    }
    assert "- broken: RuntimeError: no luck" in papers.page(result)


def test_document_counts_verdicts_and_says_what_is_missing(quick: Measurements) -> None:
    """At the top stands how many figures of each system have which verdict, at the end what has no figure of ours."""
    page = papers.page({"environment": ENVIRONMENT, "config": quick.config, "rows": []})
    counts = Counter(f.verdict for f in papers.figures_of(quick.config) if f.system == "SuperNeurons")
    names = ("beaten", "matched", "not reached", "not comparable")
    assert f"| SuperNeurons | {' | '.join(str(counts[name]) for name in names)} |" in page
    assert "| Meng et al. | largest batch of a GAN | 48 of 24 |" in page


def test_table_for_a_terminal(quick: Measurements) -> None:
    """Claims stand beside ours."""
    console = Console(width=250, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    console.print(papers.table(quick))
    text = console.export_text()
    console.file.close()
    assert "largest batch" in text
    assert "published" in text


def test_every_claim_has_a_task() -> None:
    """The full run has a task for each batch, depth and memory claim; names do not collide."""
    names = set(papers.tasks(quick=False))
    num_claims = len(rows_batch.CLAIMS) + len(rows_depth.DEPTH_CLAIMS) + len(rows_depth.MEMORY_CLAIMS)
    assert len(names) == 4 + num_claims + 6
    systems = {claim.system for claim in (*rows_batch.CLAIMS, *rows_depth.DEPTH_CLAIMS, *rows_depth.MEMORY_CLAIMS)}
    assert systems <= set(papers.SOURCES)
    assert set(papers.tasks(quick=True)) <= names


def test_network_of_a_depth() -> None:
    """A depth is shared out with the third stage taking what the others leave; too small a one is refused."""
    model = rows_depth.network(134 + 3 * 3, 1).build()
    assert len(model.stages[2]) == 3  # type: ignore[union-attr,index,arg-type]
    with pytest.raises(ValueError, match="a depth of 134 is not above 134"):
        rows_depth.network(134, 1)
