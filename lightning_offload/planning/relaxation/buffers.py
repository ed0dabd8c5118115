"""Rows for what the flow of bytes over a lane leaves out: a buffer is there as a whole while its copy is under way.

A storage that is absent at a tick has yet to be copied back between the next unpack, since copies are issued at
unpacks, and its need. Where less plain time than its copy takes lies between them, the missing time must be spent
there on replays or stalls. A copy of ``b`` seconds in ``c < b`` plain seconds costs ``b - c``; with its absence a
fraction ``z``, the row ``(b - c) z <= replays + stalls`` holds for every plan, and is stronger than the flow's
``b z <= c + replays + stalls`` for all ``z < 1``. Copies out, between pack and absence, are the same.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from lightning_offload.planning.relaxation.clock import Clock
from lightning_offload.planning.relaxation.facts import Item
from lightning_offload.planning.relaxation.program import Columns, LinearProgram, Terms, scaled


class Buffers:
    """Writes the rows.

    Args:
        program: The program.
        items: The candidates.
        clock: Its time.
        swap: By item: the column of its swapped fraction.
        sizes: By item: its bytes, in the program's units.
    """

    def __init__(
        self, program: LinearProgram, items: Sequence[Item], clock: Clock, swap: Columns, sizes: Sequence[float]
    ) -> None:
        self._program = program
        self._items = items
        self._clock = clock
        self._grid: list[int] = clock.grid.tolist()
        self._swap = swap
        self._sizes = sizes

    def incoming(self, rate: float) -> list[Terms]:
        """Copies back.

        Args:
            rate: Time per byte, in the program's units.

        Returns:
            By place in the grid: bytes that are on the device before their need at least, as swapped less absent.
        """
        held: list[Terms] = [[] for _ in self._grid]
        for i, item in enumerate(self._items):
            if not item.is_read or not item.candidate.can_swap:
                continue
            last = bisect.bisect_left(self._grid, item.read_at)
            for g in range(last - 1, -1, -1):
                if self._grid[g] < item.candidate.death:
                    break
                issue = min(self._clock.next_unpack(self._grid[g]), item.read_at)
                lacking = self._sizes[i] * rate - (self._clock.start(item.read_at) - self._clock.start(issue))
                if lacking <= 0:
                    break
                held[g] += self._hold(i, lacking, self._clock.spent(g, last))
        return held

    def outgoing(self, rate: float) -> list[Terms]:
        """Copies out, likewise: bytes that are not yet off the device after their death."""
        held: list[Terms] = [[] for _ in self._grid]
        for i, item in enumerate(self._items):
            c = item.candidate
            if not c.can_swap:
                continue
            first = bisect.bisect_left(self._grid, c.pack_tick) - 1
            for g in range(bisect.bisect_left(self._grid, c.death), bisect.bisect_left(self._grid, item.until)):
                lacking = self._sizes[i] * rate - (self._clock.start(self._grid[g]) - self._clock.start(c.pack_tick))
                if lacking <= 0:
                    break
                held[g] += self._hold(i, lacking, self._clock.spent(first, g))
        return held

    def _hold(self, i: int, lacking: float, spent: Terms) -> Terms:
        absent = self._program.variables([1.0])[0]
        self._program.at_most([(absent, lacking), *scaled(spent, -1.0)], 0.0)
        return [(self._swap[i], self._sizes[i]), (absent, -self._sizes[i])]
