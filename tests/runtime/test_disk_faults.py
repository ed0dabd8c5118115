"""A disk that fails under the lanes: an error for who waits, one warning, never wrong bytes, nothing held or left."""

from __future__ import annotations

import errno
import gc
import logging
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_offload.errors import SpillError
from lightning_offload.runtime.lanes import CpuMover
from lightning_offload.runtime.spill import DiskPool
from lightning_offload.runtime.spill_file import ALIGNMENT
from lightning_offload.runtime.staged_lanes import StagedLanes
from tests.runtime.disk import SMALL, LateMover, block_of, empty, equal, failing, storage_of

SIZE = 5 * SMALL


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[DiskPool]:
    """A pool in a folder of its own."""
    made = DiskPool(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["at once", "late", "inline"])
def lanes(request: pytest.FixtureRequest) -> Iterator[StagedLanes]:
    """Lanes of a device that copies at once, of one that is late, and lanes that are closed."""
    mover = LateMover(1, 0.002) if request.param == "late" else CpuMover()
    made = StagedLanes(mover, chunk_bytes=SMALL)
    if request.param == "inline":
        made.close()
    yield made
    made.close()
    if isinstance(mover, LateMover):
        mover.end()


def failing_from(call: str, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transfers fail beyond an offset."""
    original, fail = getattr(os, call), failing(errno.EIO)

    def sometimes(fd: int, memory: object, at: int) -> int:
        return int(fail() if at >= offset else original(fd, memory, at))

    monkeypatch.setattr(os, call, sometimes)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_failed_write(
    number: int, lanes: StagedLanes, pool: DiskPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who waits is told each time, the pool gives up with one warning, and what was never written is never read."""
    good, bad, worse = storage_of(1, SIZE), storage_of(2, SIZE), storage_of(3, 1)
    blocks = [block_of(pool, storage.nbytes()) for storage in (good, bad, worse)]
    lanes.swap_out(good, blocks[0]).wait()
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(number))
        copies = [lanes.swap_out(bad, blocks[1]), lanes.swap_out(worse, blocks[2])]
        for copy in (*copies, *copies):
            with pytest.raises(SpillError, match=f"{pool.folder}.*{os.strerror(number)}"):
                copy.wait()
    assert len(caplog.records) == 1
    assert pool.folder in caplog.text
    assert pool.error is not None
    assert pool.allocate(1) is None
    with pytest.raises(SpillError, match="never written"):
        lanes.swap_in(blocks[1], empty(SIZE)).wait()
    back = empty(SIZE)
    lanes.swap_in(blocks[0], back).synchronize()
    assert equal(back, good)


