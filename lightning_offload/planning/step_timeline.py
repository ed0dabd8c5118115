"""A step under a plan as plain data: when each tick begins, memory, and what each lane does when."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import numpy.typing as npt

from lightning_offload.graph.memory_plan import Tier
from lightning_offload.graph.step_graph import Phase
from lightning_offload.planning.problem import Bytes

Lane = Literal["compute", "d2h", "h2d", "disk_write", "disk_read"]
SpanKind = Literal["op", "replay", "stall", "copy", "slowdown"]
Seconds = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What a lane does for a while.

    Attributes:
        lane: Where; spans of one lane do not overlap.
        kind: An op, the replays for one unpack, compute that waits for a copy, a copy, or the slow-down by copies.
        start_seconds: From the beginning of the step.
        end_seconds: The same.
        name: The op, of a replay the one whose result was asked for, of a copy and a stall the one that made what
            is copied.
        module: Its module, of a copy and a stall the one that saved what is copied; "" where none is known.
        phase: Forward or backward.
        tick: At which it was issued.
        storage: Index of what is copied, waited for or asked for; -1 for ops.
        num_bytes: Its size; 0 for ops.
        tier: Where a copy goes to or comes from; a copy between device and disk has a span on the link too.
    """

    lane: Lane
    kind: SpanKind
    start_seconds: float
    end_seconds: float
    name: str
    module: str
    phase: Phase
    tick: int
    storage: int = -1
    num_bytes: int = 0
    tier: Tier = "host"

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_seconds - self.start_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """A step under a plan.

    Attributes:
        tick_seconds: When each tick begins: after waiting for copies out, before waiting for copies back.
        memory: Live device bytes at each tick.
        spans: Of all lanes, by start.
        step_seconds: Duration.
        stall_seconds: The part of it in which compute waits for copies.
        slowdown_seconds: The part of it that copies cost beside stalls: their interference and overhead.
        backward_seconds: When backward begins; the end of the step where there is none.
        backward_tick: The tick of that.
    """

    tick_seconds: Seconds
    memory: Bytes
    spans: tuple[Span, ...]
    step_seconds: float
    stall_seconds: float
    slowdown_seconds: float
    backward_seconds: float
    backward_tick: int

    @property
    def peak_bytes(self) -> int:
        """The maximum of memory."""
        return int(self.memory.max())

    @property
    def peak_tick(self) -> int:
        """The first tick of that."""
        return int(np.argmax(self.memory))

    def of(self, lane: Lane) -> tuple[Span, ...]:
        """The spans of a lane."""
        return tuple(span for span in self.spans if span.lane == lane)
