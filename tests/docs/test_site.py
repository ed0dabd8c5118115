"""The site builds without a warning and fetches nothing, neither while it is built nor while it is read."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_offload
from lightning_offload.planning.planner import POLICIES
from tests.docs.blocks import ROOT

needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings_handlers")),
    reason="needs mkdocs-material and mkdocstrings, of the extra dev",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


@needs_mkdocs
def test_pages(site: Path) -> None:
    """Each page of docs is there, and those that are made of other files."""
    names = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    made = {"notebook", "changelog", "contributing", "security", "emulated-device"}
    built = {path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")}
    assert built == (names | made) - {"index"} | {"."}


@needs_mkdocs
def test_nothing_is_fetched(site: Path) -> None:
    """Scripts, style sheets, fonts and pictures are the site's own."""
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\"' >]+", text)
        linked = re.findall(r"<link\b[^>]*\bhref=[\"']?(?:https?:)?//[^>]+", text)
        assert loaded + linked == [], path
    for path in site.rglob("*.css"):
        assert re.findall(r"url\([\"']?(?:https?:)?//", path.read_text(encoding="utf-8")) == [], path


@needs_mkdocs
def test_docstrings_read_well(site: Path) -> None:
    """No markup of theirs is left as it was, and public classes have their arguments."""
    text = (site / "api/index.html").read_text(encoding="utf-8")
    assert re.findall(r":(?:attr|class|data|func|meth|mod):", text) == []
    for name in ("spill_dir", "host_budget", "label_smoothing", "max_lr_factor", "BudgetInfeasibleError"):
        assert name in text


@needs_mkdocs
def test_notebook_has_its_outputs(site: Path) -> None:
    """Its page shows code and what that printed, and the notebook itself can be had."""
    text = (site / "notebook/index.html").read_text(encoding="utf-8")
    assert "Smallest feasible budget" in text
    assert (site / "notebook.ipynb").exists()


def test_public_names_are_documented() -> None:
    """In the list of the interface or among the errors, and each in the API's page."""
    pages = {name: (ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("interface", "api")}
    for name in set(lightning_offload.__all__) - {"__version__"}:
        if not name.endswith("Error"):
            assert name in pages["interface"], name
            assert name in pages["api"], name


def test_policies_are_documented() -> None:
    """Each policy is in a table of its page, and no other."""
    page = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    first = [line.split(" | ")[0] for line in page.splitlines() if line.startswith('| `"')]
    assert sorted(re.findall(r'"([\w-]+)"', " ".join(first))) == sorted(POLICIES)


def test_papers_are_those_that_the_policies_cite() -> None:
    """Numbers of arXiv and DOIs on the page stand in the modules' docstrings."""
    page = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    cited = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "lightning_offload/planning/policies").glob("*.py")
    )
    found = re.findall(r"\]\(https://(?:arxiv\.org/abs|doi\.org)/([^)]+)\)", page)
    assert len(found) > 10
    assert [number for number in found if number not in cited] == []
