"""Blocks of a spill file never overlap while they live, keep their bytes, and come back whoever drops them."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from lightning_offload.errors import SpillError
from lightning_offload.runtime.lanes import HostCopy
from lightning_offload.runtime.spill import DiskBlock, DiskPool
from lightning_offload.runtime.spill_file import ALIGNMENT
from tests.runtime.disk import Page, block_of

MIB = 1 << 20


class PoolMachine(RuleBasedStateMachine):
    """Allocates, prepares, trims and drops in any order, filling each block with bytes of its own."""

    blocks = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.pool = DiskPool()
        self.live: dict[int, tuple[DiskBlock, Page]] = {}
        self.number = 0

    @rule(
        target=blocks,
        num_bytes=st.one_of(st.integers(0, 3 * ALIGNMENT), st.integers(0, MIB)),
        at=st.one_of(st.none(), st.integers(0, 80).map(lambda i: i * ALIGNMENT), st.integers(0, 9999)),
    )
    def allocate(self, num_bytes: int, at: int | None) -> int:
        block = self.pool.allocate(num_bytes, at)
        assert block is not None
        assert block.num_bytes == num_bytes
        assert block.size % ALIGNMENT == block.offset % ALIGNMENT == 0
        assert num_bytes <= block.size < num_bytes + ALIGNMENT + (num_bytes == 0)
        self.number += 1
        page = Page.random(self.number, block.size)
        block.owner.write(page.address, block.size, block.offset)
        self.live[self.number] = (block, page)
        return self.number

    @rule(number=consumes(blocks))
    def drop(self, number: int) -> None:
        block, page = self.live.pop(number)
        back = Page(block.size)
        block.owner.read(back.address, block.size, block.offset)
        assert back.bytes == page.bytes

    @rule(num_bytes=st.integers(0, 100 * MIB))
    def prepare(self, num_bytes: int) -> None:
        self.pool.prepare(num_bytes)
        assert self.pool.file_bytes >= num_bytes

    @rule()
    def trim(self) -> None:
        self.pool.trim()
        assert self.live or self.pool.file_bytes == 0

    @precondition(lambda self: self.live)
    @rule()
    def at_its_place_if_that_is_free(self) -> None:
        number = min(self.live)
        offset = self.live.pop(number)[0].offset
        again = self.pool.allocate(1, offset)
        assert again is not None
        assert again.offset == offset
        self.live[number] = (again, Page(again.size))
        again.owner.write(self.live[number][1].address, again.size, offset)

    @invariant()
    def no_two_live_blocks_overlap(self) -> None:
        ranges = sorted((b.offset, b.offset + b.size) for b, _ in self.live.values())
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
        assert not ranges or ranges[-1][1] <= self.pool.file_bytes

    @invariant()
    def sizes_add_up(self) -> None:
        self.pool.collect()
        assert self.pool.used_bytes == sum(block.size for block, _ in self.live.values())
        assert self.pool.used_bytes <= min(self.pool.peak_bytes, self.pool.file_bytes)

    def teardown(self) -> None:
        self.live.clear()
        self.pool.trim()
        assert (self.pool.used_bytes, self.pool.file_bytes) == (0, 0)


PoolMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestPool = PoolMachine.TestCase


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[DiskPool]:
    """A pool in a folder of its own."""
    made = DiskPool(tmp_path)
    yield made
    made.close()


def full_from(pool: DiskPool, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full once the file has this size."""

    def allocate(fd: int, offset: int, size: int) -> None:
        if offset + size > num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(fd, offset + size)

    monkeypatch.setattr(os, "posix_fallocate", allocate, raising=False)


def test_file_is_made_when_it_is_needed(tmp_path: Path) -> None:
    """A pool that is not used opens nothing, and may name a folder that does not exist."""
    pool = DiskPool(tmp_path / "missing")
    assert (pool.file_bytes, pool.used_bytes, pool.peak_bytes) == (0, 0, 0)
    pool.prepare(0)
    pool.trim()
    pool.close()
    assert DiskPool().folder == tempfile.gettempdir()


def test_planned_places_are_kept(pool: DiskPool) -> None:
    """Once the file was prepared, blocks lie where the plan says, in any order; what is taken lies elsewhere."""
    pool.prepare(4 * MIB)
    assert pool.file_bytes == 4 * MIB
    blocks = [block_of(pool, MIB, at=i * MIB) for i in (2, 0, 3, 1)]
    assert [block.offset for block in blocks] == [2 * MIB, 0, 3 * MIB, MIB]
    assert pool.file_bytes == pool.used_bytes == 4 * MIB
    assert block_of(pool, MIB, at=MIB).offset >= 4 * MIB


