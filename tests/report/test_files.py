"""Where reports may be written, and that nothing half-written is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_offload.errors import OffloadError, ReportFileError
from lightning_offload.report import files
from lightning_offload.report.files import check_path, write_text


def test_good_path_is_returned(tmp_path: Path) -> None:
    """In any case of its extension, and as text too."""
    assert check_path(tmp_path / "a.html", (".html",)) == tmp_path / "a.html"
    assert check_path(str(tmp_path / "a.HTML"), (".html",)) == tmp_path / "a.HTML"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "is a folder: name a file in it, such as .*plan.html"),
        ("report.pdf", r"must end in .html or .htm: write to '.*report\.html'"),
        ("report", r"must end in .html or .htm: write to '.*report\.html'"),
        ("no/such/report.html", "in the folder '.*no/such', which does not exist"),
    ],
)
def test_bad_path_is_refused_in_one_line(tmp_path: Path, name: str, message: str) -> None:
    """The error echoes the path and says what to do; it is one of ours, and an OSError."""
    with pytest.raises(ReportFileError, match=message) as caught:
        check_path(tmp_path / name, (".html", ".htm"))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, OffloadError)
    assert isinstance(caught.value, OSError)


def test_pipe_is_refused(tmp_path: Path) -> None:
    """Renaming onto it would replace it."""
    os.mkfifo(tmp_path / "a.html")
    with pytest.raises(ReportFileError, match="no regular file"):
        check_path(tmp_path / "a.html", (".html",))


def test_unwritable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the report is made."""
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ReportFileError, match="is not writable"):
        check_path(tmp_path / "a.html", (".html",))


def test_links_are_followed(tmp_path: Path) -> None:
    """The file that a link names is written, and the link stays one."""
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "real.html")
    write_text(check_path(link, (".html",)), "text")
    assert link.is_symlink()
    assert (tmp_path / "real.html").read_text() == "text"


def test_file_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    """Those that the process's mask leaves, not those of a private temporary file."""
    (tmp_path / "other").touch()
    write_text(tmp_path / "a.html", "text")
    assert (tmp_path / "a.html").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("fails", ["replace", "fdopen"])
def test_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """The old report stays as it was, and no temporary file is left."""
    target = tmp_path / "a.html"
    write_text(target, "old")
    original = os.fdopen

    def fail(*arguments: object, **keywords: object) -> None:
        if fails == "fdopen":
            original(arguments[0]).close()  # type: ignore[arg-type]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, fails, fail)
    with pytest.raises(ReportFileError, match=r"cannot be written \(No space left on device\)"):
        write_text(target, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]
    assert target.read_text() == "old"


def test_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while writing removes the temporary file and is raised."""

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "a.html", "text")
    assert list(tmp_path.iterdir()) == []
