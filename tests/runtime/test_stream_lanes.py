"""Stream lanes order copies against compute by events alone, and hold memory exactly as long as a copy needs it."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator

import pytest
import torch

from lightning_offload.runtime.host_pool import HostBlock, HostPool
from lightning_offload.runtime.lanes import memory_bytes, storage_bytes
from lightning_offload.runtime.stream_lanes import StreamCopy, StreamLanes, _added, _Direction
from tests.runtime.fake_streams import FakeStream, FakeStreamLanes


@pytest.fixture
def mover() -> Iterator[FakeStreamLanes]:
    """Streams that dawdle."""
    made = FakeStreamLanes(seed=1, max_delay_seconds=0.01)
    yield made
    made.end()


def storage_of(mark: int, num_bytes: int = 4096) -> torch.UntypedStorage:
    """Device memory filled with one byte."""
    return torch.full((num_bytes,), mark, dtype=torch.uint8).untyped_storage()


def block_of(pool: HostPool, num_bytes: int = 4096, at: int | None = None) -> HostBlock:
    """Host memory."""
    block = pool.allocate(num_bytes, at)
    assert block is not None
    return block


def marks(block: HostBlock) -> set[int]:
    """The bytes that occur in a block."""
    return set(memory_bytes(block.address, block.num_bytes).tolist())


@pytest.mark.parametrize("num_bytes", [1, 4096, 1 << 20])
def test_bytes_go_out_and_come_back(mover: FakeStreamLanes, num_bytes: int) -> None:
    """What was swapped out comes back, whatever the streams' delays."""
    lanes, pool = mover, HostPool()
    torch.manual_seed(0)
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    block = block_of(pool, num_bytes)
    lanes.swap_out(source.untyped_storage(), block).wait()
    back = torch.zeros(num_bytes, dtype=torch.uint8).untyped_storage()
    lanes.swap_in(block, back).wait()
    assert torch.equal(storage_bytes(back), source)


def test_memory_of_a_copy_that_nobody_waits_for_is_held_until_it_is_done(mover: FakeStreamLanes) -> None:
    """Dropping a storage while its copy is under way does not free it; the lane lets go of it later."""
    lanes, pool = mover, HostPool()
    blocks = [block_of(pool) for _ in range(20)]
    alive = []
    for mark, block in enumerate(blocks):
        storage = storage_of(mark)
        alive.append(weakref.ref(storage))
        lanes.swap_out(storage, block)
        del storage
        torch.full((4096,), 255, dtype=torch.uint8)  # would take the memory over if it were free
    lanes.drain()
    assert [marks(block) for block in blocks] == [{mark} for mark in range(20)]
    assert not any(reference() for reference in alive)