@pytest.mark.parametrize("num_good_pieces", [0, 1, 4])
def test_write_that_fails_midway(
    num_good_pieces: int, lanes: StagedLanes, pool: DiskPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever piece it is, the copy fails as a whole, the next one is made, and nothing is held."""
    bad, good, back = storage_of(1, SIZE), storage_of(2, SIZE), empty(SIZE)
    pool.prepare(2 * SIZE)
    bad_block, good_block = block_of(pool, SIZE, at=SIZE), block_of(pool, SIZE, at=0)
    failing_from("pwrite", SIZE + num_good_pieces * SMALL, monkeypatch)
    alive = weakref.ref(bad)
    copies = [lanes.swap_out(bad, bad_block), lanes.swap_out(good, good_block)]
    with pytest.raises(SpillError):
        copies[0].synchronize()
    del bad, bad_block
    assert alive() is None
    copies[1].wait()
    lanes.swap_in(good_block, back).synchronize()
    assert equal(back, good)
    pool.collect()
    assert pool.used_bytes == SIZE


@pytest.mark.parametrize("num_good_pieces", [0, 1, 4])
def test_read_that_fails(
    num_good_pieces: int, lanes: StagedLanes, pool: DiskPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever piece it is, who waits gets an error with the fix, once the device uses the memory no more."""
    storage, back, block = storage_of(1, SIZE), empty(SIZE), block_of(pool, SIZE)
    lanes.swap_out(storage, block).wait()
    with monkeypatch.context() as patch:
        failing_from("preadv", num_good_pieces * SMALL, patch)
        copy = lanes.swap_in(block, back)
        for wait in (copy.wait, copy.synchronize):
            with pytest.raises(SpillError, match=rf"could not read .* at offset .*{pool.folder}.*checkpoint"):
                wait()
    alive = weakref.ref(back)
    del back
    assert alive() is None
    assert pool.error is None
    again = empty(SIZE)
    lanes.swap_in(block, again).synchronize()
    assert equal(again, storage)


def test_file_that_lost_its_end(lanes: StagedLanes, pool: DiskPool) -> None:
    """Bytes that are not there any more are an error."""
    block = block_of(pool, SIZE)
    lanes.swap_out(storage_of(1, SIZE), block).wait()
    os.ftruncate(block.owner._fd, SIZE - ALIGNMENT)
    with pytest.raises(SpillError, match="only 4096 of them are there"):
        lanes.swap_in(block, empty(SIZE)).wait()


def test_device_that_fails(pool: DiskPool) -> None:
    """An error of the device in any piece reaches who waits for that copy alone; it is not held against the disk."""
    mover = LateMover()
    lanes = StagedLanes(mover, chunk_bytes=SMALL)
    storage, block = storage_of(1, SIZE), block_of(pool, SIZE)
    small, small_block = storage_of(2, SMALL), block_of(pool, SMALL)
    lanes.swap_out(small, small_block).wait()
    for number in range(5):
        mover.failing_moves = [len(mover.moves) + number]
        with pytest.raises(SpillError, match="fell off") as caught:
            lanes.swap_out(storage, block).wait()
        assert isinstance(caught.value.__cause__, RuntimeError)
    lanes.swap_out(storage, block).wait()
    for number in range(5):
        mover.failing_moves = [len(mover.moves) + number]
        back, small_back = empty(SIZE), empty(SMALL)
        bad, good = lanes.swap_in(block, back), lanes.swap_in(small_block, small_back)
        with pytest.raises((SpillError, RuntimeError), match="fell off"):
            bad.synchronize()
        good.synchronize()
        assert equal(small_back, small)
        lanes.swap_in(block, back).synchronize()
        assert equal(back, storage)
    assert pool.error is None
    lanes.close()
    mover.end()


def test_mover_that_raises(pool: DiskPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does one that fails in the worker itself; what it had begun is let go, and the lanes go on."""
    mover = LateMover()
    lanes = StagedLanes(mover, chunk_bytes=SMALL)
    storage, block, back = storage_of(1, SIZE), block_of(pool, SIZE), empty(SIZE)
    original = mover._ask

    def third_fails(*args: object) -> object:
        if len(mover.moves) == 2:
            raise MemoryError("no such page")
        return original(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(mover, "_ask", third_fails)
        with pytest.raises(SpillError, match="no such page"):
            lanes.swap_out(storage, block).wait()
        patch.undo()
        lanes.swap_out(storage, block).wait()
        mover.moves.clear()
        patch.setattr(mover, "_ask", third_fails)
        with pytest.raises(SpillError, match="no such page"):
            lanes.swap_in(block, back).wait()
    lanes.swap_in(block, back).synchronize()
    assert equal(back, storage)
    alive = [weakref.ref(storage), weakref.ref(back)]
    del storage, back
    lanes.drain()
    assert [ref() for ref in alive] == [None, None]
    lanes.close()
    mover.end()


def test_folder_deleted_under_way(lanes: StagedLanes, tmp_path: Path) -> None:
    """Swapping goes on as before, also when the file has to grow."""
    folder = tmp_path / "gone"
    folder.mkdir()
    pool = DiskPool(folder)
    storages = [storage_of(i, SIZE) for i in range(2)]
    blocks = [block_of(pool, SIZE)]
    lanes.swap_out(storages[0], blocks[0]).wait()
    folder.rmdir()
    before = pool.file_bytes
    pool.prepare(before + SIZE)
    blocks.append(block_of(pool, SIZE, at=before))
    lanes.swap_out(storages[1], blocks[1]).wait()
    for storage, block in zip(storages, blocks, strict=True):
        back = empty(SIZE)
        lanes.swap_in(block, back).synchronize()
        assert equal(back, storage)
    blocks.clear()
    del block
    pool.trim()
    assert pool.file_bytes == 0


def test_preparing_gives_back_what_is_much_too_large(tmp_path: Path) -> None:
    """After a plan for less, the file shrinks in place once it is empty, even if its folder has gone."""
    folder = tmp_path / "gone"
    folder.mkdir()
    pool = DiskPool(folder)
    pool.prepare(640 * SIZE)
    block = block_of(pool, SIZE)
    folder.rmdir()
    pool.prepare(2 * SIZE)
    assert pool.file_bytes == 640 * SIZE
    descriptor = block.owner._fd
    del block
    pool.prepare(2 * SIZE)
    assert pool.file_bytes == os.fstat(descriptor).st_size == 2 * SIZE
    assert block_of(pool, 2 * SIZE, at=0).offset == 0
    pool.close()


def test_failures_hold_no_descriptor(pool: DiskPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed write the pool can be trimmed at once: no error holds a block in one of its frames."""
    lanes = StagedLanes(CpuMover(), chunk_bytes=SMALL)
    block = block_of(pool, SIZE)
    descriptor = block.owner._fd
    monkeypatch.setattr(os, "pwrite", failing(errno.EIO))
    gc.disable()
    try:
        copy = lanes.swap_out(torch.UntypedStorage(SIZE), block)
        with pytest.raises(SpillError):
            copy.wait()
        del block
        pool.trim()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    finally:
        gc.enable()
        lanes.close()
