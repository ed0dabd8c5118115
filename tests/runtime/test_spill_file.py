"""Spill files keep bytes, take their room at once, and leave nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_offload.errors import SpillError
from lightning_offload.runtime import spill_file as module
from lightning_offload.runtime.spill_file import ALIGNMENT, SpillFile
from tests.runtime.disk import Page

MIB = 1 << 20
KINDS = ["as it is", "named first", "page cache", "no fallocate"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the file system can do."""
    if request.param == "named first":
        monkeypatch.setattr(module, "_UNNAMED", 0)
    elif request.param == "page cache":
        monkeypatch.setattr(module, "_DIRECT", 0)
    elif request.param == "no fallocate":
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    return str(request.param)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SpillFile]:
    """A file with room for 1 MiB."""
    made = SpillFile(str(tmp_path))
    made.resize(MIB)
    yield made
    made.close()


def test_bytes_come_back(kind: str, tmp_path: Path) -> None:
    """What was written somewhere is read there, whatever the file system can do."""
    file = SpillFile(str(tmp_path))
    file.resize(8 * MIB)
    pages = {offset: Page.random(offset, 2 * MIB) for offset in (0, 6 * MIB, 2 * MIB + ALIGNMENT)}
    for offset, page in pages.items():
        file.write(page.address, page.num_bytes, offset)
    for offset, page in pages.items():
        back = Page(page.num_bytes)
        file.read(back.address, back.num_bytes, offset)
        assert back.bytes == page.bytes
    assert file.is_direct or kind == "page cache" or not module._DIRECT
    file.close()


def test_nobody_else_sees_it(kind: str, tmp_path: Path) -> None:
    """It has no name, and its owner alone may read and write it."""
    file = SpillFile(str(tmp_path))
    file.resize(MIB)
    state = os.fstat(file._fd)
    assert stat.S_IMODE(state.st_mode) == 0o600
    assert (state.st_nlink, state.st_size) == (0, MIB)
    assert list(tmp_path.iterdir()) == []
    file.close()


def test_room_is_taken_at_once_and_given_back(kind: str, tmp_path: Path) -> None:
    """Growing allocates disk space before anything is written; shrinking frees it."""
    file = SpillFile(str(tmp_path))
    file.resize(4 * MIB)
    assert os.fstat(file._fd).st_blocks * 512 >= 4 * MIB
    file.resize(MIB)
    assert file.num_bytes == os.fstat(file._fd).st_size == MIB
    assert os.fstat(file._fd).st_blocks * 512 < 2 * MIB
    file.close()


def test_closing_ends_it(file: SpillFile) -> None:
    """A closed file has no descriptor, may be closed again, and says so when it is used."""
    descriptor = file._fd
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    page = Page(ALIGNMENT)
    for call in (file.read, file.write):
        with pytest.raises(SpillError, match="is closed"):
            call(page.address, ALIGNMENT, 0)
    with pytest.raises(SpillError, match="is closed"):
        file.resize(2 * MIB)


def test_dropping_it_closes_it(tmp_path: Path) -> None:
    """The last reference takes the descriptor along."""
    file = SpillFile(str(tmp_path))
    descriptor = file._fd
    del file
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_transfer_under_way_ends_before_the_descriptor(file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that another file may have the next moment is not closed under a thread that writes to it."""
    began, may_end = threading.Event(), threading.Event()
    original, descriptor, written = os.pwrite, file._fd, []

    def slow(fd: int, memory: memoryview, offset: int) -> int:
        began.set()
        assert may_end.wait(timeout=60)
        written.append(original(fd, memory, offset))
        return written[-1]

    monkeypatch.setattr(os, "pwrite", slow)
    page = Page(ALIGNMENT)
    thread = threading.Thread(target=file.write, args=(page.address, ALIGNMENT, 0))
    thread.start()
    assert began.wait(timeout=60)
    file.close()
    os.fstat(descriptor)
    may_end.set()
    thread.join()
    assert written == [ALIGNMENT]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("is_unnamed", [True, False])
def test_killed_process_leaves_nothing(is_unnamed: bool, tmp_path: Path) -> None:
    """After kill -9 amid its use, nothing of the file is left."""
    script = f"""
import os, signal
from lightning_offload.runtime import spill_file
spill_file._UNNAMED *= {int(is_unnamed)}
file = spill_file.SpillFile({str(tmp_path)!r})
file.resize(1 << 20)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_fork_leaves_the_file_to_its_parent(tmp_path: Path) -> None:
    """A worker process that drops its copy of the object takes no bytes away from the parent."""
    script = f"""
import os
from lightning_offload.runtime.spill_file import SpillFile
file = SpillFile({str(tmp_path)!r})
file.resize(1 << 20)
child = os.fork()
if not child:
    file.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert os.fstat(file._fd).st_size == 1 << 20
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_folder_may_go(tmp_path: Path) -> None:
    """A folder deleted under way changes nothing: the file is read, written and grown as before."""
    folder = tmp_path / "gone"
    folder.mkdir()
    file = SpillFile(str(folder))
    file.resize(MIB)
    page, back = Page.random(1, MIB), Page(MIB)
    file.write(page.address, MIB, 0)
    folder.rmdir()
    file.resize(3 * MIB)
    file.write(page.address, MIB, 2 * MIB)
    for offset in (0, 2 * MIB):
        file.read(back.address, MIB, offset)
        assert back.bytes == page.bytes
    file.close()
