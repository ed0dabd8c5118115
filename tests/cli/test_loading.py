"""MODULE:ATTRIBUTE is found, from the current directory too, or told of in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_offload.cli.loading import check_callable, describe, load_attribute
from lightning_offload.errors import UnsupportedError
from tests.cli import models


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in; modules and the search path are put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def test_what_is_there() -> None:
    """An attribute of a module, and one of a class in it."""
    assert load_attribute("tests.cli.models:small", "model") is models.small
    assert load_attribute("tests.cli.models:Container.net", "model") is models.small


def test_the_current_directory_is_searched(folder: Path) -> None:
    """A module, or a file by its path."""
    (folder / "mine_here.py").write_text("answer = 42\n")
    assert load_attribute("mine_here:answer", "model") == 42
    sys.modules.pop("mine_here")
    assert load_attribute("./mine_here.py:answer", "model") == 42


def test_what_is_not_there(subtests: pytest.Subtests) -> None:
    """The error names what is missing, and what is near."""
    for text, message in [
        ("models", "model 'models' is not understood: write MODULE:ATTRIBUTE, such as torch.nn:Transformer"),
        (":net", "is not understood"),
        ("a:b:c", "is not understood"),
        ("no_such_module:net", "there is no module 'no_such_module' in"),
        ("no_such_package.models:net", "there is no module 'no_such_package' in"),
        ("tests.cli.no_such:net", "there is no module 'tests.cli.no_such' in"),
        ("tests.cli.models:small_", "has no attribute 'small_'; did you mean 'small'?"),
        ("tests.cli.models:Container.nest", "'Container' has no attribute 'nest'; did you mean 'net'?"),
        ("none.py:net", "importing 'none.py' failed: FileNotFoundError: there is no file 'none.py'"),
        ("..:net", "importing '..' failed"),
    ]:
        with subtests.test(text=text):
            with pytest.raises(UnsupportedError) as error:
                load_attribute(text, "model")
            assert message in str(error.value)


def test_a_module_that_cannot_be_imported(folder: Path) -> None:
    """Its own error is told in one line; a missing dependency is not taken for the module."""
    (folder / "needs_more.py").write_text("import no_such_dependency\n")
    with pytest.raises(UnsupportedError, match="importing 'needs_more' failed: No module named 'no_such_dependency'"):
        load_attribute("needs_more:net", "model")
    (folder / "is_broken.py").write_text("1 / 0\n")
    with pytest.raises(UnsupportedError, match="importing 'is_broken' failed: ZeroDivisionError: division by zero"):
        load_attribute("is_broken:net", "model")
    (folder / "is_a_script.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(UnsupportedError, match=r"importing 'is_a_script' failed: it ends the program by sys.exit\(0\)"):
        load_attribute("is_a_script:net", "model")


def test_required_arguments() -> None:
    """A function that needs arguments is refused with their names."""
    check_callable(models.small, "small", "model")
    check_callable(dict, "dict", "model")
    with pytest.raises(UnsupportedError, match="needs the arguments width, depth"):
        check_callable(models.with_arguments, "with_arguments", "model")


def test_exceptions_in_one_line() -> None:
    """The type and the first line that says something."""
    assert describe(ValueError("\n  no\nsuch luck")) == "ValueError: no"
    assert describe(KeyError()) == "KeyError"