def test_settling_waits_for_the_copies_that_nobody_waits_for_alone(
    mover: FakeStreamLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host does not stand still for those that compute has been told to wait for."""
    lanes, pool = mover, HostPool()
    waited, dropped = (lanes.swap_out(storage_of(mark), block_of(pool)) for mark in (1, 2))
    assert isinstance(dropped, StreamCopy)
    waited.wait()
    synchronized, synchronize = [], StreamCopy.synchronize

    def noting(copy: StreamCopy) -> None:
        synchronized.append(copy)
        synchronize(copy)

    monkeypatch.setattr(StreamCopy, "synchronize", noting)
    lanes.settle()
    assert synchronized == [dropped]
    assert dropped.storage is None


def test_who_waits_is_the_last_to_hold_the_storage(mover: FakeStreamLanes) -> None:
    """After a wait the lane holds no device memory, so dropping it frees it at that very place in the program."""
    lanes, pool = mover, HostPool()
    for mark in range(20):
        storage = storage_of(mark)
        alive = weakref.ref(storage)
        lanes.swap_out(storage, block_of(pool)).wait()
        del storage
        assert alive() is None


def test_blocks_are_used_again_only_after_their_last_copy(mover: FakeStreamLanes) -> None:
    """A block that is dropped while it is read may be handed out at once: the next copy to it comes after."""
    lanes, pool = mover, HostPool()
    assert pool.prepare(4096)
    backs = []
    for mark in range(30):
        block = block_of(pool, at=0)
        lanes.swap_out(storage_of(mark), block)
        back = torch.zeros(4096, dtype=torch.uint8).untyped_storage()
        lanes.swap_out(storage_of(mark), block).wait()
        copy = lanes.swap_in(block, back)
        backs.append((back, copy))
        del block
    assert pool.slab_bytes == 4096
    for _, copy in backs:
        copy.wait()
    assert [set(storage_bytes(back).tolist()) for back, _ in backs] == [{mark} for mark in range(30)]


def test_copies_come_after_what_compute_had_been_asked_for() -> None:
    """Compute is a stream of its own here, and late: a copy out holds what it will have written by then."""

    class LateCompute(FakeStreamLanes):
        def compute_stream(self) -> FakeStream:  # type: ignore[override]
            return late[0]

    late: list[FakeStream] = []
    mover = LateCompute()
    late.append(mover.new_stream())
    lanes, pool = mover, HostPool()
    storage, block = storage_of(0), block_of(pool)

    def write() -> None:
        time.sleep(0.05)
        storage_bytes(storage).fill_(7)

    late[0].put(write)
    copy = lanes.swap_out(storage, block)
    copy.synchronize()
    assert marks(block) == {7}
    late[0].put(lambda: storage_bytes(storage).fill_(9))  # what compute does next must not matter
    back = storage_of(0)
    late[0].put(lambda: (time.sleep(0.05), storage_bytes(back).fill_(1)))  # still uses the memory's earlier contents
    lanes.swap_in(block, back).wait()
    seen: list[int] = []
    late[0].put(lambda: seen.extend(storage_bytes(back).unique().tolist()))
    mover.end()
    assert seen == [7]


def test_memory_is_given_back_on_the_stream_it_came_from() -> None:
    """Where another stream computes by the time of the wait, the one that asked for the copy waits too."""
    mover = FakeStreamLanes()
    first, second = mover.new_stream(), mover.new_stream()
    current = [first]
    mover.compute_stream = lambda: current[0]  # type: ignore[method-assign, assignment, return-value]
    mover.out_stream.delay = lambda: 0.05
    lanes, pool = mover, HostPool()
    block, storage = block_of(pool), storage_of(5)
    copy = lanes.swap_out(storage, block)
    current[0] = second
    copy.wait()
    for stream in (first, second):
        stream.put(lambda: storage_bytes(storage).fill_(0))
    mover.end()
    assert marks(block) == {5}


def test_measuring_times_copies_and_stalls(mover: FakeStreamLanes) -> None:
    """Bytes and seconds of each direction are taken once, for the copies since measuring began."""
    lanes, pool = mover, HostPool()
    block = block_of(pool)
    lanes.swap_out(storage_of(1), block).wait()
    lanes.measure(True)
    lanes.swap_out(storage_of(1), block).wait()
    lanes.swap_in(block, storage_of(0)).wait()
    lanes.swap_in(block, storage_of(0)).wait()
    times = lanes.take_times()
    assert (times.out_bytes, times.in_bytes) == (4096, 8192)
    assert min(times.out_seconds, times.in_seconds, times.stall_seconds) > 0
    assert lanes.take_times().out_bytes == 0


def test_lanes_forget_copies_that_are_done(mover: FakeStreamLanes) -> None:
    """A long run keeps no trace of its copies."""
    lanes, pool = mover, HostPool()
    block, storage = block_of(pool), storage_of(7)
    for _ in range(100):
        lanes.swap_out(storage, block).wait()
    lanes.drain()
    del block, storage
    pool.collect()
    gc.collect()
    assert not [found for found in gc.get_objects() if type(found) is StreamCopy]


class _Late:
    """An event that comes only when it is waited for; as on CUDA, others can be asked for no times."""

    def __init__(self, *, has_come: bool) -> None:
        self.has_come = has_come

    def synchronize(self) -> None:
        self.has_come = True

    def elapsed_time(self, end: _Late) -> float:
        assert self.has_come
        assert end.has_come
        return 2000.0


def test_copies_whose_last_event_is_late_are_timed_all_the_same() -> None:
    """What notes a copy's end comes after what says that it is done; a copy whose end was not noted has no time."""
    direction, begin, end = _Direction(), _Late(has_come=True), _Late(has_come=False)
    direction.timed = [(begin, begin, 100), (begin, end, 50), (begin, None, 10)]
    assert _added(direction.take()) == (150, 4.0)
    assert _added(direction.take()) == (0, 0.0)


def test_lanes_take_streams_that_users_do_not_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of high priority, which torch has in a pool apart from the one that streams without a priority come from."""
    asked: list[tuple[torch.device, int]] = []
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch, "Stream", lambda device, *, priority=0: asked.append((device, priority)))
    StreamLanes(device)
    assert asked == [(device, -1)] * 2
