"""Disk lanes hold threads, memory and disk space only for as long as there is something to do."""

from __future__ import annotations

import threading
import weakref

import pytest

from lightning_offload.runtime.disk_lanes import DiskLanes, PlainChunk
from lightning_offload.runtime.lanes import CpuMover, HostCopy
from lightning_offload.runtime.spill import DiskPool
from tests.runtime.disk import SMALL, LateMover, block_of, empty, equal, storage_of
from tests.runtime.disk import lanes as lanes
from tests.runtime.disk import late_lanes as late_lanes
from tests.runtime.disk import mover as mover
from tests.runtime.disk import pool as pool


def test_worker_lets_go_of_the_storage_before_it_reports(pool: DiskPool, lanes: DiskLanes) -> None:
    """Who waits for a copy is the last to hold the storage: dropping it frees it at once; blocks likewise."""
    for seed in range(50):
        storage, block = storage_of(seed, SMALL + 1), block_of(pool, SMALL + 1)
        alive = weakref.ref(storage)
        lanes.swap_out(storage, block).wait()
        del storage
        assert alive() is None
        back = empty(SMALL + 1)
        alive = weakref.ref(back)
        lanes.swap_in(block, back).wait()
        del back, block
        assert alive() is None
        pool.collect()
        assert pool.used_bytes == 0


def test_lanes_hold_nothing_once_drained(pool: DiskPool, late_lanes: DiskLanes) -> None:
    """Copies that nobody waits for are over after a drain, and their memory is free."""
    blocks = [block_of(pool, 5 * SMALL) for _ in range(5)]
    storages = [storage_of(seed, 5 * SMALL) for seed in range(5)]
    alive = [weakref.ref(storage) for storage in storages]
    for storage, block in zip(storages, blocks, strict=True):
        late_lanes.swap_out(storage, block)
        late_lanes.swap_in(block, empty(5 * SMALL))
    storages.clear()
    del storage, block
    late_lanes.drain()
    assert all(block.busy is not None and block.busy.is_done for block in blocks)
    assert [ref() for ref in alive] == [None] * 5
    blocks.clear()
    pool.collect()
    assert pool.used_bytes == 0


def test_closed_lanes_are_drained_too(pool: DiskPool, late_lanes: DiskLanes, mover: LateMover) -> None:
    """What the device still has to do for a copy that the calling thread made is over after a drain."""
    block, back = block_of(pool, 2 * SMALL), empty(2 * SMALL)
    storage = storage_of(1, 2 * SMALL)
    late_lanes.close()
    late_lanes.swap_out(storage, block)
    late_lanes.swap_in(block, back)
    late_lanes.drain()
    assert all(move.is_done for move in mover.moves)
    assert equal(storage, back)


@pytest.mark.parametrize("is_in", [False, True])
def test_nothing_is_held_when_a_copy_is_reported(
    is_in: bool, pool: DiskPool, lanes: DiskLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage and block are free at the very moment at which who waits may go on."""
    storage, block, user = storage_of(1, SMALL + 1), block_of(pool, SMALL + 1), HostCopy()
    if is_in:
        block.written = user
    else:
        block.after = (user,)
    copy = lanes.swap_in(block, storage) if is_in else lanes.swap_out(storage, block)
    alive, finish, held = weakref.ref(storage), HostCopy.finish, []

    def looking(self: HostCopy, error: BaseException | None = None) -> None:
        if self is copy:
            held.append((alive() is not None, len(pool.returned)))
        finish(self, error)

    monkeypatch.setattr(HostCopy, "finish", looking)
    del storage, block
    user.finish()
    copy.synchronize()
    assert held == [(False, 1)]


def ours() -> set[str]:
    """Names of our threads."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("lightning-offload")}


def test_threads_start_with_the_first_copy_and_end_with_close(pool: DiskPool) -> None:
    """Lanes that were never used have no threads; closed lanes have none either, and copy inline."""
    lanes = DiskLanes(CpuMover(), chunk_bytes=SMALL)
    assert ours() == set()
    storage, block, back = storage_of(1, 5 * SMALL), block_of(pool, 5 * SMALL), empty(5 * SMALL)
    copy = lanes.swap_out(storage, block)
    assert ours() == {"lightning-offload-disk-write"}
    lanes.swap_in(block, back)
    assert ours() == {"lightning-offload-disk-write", "lightning-offload-disk-read"}
    lanes.close()
    assert copy.is_done
    assert ours() == set()
    assert equal(storage, back)
    lanes.close()
    other, back = storage_of(2, 5 * SMALL), empty(5 * SMALL)
    assert lanes.swap_out(other, block).is_done
    inline = lanes.swap_in(block, back)
    assert inline.is_done
    inline.wait()
    assert equal(other, back)
    assert ours() == set()


def test_chunks_come_from_whom_the_device_needs_them(pool: DiskPool) -> None:
    """Two chunks for each direction in use, asked for in the calling thread, and dropped by close."""
    made: list[weakref.ref[PlainChunk]] = []
    threads = set()

    def staging(num_bytes: int) -> PlainChunk:
        chunk = PlainChunk(num_bytes)
        made.append(weakref.ref(chunk))
        threads.add(threading.get_ident())
        assert num_bytes == SMALL
        return chunk

    lanes = DiskLanes(CpuMover(), staging, chunk_bytes=SMALL)
    assert made == []
    block = block_of(pool, 5 * SMALL)
    lanes.swap_out(storage_of(1, 5 * SMALL), block).wait()
    assert len(made) == 2
    lanes.swap_in(block, empty(5 * SMALL)).wait()
    assert len(made) == 4
    assert threads == {threading.get_ident()}
    lanes.close()
    assert [ref() for ref in made] == [None] * 4
    lanes.prepare()
    lanes.prepare()
    assert len(made) == 8
    lanes.close()


def test_times_are_those_of_the_bytes_moved(pool: DiskPool, lanes: DiskLanes) -> None:
    """Each direction counts the bytes it moved and some time, since it was last asked."""
    block = block_of(pool, 5 * SMALL + 1)
    lanes.swap_out(storage_of(1, 5 * SMALL + 1), block)
    lanes.swap_out(storage_of(2, 5 * SMALL + 1), block)
    lanes.swap_in(block, empty(5 * SMALL + 1))
    times = lanes.take_times()
    assert (times.out_bytes, times.in_bytes) == (2 * (5 * SMALL + 1), 5 * SMALL + 1)
    assert min(times.out_seconds, times.in_seconds) > 0
    again = lanes.take_times()
    assert (again.out_bytes, again.out_seconds, again.in_bytes, again.in_seconds) == (0, 0, 0, 0)
