"""Lanes with a set bandwidth on a virtual clock, and the clock: a step runs in virtual time, to the last byte.

Compute takes what the step graph says of each op, a replay takes what its op took, and a copy takes its bytes over
the lane's rate, after the copies before it. Bytes are moved as late as that allows, at the copy's end, and until
then the lane holds the device memory: a missing wait gives wrong bytes, and a late one shows as memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from typing_extensions import override

from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.runtime import replay
from lightning_offload.runtime import tracking as recording
from lightning_offload.runtime.lanes import Block, Copy, CopyLanes, LaneTimes
from lightning_offload.runtime.values import Call
from lightning_offload.tensors.observer import StepObserver
from lightning_offload.tensors.op_facts import Effects, OpFacts


class VirtualClock(StepObserver):
    """Virtual time of one step: observes its ops and takes their durations from the graph.

    Attributes:
        now: Seconds since the step began.
        replay_seconds: How much of that went into replays.
        num_ops: Ops that ran, replays aside.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.now = 0.0
        self.replay_seconds = 0.0
        self.num_ops = 0
        self._ops = graph.ops
        self._recorded: weakref.WeakKeyDictionary[Call, float] = weakref.WeakKeyDictionary()
        self._listeners: list[Callable[[], None]] = []

    def restart(self) -> None:
        """Another step begins; time goes on."""
        self.num_ops = 0

    def when_moved(self, listener: Callable[[], None]) -> None:
        """Call this whenever time has gone on."""
        self._listeners.append(listener)

    def move_to(self, seconds: float) -> None:
        """Go on to a later time; an earlier one changes nothing."""
        self.now = max(self.now, seconds)
        for listener in self._listeners:
            listener()

    @override
    def on_op(
        self, facts: OpFacts, args: Any, kwargs: Any, out: Any, seconds: float, did: Effects | None = None
    ) -> None:
        op = self._ops[self.num_ops]
        assert op.name == facts.name, f"op {self.num_ops} was {op.name} when it was recorded, {facts.name} now"
        self.num_ops += 1
        self.move_to(self.now + op.seconds)

    @contextlib.contextmanager
    def timing_replays(self) -> Iterator[None]:
        """Let replays take time too."""
        record_call, run = recording.record_call, replay.Replay._run

        def record(func: Any, facts: OpFacts, *args: Any, **keywords: Any) -> Call:
            call = record_call(func, facts, *args, **keywords)
            self._recorded[call] = self._ops[self.num_ops].seconds
            return call

        def run_replay(self_: replay.Replay, call: Call, *args: Any) -> None:
            run(self_, call, *args)
            self.replay_seconds += self._recorded[call]
            self.move_to(self.now + self._recorded[call])

        with mock.patch.object(recording, "record_call", record), mock.patch.object(replay.Replay, "_run", run_replay):
            yield


class ClockedCopy(Copy):
    """A copy that ends at a virtual time.

    Attributes:
        end: That time.
    """

    def __init__(self, clock: VirtualClock, end: float, move: Callable[[], None]) -> None:
        self.end = end
        self._clock = clock
        self._move: Callable[[], None] | None = move

    @property
    @override
    def is_done(self) -> bool:
        return self.end <= self._clock.now

    @override
    def wait(self) -> float:
        stall = max(0.0, self.end - self._clock.now)
        self._clock.move_to(self.end)
        self.finish()
        return stall

    @override
    def synchronize(self) -> None:
        self.wait()

    def finish(self) -> None:
        """Move the bytes and let go of the memory."""
        move, self._move = self._move, None
        if move is not None:
            move()


class _Direction:
    """One FIFO of copies."""

    def __init__(self, clock: VirtualClock, seconds_of: Callable[[int], float]) -> None:
        self._clock = clock
        self._seconds_of = seconds_of
        self._free = 0.0
        self.num_bytes = 0
        self.seconds = 0.0
        self._under_way: deque[ClockedCopy] = deque()

    def submit(self, num_bytes: int, move: Callable[[], None]) -> ClockedCopy:
        seconds = self._seconds_of(num_bytes)
        self._free = max(self._free, self._clock.now) + seconds
        self.num_bytes += num_bytes
        self.seconds += seconds
        copy = ClockedCopy(self._clock, self._free, move)
        self._under_way.append(copy)
        return copy

    def proceed(self) -> None:
        while self._under_way and self._under_way[0].is_done:
            self._under_way.popleft().finish()

    def drain(self) -> None:
        while self._under_way:
            self._under_way.popleft().finish()

    def take(self) -> tuple[int, float]:
        taken = self.num_bytes, self.seconds
        self.num_bytes, self.seconds = 0, 0.0
        return taken


class ClockedLanes(CopyLanes):
    """See the module's docstring.

    Args:
        clock: The virtual time.
        over: Moves the bytes when a copy ends; in the thread that asks for it, so closed if it has threads of its own.
        out_seconds: What a copy of so many bytes off the device takes.
        in_seconds: The same for copies to the device.
    """

    def __init__(
        self,
        clock: VirtualClock,
        over: CopyLanes,
        out_seconds: Callable[[int], float],
        in_seconds: Callable[[int], float],
    ) -> None:
        self._over = over
        self._out = _Direction(clock, out_seconds)
        self._in = _Direction(clock, in_seconds)
        clock.when_moved(self._out.proceed)
        clock.when_moved(self._in.proceed)

    @override
    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        return self._out.submit(block.num_bytes, lambda: self._over.swap_out(storage, block).synchronize())

    @override
    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        return self._in.submit(block.num_bytes, lambda: self._over.swap_in(block, storage).synchronize())

    @override
    def drain(self) -> None:
        self._out.drain()
        self._in.drain()

    @override
    def take_times(self) -> LaneTimes:
        (out_bytes, out_seconds), (in_bytes, in_seconds) = self._out.take(), self._in.take()
        return LaneTimes(out_bytes=out_bytes, out_seconds=out_seconds, in_bytes=in_bytes, in_seconds=in_seconds)
