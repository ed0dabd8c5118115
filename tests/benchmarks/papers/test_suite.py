"""The suite gives claims beside ours, goes on after a failure, and makes its document."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rich.progress import Progress

from benchmarks.papers.figures import Figure
from benchmarks.results import ERROR, Measurements, Options
from benchmarks.suites import papers


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
