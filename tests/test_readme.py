"""README.md shows what it should, and its code trains; that it runs as printed is in tests/docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks_of
from tests.docs.given import readme

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
BLOCKS = [block.text for block in blocks_of(README) if block.language == "python"]


def test_readme_has_its_usage() -> None:
    """The ways of use are shown, and the two commands, one picture and one table of figures."""
    assert len(BLOCKS) == 3
    assert "make demo" in TEXT
    assert "make test" in TEXT
    assert TEXT.count("![") == 1
    assert TEXT.count("<!-- benchmark: ") == 1


def test_status_is_at_the_top() -> None:
    """That nothing has run on a GPU is the first thing said, for as long as no result of one is stored."""
    stored = [path for path in (ROOT / "benchmarks/results").glob("*.json") if not path.stem.endswith("-cpu")]
    assert ("has not run on a GPU yet" in TEXT[:200]) == (not stored)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice to whoever runs a script
@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_usage_trains(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block, given a model, data, loss and optimizer, trains that model."""
    monkeypatch.chdir(tmp_path)  # Lightning writes its logs into the working directory
    with readme() as names:
        module = names["lightning_module"]
        before = [parameter.clone() for parameter in module.parameters()]
        exec(compile(BLOCKS[index], f"README.md, block {index + 1}", "exec"), names)
    assert all((old != new).any() for old, new in zip(before, module.parameters(), strict=True))
