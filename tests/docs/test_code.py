"""All Python on the pages runs as it is printed, page by page, and prints what the page says."""

from __future__ import annotations

import contextlib
import doctest
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.conftest import no_accelerator_state as no_accelerator_state
from tests.docs.blocks import PAGES, ROOT, Block, blocks_of, name_of, shown
from tests.docs.given import GIVEN
from tests.one_thread import one_thread as one_thread

LANGUAGES = {"", "console", "pycon", "python", "sh", "text", "yaml"}
WITH_CODE = [page for page in PAGES if {"python", "pycon"} & {block.language for block in blocks_of(page)}]

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' advice to whoever runs a script


def test_blocks_say_their_language() -> None:
    """So that none escapes its test: everything that looks like Python is marked as such, and fenced."""
    for page in PAGES:
        assert {block.language for block in blocks_of(page)} <= LANGUAGES, page
        outside = page.read_text(encoding="utf-8")
        for block in blocks_of(page):
            outside = outside.replace(block.text, "")
            assert ">>> " not in block.text or block.language == "pycon", (page, block.line)
            assert "import " not in block.text or block.language in {"python", "pycon", "sh"}, (page, block.line)
        assert "\n>>> " not in outside, page


def test_pages_that_are_given_something_are_there() -> None:
    """And have code."""
    assert set(GIVEN) <= {name_of(page) for page in WITH_CODE}


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks of a page run one after another, as in one session."""
    monkeypatch.chdir(tmp_path)  # Lightning writes its logs into the working directory
    monkeypatch.setenv("COLUMNS", "88")
    with GIVEN.get(name_of(page), lambda: contextlib.nullcontext({}))() as names:
        blocks = blocks_of(page)
        for i, block in enumerate(blocks):
            where = f"{name_of(page)}, line {block.line}"
            if block.language == "pycon":
                run_session(block, names, where)
            if block.language != "python":
                continue
            capsys.readouterr()
            # As many lines down as in the page: a traceback then shows the page's line.
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
            following = blocks[i + 1] if i + 1 < len(blocks) else None
            if following is not None and following.language == "text" and follows(page, block, following):
                printed = shown(capsys.readouterr().out, is_exact=following.is_exact)
                assert printed == shown(following.text, is_exact=following.is_exact), where


def follows(page: Path, block: Block, following: Block) -> bool:
    """Whether nothing but space, and the mark for figures that vary, is between two blocks."""
    lines = page.read_text(encoding="utf-8").splitlines()
    between = lines[block.line + block.text.count("\n") : following.line - 2]
    return not "".join(between).replace("<!-- figures vary -->", "").strip()


def run_session(block: Block, names: dict[str, Any], where: str) -> None:
    """Run a session of the interpreter and compare all that it printed."""
    test = doctest.DocTestParser().get_doctest(block.text, names, where, name_of(ROOT / "README.md"), block.line)
    test.globs = names
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    runner.run(test, out=told.append, clear_globs=False)
    assert test.examples
    assert runner.failures == 0, "".join(told)