def test_growth_uses_what_is_free_at_the_end(pool: DiskPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a nearly full disk the file grows by no more than a block lacks."""
    full_from(pool, 5 * MIB, monkeypatch)
    pool.prepare(3 * MIB)
    first = block_of(pool, 2 * MIB)
    second = block_of(pool, 3 * MIB)
    assert (first.offset, second.offset, pool.file_bytes) == (0, 2 * MIB, 5 * MIB)


def test_full_disk_refuses_with_one_warning(
    pool: DiskPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What does not fit is refused, with one warning in all; what fits later is not."""
    full_from(pool, 2 * MIB, monkeypatch)
    first = block_of(pool, 2 * MIB)
    with caplog.at_level(logging.WARNING):
        assert pool.allocate(MIB) is None
        assert pool.allocate(MIB) is None
    assert len(caplog.records) == 1
    assert pool.folder in caplog.text
    assert os.strerror(errno.ENOSPC) in caplog.text
    assert pool.is_refused
    assert pool.used_bytes == 2 * MIB
    del first
    block_of(pool, MIB)


def test_preparing_on_a_full_disk_raises(pool: DiskPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a step there is still time to say so."""
    full_from(pool, 2 * MIB, monkeypatch)
    with pytest.raises(SpillError, match=r"want 3\.0 MiB on disk"):
        pool.prepare(3 * MIB)
    assert pool.file_bytes == 0
    pool.prepare(2 * MIB)
    assert pool.file_bytes == 2 * MIB


def test_folder_that_cannot_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Preparing raises; allocating refuses with one warning; the folder may appear later."""
    folder = tmp_path / "missing"
    pool = DiskPool(folder)
    with pytest.raises(SpillError, match=str(folder)):
        pool.prepare(MIB)
    with caplog.at_level(logging.WARNING):
        assert pool.allocate(MIB) is None
        assert pool.allocate(MIB) is None
    assert len(caplog.records) == 1
    folder.mkdir()
    assert pool.allocate(MIB) is not None
    pool.close()


def test_failed_pool_hands_out_nothing(pool: DiskPool, caplog: pytest.LogCaptureFixture) -> None:
    """After a failed write there is one warning with folder and reason; blocks that live can still be read."""
    block, page, back = block_of(pool, MIB), Page.random(1, MIB), Page(MIB)
    block.owner.write(page.address, MIB, block.offset)
    error = SpillError("no more of this")
    with caplog.at_level(logging.WARNING):
        pool.fail(error)
        pool.fail(SpillError("nor of that"))
    assert len(caplog.records) == 1
    assert pool.folder in caplog.text
    assert "no more of this" in caplog.text
    assert pool.error is error
    assert pool.allocate(1) is None
    pool.prepare(200 * MIB)
    assert pool.file_bytes < 200 * MIB
    block.owner.read(back.address, MIB, block.offset)
    assert back.bytes == page.bytes
    assert len(caplog.records) == 1


def test_trim_gives_the_disk_back(pool: DiskPool) -> None:
    """Without a block there is neither space nor descriptor; with one, all stays."""
    block = block_of(pool, MIB)
    descriptor = block.owner._fd
    pool.trim()
    assert pool.file_bytes >= MIB
    del block
    pool.trim()
    assert (pool.file_bytes, pool.used_bytes, pool.peak_bytes) == (0, 0, MIB)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert block_of(pool, MIB).offset == 0


def test_blocks_of_a_closed_file_do_not_return_to_the_next(pool: DiskPool) -> None:
    """They cannot be read, and what they free is not that of the file that came after."""
    old = block_of(pool, MIB)
    pool.close()
    pool.close()
    new = block_of(pool, MIB)
    with pytest.raises(SpillError, match="closed"):
        old.owner.read(Page(MIB).address, MIB, old.offset)
    del old
    pool.collect()
    assert pool.used_bytes == MIB
    assert block_of(pool, MIB).offset >= new.offset + MIB


def test_blocks_outlive_their_pool(tmp_path: Path) -> None:
    """A block that is still held keeps its file; the last one takes it along."""
    pool = DiskPool(tmp_path)
    block, page, back = block_of(pool, MIB), Page.random(1, MIB), Page(MIB)
    del pool
    gc.collect()
    block.owner.write(page.address, MIB, block.offset)
    block.owner.read(back.address, MIB, block.offset)
    assert back.bytes == page.bytes


def test_copies_of_earlier_users_are_handed_on(pool: DiskPool) -> None:
    """A block whose range is still used by a copy tells so; one elsewhere, or later, does not."""
    pool.prepare(2 * MIB)
    first, copy = block_of(pool, MIB, at=0), HostCopy()
    first.busy = copy
    del first
    other = block_of(pool, MIB, at=MIB)
    assert other.after == ()
    again = block_of(pool, ALIGNMENT, at=ALIGNMENT)
    assert again.after == (copy,)
    del again
    copy.finish()
    assert block_of(pool, MIB, at=0).after == ()


def test_blocks_may_be_dropped_by_any_thread(pool: DiskPool) -> None:
    """Finalizers take no lock: blocks dropped elsewhere while the owner allocates all come back, once."""
    batches = [[pool.allocate(4096) for _ in range(100)] for _ in range(4)]
    start = threading.Barrier(5)

    def drop(batch: list[DiskBlock | None]) -> None:
        start.wait()
        while batch:
            batch.pop()

    threads = [threading.Thread(target=drop, args=(batch,)) for batch in batches]
    for thread in threads:
        thread.start()
    start.wait()
    kept = [block_of(pool, 4096) for _ in range(150)]
    for thread in threads:
        thread.join()
    pool.collect()
    assert pool.used_bytes == 150 * 4096
    assert len({block.offset for block in kept}) == 150


def test_spare_blocks_lie_beyond_what_was_prepared(pool: DiskPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no planned block finds its place taken; a disk too full for them is no failure of the tier."""
    pool.prepare(4 * ALIGNMENT)
    spare = pool.allocate(ALIGNMENT, is_spare=True)
    assert spare is not None
    assert spare.offset >= 4 * ALIGNMENT
    planned = [pool.allocate(ALIGNMENT, at=i * ALIGNMENT) for i in range(4)]
    assert [block.offset for block in planned if block is not None] == [i * ALIGNMENT for i in range(4)]
    full_from(pool, pool.file_bytes, monkeypatch)
    assert pool.allocate(1 << 30, is_spare=True) is None
    assert not pool.is_refused
