"""Disk lanes bring every byte back in the order asked for, and hold threads, memory and space only while in use."""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections.abc import Sized

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_offload.errors import SpillError
from lightning_offload.runtime.host_pool import Slab
from lightning_offload.runtime.lanes import CpuMover, HostCopy, storage_bytes
from lightning_offload.runtime.spill import DiskBlock, DiskPool
from lightning_offload.runtime.spill_file import ALIGNMENT
from lightning_offload.runtime.staged_lanes import CHUNK_BYTES, StagedLanes
from tests.runtime.disk import SMALL, LateMover, block_of, empty, equal, storage_of
from tests.runtime.disk import lanes as lanes
from tests.runtime.disk import late_lanes as late_lanes
from tests.runtime.disk import mover as mover
from tests.runtime.disk import pool as pool

MIB = 1 << 20


SIZES = [0, 1, 4095, 4096, 4097, 3 * MIB + 5, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 40 * MIB - 3, 40 * MIB]


@pytest.mark.parametrize("num_bytes", SIZES)
def test_bytes_go_out_and_come_back(num_bytes: int, pool: DiskPool) -> None:
    """A swap-out and a swap-in of any size give another storage the same bytes."""
    lanes = StagedLanes(CpuMover())
    storage, back, block = storage_of(1, num_bytes), empty(num_bytes), block_of(pool, num_bytes)
    out = lanes.swap_out(storage, block)
    out.wait()
    assert out.is_done
    copy = lanes.swap_in(block, back)
    copy.wait()
    assert copy.is_done
    assert equal(storage, back)
    lanes.close()


@given(seed=st.integers(0, 1 << 20), max_delay_seconds=st.sampled_from([0.0, 0.0005, 0.002]))
@settings(max_examples=25)
def test_ring_is_never_overwritten(seed: int, max_delay_seconds: float) -> None:
    """However late a device reads and writes the chunks, blocks asked for, reused and read in any order are right."""
    dice, mover, pool = random.Random(seed), LateMover(seed, max_delay_seconds), DiskPool()
    lanes = StagedLanes(mover, chunk_bytes=SMALL)
    live: list[tuple[torch.UntypedStorage, DiskBlock]] = []
    checks = []
    for number in range(60):
        if dice.random() < 0.5 or not live:
            num_bytes = dice.choice([1, dice.randint(1, 3 * SMALL), dice.randint(1, 9 * SMALL)])
            storage, block = storage_of(number, num_bytes), block_of(pool, num_bytes, ALIGNMENT * dice.randint(0, 30))
            lanes.swap_out(storage, block)
            live.append((storage, block))
        else:
            storage, block = live.pop(dice.randrange(len(live))) if dice.random() < 0.6 else dice.choice(live)
            back = empty(block.num_bytes)
            checks.append((storage, back, lanes.swap_in(block, back)))
        del block
    for storage, back, copy in checks:
        copy.synchronize()
        assert equal(storage, back)
    lanes.close()
    mover.end()
    live.clear()
    pool.trim()
    assert pool.file_bytes == 0


def test_copies_come_after_their_mark(pool: DiskPool, late_lanes: StagedLanes, mover: LateMover) -> None:
    """What compute was still to do when a copy was asked for is in what the copy reads."""
    storage, block, back = empty(5 * SMALL), block_of(pool, 5 * SMALL), empty(5 * SMALL)
    mover.compute.clear()
    out = late_lanes.swap_out(storage, block)
    copy = late_lanes.swap_in(block, back)
    storage_bytes(storage).fill_(7)
    mover.compute.set()
    copy.synchronize()
    assert out.is_done
    assert equal(storage, back)


def test_waiting_for_a_copy_in_does_not_block_for_the_device(
    pool: DiskPool, late_lanes: StagedLanes, mover: LateMover
) -> None:
    """Once the last move was asked of the device, compute goes on and is ordered after it there."""
    storage, block, back = storage_of(1, 2 * SMALL), block_of(pool, 2 * SMALL), empty(2 * SMALL)
    late_lanes.swap_out(storage, block).wait()
    mover.compute.clear()
    copy = late_lanes.swap_in(block, back)
    copy.wait()
    assert not copy.is_done
    assert not equal(storage, back)
    assert [move.num_waits for move in mover.moves[2:]] == [1, 1]
    mover.compute.set()
    copy.synchronize()
    assert copy.is_done
    assert equal(storage, back)


