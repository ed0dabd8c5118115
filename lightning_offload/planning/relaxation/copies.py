"""Rows about copies: lanes, tiers, and what their bytes take on the device before and after."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_offload.graph.stays import stored_bytes
from lightning_offload.planning.lane_times import in_rates, out_rates
from lightning_offload.planning.relaxation.buffers import Buffers
from lightning_offload.planning.relaxation.clock import Case, Clock
from lightning_offload.planning.relaxation.program import Columns, LinearProgram, Terms, scaled

_MAX_HOST_ROWS = 64


class Copies:
    """Writes the rows.

    Args:
        program: The program.
        case: What is relaxed.
        clock: Its time.
        swap: By item: the column of its swapped fraction.
        sizes: By item: its bytes, in the program's units.
        most: The most that bytes may add up to, in these units.
        scale: The program's unit of time over that of bytes: what turns seconds per byte into its own.
        early: By place in the grid: bytes that are back before their read, since replays need them.

    Attributes:
        outgoing: By place in the grid: bytes that are dead and not yet copied out.
        incoming: By place in the grid: bytes that are back before their read, beyond the early ones.
    """

    def __init__(
        self,
        program: LinearProgram,
        case: Case,
        clock: Clock,
        *,
        swap: Columns,
        sizes: Sequence[float],
        most: float,
        scale: float,
        early: Sequence[Terms],
    ) -> None:
        self._program = program
        self._case = case
        self._clock = clock
        self._swap = swap
        self._sizes = sizes
        self._most = most
        self._scale = scale
        self._early = early
        self.outgoing = program.variables([most] * len(clock))
        self.incoming = program.variables([most] * len(clock))
        self._make_lanes(self._make_tiers())
        self._make_buffers()

    def _make_tiers(self) -> Columns | None:
        """By item: the fraction that goes to disk, None where nothing does; what goes to the host fits there."""
        device = self._case.device
        limit = device.host_memory_bytes
        if limit is None or (limit == 0 and device.has_disk):
            return None if limit is None else self._swap
        disk = self._program.variables([1.0] * len(self._swap)) if device.has_disk else None
        for on_disk, swapped in zip(disk or (), self._swap, strict=False):
            self._program.at_most([(on_disk, 1.0), (swapped, -1.0)], 0.0)
        stays, items = self._case.problem.stays, self._case.items
        spans = [(stays.begin[i.candidate.storage], stays.dropped[i.candidate.storage]) for i in items]
        ticks = sorted({begin for begin, _ in spans})
        for tick in ticks[:: max(1, len(ticks) // _MAX_HOST_ROWS)]:
            terms: Terms = []
            for i, (begin, end) in enumerate(spans):
                if begin <= tick < end:
                    taken = self._sizes[i] * stored_bytes(items[i].candidate.num_bytes) / items[i].candidate.num_bytes
                    terms += [(self._swap[i], taken), *([(disk[i], -taken)] if disk else [])]
            if items:
                self._program.at_most(terms, limit * self._sizes[0] / items[0].candidate.num_bytes)
        return disk

    def _make_lanes(self, disk: Columns | None) -> None:
        out, back = out_rates(self._case.device), in_rates(self._case.device)
        over_link = [[(column, size)] for column, size in zip(self._swap, self._sizes, strict=True)]
        if disk is not None:
            over_disk = [[(column, size)] for column, size in zip(disk, self._sizes, strict=True)]
            self._make_lane(over_disk, out.disk, back.disk)
            if not out.link_under_disk:
                over_link = [whole + scaled(part, -1.0) for whole, part in zip(over_link, over_disk, strict=True)]
        self._make_lane(over_link, out.link, back.link)

    def _make_lane(self, moved: Sequence[Terms], out_rate: float, in_rate: float) -> None:
        """Copies out end before bytes are absent; copies back lie between their absence and their need."""
        program, clock = self._program, self._clock
        items = list(zip(self._case.items, moved, strict=True))
        packed = clock.sums(((item.candidate.pack_tick + 1, terms) for item, terms in items), self._most)
        dead = clock.sums(((item.candidate.death, terms) for item, terms in items), self._most)
        read = clock.sums(((item.read_at, terms) for item, terms in items if item.is_read), self._most)
        out_speed, speed = 1 / (out_rate * self._scale), 1 / (in_rate * self._scale)
        out, back = self._flow(out_speed), self._flow(speed)
        for g in range(len(clock)):
            waits = scaled(clock.waits(g), -out_speed)  # in which even what is packed at this very tick may be copied
            program.at_most([(out[g], 1.0), (packed[g], -1.0), *waits], 0.0)
            program.at_most([(dead[g], 1.0), (out[g], -1.0), (self.outgoing[g], -1.0)], 0.0)
            program.at_most([(read[g], 1.0), (back[g], -1.0)], 0.0)
            others: Terms = [(read[g], -1.0), (self.incoming[g], -1.0), *scaled(self._early[g], -1.0)]
            program.at_most([(back[g], 1.0), *others], 0.0)
            if g + 1 == len(clock):
                break
            issue, end = clock.next_unpack(int(clock.grid[g])), int(clock.grid[g + 1])
            plain = 0.0
            if issue <= end:  # what is not on the device by now, nor read, is copied from the next unpack on
                others += scaled(clock.spent(g, g + 1), -speed)
                plain = (clock.start(end) - clock.start(issue)) * speed
            program.at_most([(back[g + 1], 1.0), *others], plain)

    def _flow(self, speed: float) -> Columns:
        """Bytes that a lane has moved up to each tick of the grid."""
        flow = self._program.variables([self._most] * len(self._clock))
        for g, column in enumerate(flow):
            before: Terms = [(flow[g - 1], -1.0)] if g else []
            spent = scaled(self._clock.spent(g - 1, g), -speed)
            self._program.at_most([(column, 1.0), *before, *spent], self._clock.between(g) * speed)
        return flow

    def _make_buffers(self) -> None:
        """A copy under way takes its whole buffer."""
        out, back = out_rates(self._case.device), in_rates(self._case.device)
        buffers = Buffers(self._program, self._case.items, self._clock, self._swap, self._sizes)
        for g, held in enumerate(buffers.outgoing(min(out.link, out.disk) * self._scale)):
            if held:
                self._program.at_most([*held, (self.outgoing[g], -1.0)], 0.0)
        for g, held in enumerate(buffers.incoming(min(back.link, back.disk) * self._scale)):
            if held:
                self._program.at_most([*held, (self.incoming[g], -1.0), *scaled(self._early[g], -1.0)], 0.0)
