"""The code in docs/report.md runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.report.steps import SIX

PAGE = (Path(__file__).resolve().parents[2] / "docs/report.md").read_text(encoding="utf-8")


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a folder with a step that `plan --output` wrote: a page, a trace and tables come of it."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("plan.graph.json").write_text(SIX.to_json(), encoding="utf-8")
    exec(compile(block, "docs/report.md", "exec"), {})
    assert {path.name for path in tmp_path.iterdir()} == {"plan.graph.json", "plan.html", "trace.json"}
    assert "What each module saved" in capsys.readouterr().out
