"""Whatever a disk does to a spill file, the error says what, where and what to do, and no byte is wrong."""

from __future__ import annotations

import errno
import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_offload.errors import SpillError
from lightning_offload.runtime import spill_file as module
from lightning_offload.runtime.spill_file import ALIGNMENT, SpillFile
from tests.runtime.disk import Page, failing

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SpillFile]:
    """A file with room for 1 MiB."""
    made = SpillFile(str(tmp_path))
    made.resize(MIB)
    yield made
    made.close()


@pytest.mark.parametrize("is_unnamed", [True, False])
def test_no_such_folder(is_unnamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no folder there is no file; the message names the folder and the fix."""
    if not is_unnamed:
        monkeypatch.setattr(module, "_UNNAMED", 0)
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(SpillError, match=rf"{name}'.*spill_dir.*tier='host'"):
            SpillFile(str(tmp_path / name))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_read_only_folder(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is where the folder cannot be written to."""
    monkeypatch.setattr(os, "open", failing(number))
    with pytest.raises(SpillError, match=f"{os.strerror(number)}.*spill_dir"):
        SpillFile(str(tmp_path))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_found_when_room_is_asked_for(
    number: int, file: SpillFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what was wanted, where, what is free and the fix; the file stays as it is."""
    monkeypatch.setattr(os, "posix_fallocate", failing(number), raising=False)
    with pytest.raises(SpillError, match=rf"want 3\.0 MiB on disk in .*{file.folder}.* are free: .*spill_dir"):
        file.resize(4 * MIB)
    assert file.num_bytes == os.fstat(file._fd).st_size == MIB


def test_more_than_is_free_is_not_even_tried(file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for it would fill the disk for others for a moment."""
    asked: list[object] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: asked.append(args), raising=False)
    with pytest.raises(SpillError, match=r"want 1\d\d\.\d PiB on disk"):
        file.resize(1 << 57)
    assert (asked, file.num_bytes) == ([], MIB)


@pytest.mark.parametrize("has_fallocate", [True, False])
def test_limit_of_file_sizes(has_fallocate: bool, file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system refuses for real is taken back: neither size nor space stay."""
    if not has_fallocate:
        monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP), raising=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * MIB + 512, limits[1]))
    try:
        with pytest.raises(SpillError, match=r"want 4\.0 MiB") as caught:
            file.resize(5 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value).count("spill_dir") == 1
    state = os.fstat(file._fd)
    assert file.num_bytes == state.st_size == MIB
    assert state.st_blocks * 512 < 2 * MIB
    file.resize(5 * MIB)


@pytest.mark.parametrize("verb", ["write", "read"])
@pytest.mark.parametrize("unit", [1, 512, ALIGNMENT])
def test_short_transfers_go_on(verb: str, unit: int, file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little the system moves at once, all of it arrives."""
    dice = random.Random(unit)
    page, back = Page.random(unit, MIB // 4), Page(MIB // 4)
    pwrite, preadv = os.pwrite, os.preadv

    def part(memory: memoryview) -> memoryview:
        return memory[: unit * dice.randint(1, max(1, 40_000 // unit))]

    if verb == "write":
        monkeypatch.setattr(os, "pwrite", lambda fd, memory, offset: pwrite(fd, part(memory), offset))
    else:
        monkeypatch.setattr(os, "preadv", lambda fd, memories, offset: preadv(fd, [part(memories[0])], offset))
    file.write(page.address, page.num_bytes, ALIGNMENT)
    file.read(back.address, back.num_bytes, ALIGNMENT)
    assert back.bytes == page.bytes
    assert file.is_direct is (unit == ALIGNMENT and bool(module._DIRECT))


@pytest.mark.parametrize("verb", ["pwrite", "preadv"])
def test_page_cache_serves_where_it_cannot_be_bypassed(
    verb: str, file: SpillFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that refuses at the first transfer only is not asked to bypass its cache again."""
    original = getattr(os, verb)

    def picky(fd: int, memory: Any, offset: int) -> int:
        if file.is_direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return int(original(fd, memory, offset))

    monkeypatch.setattr(os, verb, picky)
    page, back = Page.random(1, MIB), Page(MIB)
    file.write(page.address, MIB, 0)
    file.read(back.address, MIB, 0)
    assert back.bytes == page.bytes
    assert not file.is_direct


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EINVAL])
def test_write_errors_say_where_and_what_to_do(number: int, file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folder, offset, the system's word and the fix."""
    monkeypatch.setattr(os, "pwrite", failing(number))
    page = Page(ALIGNMENT)
    expected = rf"could not write 4096 bytes at offset 8192 .*{file.folder}.*{os.strerror(number)}.*spill_dir"
    with pytest.raises(SpillError, match=expected) as caught:
        file.write(page.address, ALIGNMENT, 8192)
    assert isinstance(caught.value.__cause__, OSError)


def test_read_errors_say_where_and_what_to_do(file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise; the bytes are lost."""
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    page = Page(ALIGNMENT)
    with pytest.raises(SpillError, match=rf"at offset 8192 .*{file.folder}.*are lost.*checkpoint"):
        file.read(page.address, ALIGNMENT, 8192)


def test_end_of_file(file: SpillFile) -> None:
    """A read beyond what there is fails instead of leaving memory as it was."""
    page = Page(4 * ALIGNMENT)
    with pytest.raises(SpillError, match="only 8192 of them are there"):
        file.read(page.address, page.num_bytes, MIB - 2 * ALIGNMENT)


def test_disk_that_takes_nothing(file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that makes no headway fails; it does not loop for ever."""
    monkeypatch.setattr(os, "pwrite", lambda *args: 0)
    page = Page(ALIGNMENT)
    with pytest.raises(SpillError, match="only 0 of them were taken"):
        file.write(page.address, ALIGNMENT, 0)


def test_it_needs_posix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has no pwrite, the message says so."""
    monkeypatch.delattr(os, "pwrite")
    with pytest.raises(SpillError, match="POSIX"):
        SpillFile(str(tmp_path))