def moves_at_writes(moves: Sized, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many moves were asked for when each piece is written."""
    pwrite, found = os.pwrite, []

    def counting(fd: int, memory: memoryview, offset: int) -> int:
        found.append(len(moves))
        return pwrite(fd, memory, offset)

    monkeypatch.setattr(os, "pwrite", counting)
    return found


def test_next_piece_is_on_its_way_while_one_is_written(
    pool: DiskPool, late_lanes: StagedLanes, mover: LateMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is asked for a piece before the one before it is written."""
    found = moves_at_writes(mover.moves, monkeypatch)
    late_lanes.swap_out(storage_of(1, 5 * SMALL), block_of(pool, 5 * SMALL)).wait()
    assert found == [2, 3, 4, 5, 5]


def test_next_copy_begins_while_one_is_written(
    pool: DiskPool, late_lanes: StagedLanes, mover: LateMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is for the first piece of the next storage, if that was asked for meanwhile."""
    found, user = moves_at_writes(mover.moves, monkeypatch), HostCopy()
    blocks = [block_of(pool, SMALL) for _ in range(3)]
    blocks[0].after = (user,)
    mover.compute.clear()
    copies = [late_lanes.swap_out(storage_of(i, SMALL), block) for i, block in enumerate(blocks)]
    user.finish()
    deadline = time.monotonic() + 60
    while len(mover.moves) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert (len(mover.moves), found) == (2, [])
    mover.compute.set()
    copies[-1].synchronize()
    assert found[0] == 2


def test_device_that_copies_at_once_delays_no_copy(pool: DiskPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the worker itself moves the bytes, it writes each storage before it turns to the next."""
    mover, moves, user = CpuMover(), [], HostCopy()
    to_host = mover.to_host
    monkeypatch.setattr(mover, "to_host", lambda *args: moves.append(args[3]) or to_host(*args))
    found = moves_at_writes(moves, monkeypatch)
    lanes = StagedLanes(mover, chunk_bytes=SMALL)
    blocks = [block_of(pool, SMALL) for _ in range(4)]
    blocks[0].after = (user,)
    copies = [lanes.swap_out(storage_of(i, SMALL), block) for i, block in enumerate(blocks)]
    user.finish()
    copies[-1].wait()
    lanes.close()
    assert found == [1, 2, 3, 4]


def test_copies_of_one_direction_run_in_order(pool: DiskPool, lanes: StagedLanes) -> None:
    """When the last of many copies to one block is done, so are all before it, and its bytes are there."""
    block, back = block_of(pool, 3 * SMALL), empty(3 * SMALL)
    storages = [storage_of(seed, 3 * SMALL) for seed in range(20)]
    copies = [lanes.swap_out(storage, block) for storage in storages]
    copies[-1].wait()
    assert all(copy.is_done for copy in copies)
    lanes.swap_in(block, back).wait()
    assert equal(back, storages[-1])


def test_reading_comes_after_writing(pool: DiskPool, late_lanes: StagedLanes) -> None:
    """A copy in that is asked for while the copy out is under way reads what that writes, and is not overwritten."""
    block, first, second = block_of(pool, 4 * SMALL), storage_of(1, 4 * SMALL), storage_of(2, 4 * SMALL)
    backs = [empty(4 * SMALL) for _ in range(3)]
    late_lanes.swap_out(first, block)
    copies = [late_lanes.swap_in(block, backs[0]), late_lanes.swap_in(block, backs[1])]
    late_lanes.swap_out(second, block)
    copies.append(late_lanes.swap_in(block, backs[2]))
    for copy in copies:
        copy.synchronize()
    assert equal(backs[0], first)
    assert equal(backs[1], first)
    assert equal(backs[2], second)


@pytest.mark.parametrize("does_fail", [False, True])
def test_earlier_users_of_a_range_come_first(
    does_fail: bool, pool: DiskPool, lanes: StagedLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written to a block before the copies that used its range have ended, well or not."""
    pwrite, written = os.pwrite, threading.Event()

    def noticing(fd: int, memory: memoryview, offset: int) -> int:
        written.set()
        return pwrite(fd, memory, offset)

    monkeypatch.setattr(os, "pwrite", noticing)
    user = HostCopy()
    block = block_of(pool, SMALL)
    block.after = (user,)
    copy = lanes.swap_out(storage_of(1, SMALL), block)
    assert not written.wait(timeout=0.05)
    user.finish(SpillError("it did not work") if does_fail else None)
    copy.wait()
    assert written.is_set()
    assert block.after == ()


def test_workers_do_not_wait_for_each_other_in_a_circle(
    pool: DiskPool, late_lanes: StagedLanes, mover: LateMover
) -> None:
    """A copy out that waits for a reader of its range ends what the reader waits for first."""
    first, second = block_of(pool, SMALL), block_of(pool, SMALL)
    storages, backs = [storage_of(i, SMALL) for i in range(2)], [empty(SMALL) for _ in range(2)]
    mover.compute.clear()
    late_lanes.swap_out(storages[0], first)
    second.after = (late_lanes.swap_in(first, backs[0]),)
    late_lanes.swap_out(storages[1], second)
    copy = late_lanes.swap_in(second, backs[1])
    mover.compute.set()
    copy.synchronize()
    assert all(equal(*pair) for pair in zip(storages, backs, strict=True))


def test_worker_lets_go_of_the_storage_before_it_reports(pool: DiskPool, lanes: StagedLanes) -> None:
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


def test_lanes_hold_nothing_once_drained(pool: DiskPool, late_lanes: StagedLanes) -> None:
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


def test_settled_lanes_hold_nothing_that_nobody_waits_for(pool: DiskPool, late_lanes: StagedLanes) -> None:
    """Copies of what was dropped meanwhile are waited for, in both directions, and their memory is free."""
    block, storage, back = block_of(pool, 3 * SMALL), storage_of(1, 3 * SMALL), empty(3 * SMALL)
    alive = [weakref.ref(storage), weakref.ref(back)]
    late_lanes.swap_out(storage, block)
    late_lanes.swap_in(block, back)
    del storage, back
    late_lanes.settle()
    assert [ref() for ref in alive] == [None, None]


def test_closed_lanes_are_drained_too(pool: DiskPool, late_lanes: StagedLanes, mover: LateMover) -> None:
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
    is_in: bool, pool: DiskPool, lanes: StagedLanes, monkeypatch: pytest.MonkeyPatch
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
    lanes = StagedLanes(CpuMover(), chunk_bytes=SMALL)
    assert ours() == set()
    storage, block, back = storage_of(1, 5 * SMALL), block_of(pool, 5 * SMALL), empty(5 * SMALL)
    copy = lanes.swap_out(storage, block)
    assert ours() == {"lightning-offload-disk-out"}
    lanes.swap_in(block, back)
    assert ours() == {"lightning-offload-disk-out", "lightning-offload-disk-in"}
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
    made: list[weakref.ref[Slab]] = []
    threads = set()

    class Chunk(Slab):
        __slots__ = ("__weakref__",)

    def staging(num_bytes: int) -> Slab:
        chunk = Chunk(num_bytes)
        made.append(weakref.ref(chunk))
        threads.add(threading.get_ident())
        assert num_bytes == SMALL
        return chunk

    lanes = StagedLanes(CpuMover(), staging, chunk_bytes=SMALL)
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


def test_times_are_those_of_the_bytes_moved(pool: DiskPool, lanes: StagedLanes) -> None:
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


def test_a_thread_tells_its_mover_before_it_asks_for_moves(pool: DiskPool) -> None:
    """Each of the two does, once; one whose mover refuses goes on, and its copies say what is wrong."""
    begun: list[str] = []

    class Mover(CpuMover):
        def begin_thread(self) -> None:
            begun.append(threading.current_thread().name)
            raise RuntimeError("there is no such device")

    lanes = StagedLanes(Mover(), chunk_bytes=SMALL)
    for _ in range(2):
        storage, back, block = storage_of(1, SMALL), empty(SMALL), block_of(pool, SMALL)
        lanes.swap_out(storage, block).wait()
        lanes.swap_in(block, back).wait()
        assert equal(storage, back)
    lanes.close()
    assert begun == ["lightning-offload-disk-out", "lightning-offload-disk-in"]
