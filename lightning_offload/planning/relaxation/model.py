"""The linear program: what its variables stand for, and its rows; the package's docstring says why it is a bound.

Bytes and seconds are scaled so that the storages' total, and the plain step, are :data:`_UNITS`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.planning.lane_times import in_rates, out_rates
from lightning_offload.planning.relaxation.clock import Case, Clock, Events
from lightning_offload.planning.relaxation.copies import Copies
from lightning_offload.planning.relaxation.program import Columns, Floats, LinearProgram, Solution, Terms, scaled

_UNITS = 1000.0
_ALL_BYTES = _UNITS * (1 + 1e-6)  # the most that bytes add up to, with room for rounding
_MOST_REPLAYS = 8.0  # plain steps, beyond the time of all copies one by one


class Model:
    """The program of a case on a grid of ticks.

    Args:
        case: What is relaxed.
        grid: Ticks, in order.
        integral: Whether each storage takes one action as a whole, for :meth:`solve_integral`.

    Attributes:
        program: Variables and rows.
        swap: By item: the column of the fraction that is swapped.
        recompute: By item: the column of the fraction that is recomputed.
        early: By item: for each item that is read before it and whose replay reads it, in order: that read, and the
            column of the fraction that is on the device from there on.
    """

    def __init__(self, case: Case, grid: Sequence[int], *, integral: bool = False) -> None:
        self.program = LinearProgram()
        self._case = case
        self._per_byte = _UNITS / max(1, sum(item.candidate.num_bytes for item in case.items))
        self._per_second = _UNITS / (case.plain.step_seconds or 1.0)
        self._sizes = [item.candidate.num_bytes * self._per_byte for item in case.items]
        self._overhead = case.device.overhead_seconds * self._per_second
        self._make_choices(integral)
        stalls = sum(_longest_copies(case.device, item.candidate.num_bytes) for item in case.items) * self._per_second
        self._most = _MOST_REPLAYS * _UNITS + stalls + 3 * len(case.items) * self._overhead
        self._clock = Clock(
            self.program, case, grid, unit=self._per_second, most_replays=self._most, most_stalls=stalls
        )
        self._make_cost(2 * (self._most + stalls))
        self._make_replays()
        self._make_memory()

    def seconds(self, value: float) -> float:
        """Seconds of a step by the program's objective; a plan that replays for longer than it allows takes longer."""
        return self._case.plain.step_seconds + min(max(0.0, value), self._most) / self._per_second

    def solve(self, seconds: float) -> Solution | None:
        """Solve the program within a time, None where that fails."""
        return self.program.solve(seconds)

    def absence(self, x: Floats) -> Floats:
        """By tick: bytes that a solution has absent, were each copy made at once."""
        absent = np.zeros(len(self._case.excess) + 1)
        for i, item in enumerate(self._case.items):
            c = item.candidate
            gone = c.num_bytes * float(x[self.swap[i]] + x[self.recompute[i]])
            absent[c.death] += gone
            back = 0.0
            for tick, column in self.early[i]:
                now = c.num_bytes * float(x[column])
                absent[tick] -= now - back
                back = now
            absent[item.until] -= gone - back
        result: Floats = np.cumsum(absent)[:-1]
        return result

    def _make_choices(self, integral: bool) -> None:
        program, items = self.program, self._case.items
        can_recompute = [item.candidate.can_recompute for item in items]
        swaps = [float(item.candidate.can_swap) for item in items]
        self.swap = program.variables(swaps, cost=2 * self._overhead, integral=integral)
        self.recompute = program.variables([float(can) for can in can_recompute], integral=integral)
        again = [float(can and item.is_read) for can, item in zip(can_recompute, items, strict=True)]
        self._again = program.variables(again)  # by item: how often it is replayed twice
        for i in range(len(items)):
            program.at_most(self._gone(i), 1.0)
            program.at_most([(self._again[i], 1.0), (self.recompute[i], -1.0)], 0.0)
        self.early = [self._make_early(i) for i in range(len(items))]

    def _gone(self, i: int, factor: float = 1.0) -> Terms:
        return [(self.swap[i], factor), (self.recompute[i], factor)]

    def _make_early(self, i: int) -> list[tuple[int, int]]:
        """A replay needs what it reads: on the device from then on, or made once more later."""
        program, items = self.program, self._case.items
        readers = sorted((s for s in items[i].consumers if items[s].read_at < items[i].until), key=self._read_at)
        columns = program.variables([1.0] * len(readers))
        for k, (s, column) in enumerate(zip(readers, columns, strict=True)):
            later = [(columns[k + 1], -1.0)] if k + 1 < len(columns) else self._gone(i, -1.0)
            program.at_most([(column, 1.0), *later], 0.0)
            if i in items[s].behind:
                needed = [(self.recompute[s], 1.0), (column, -1.0), (self.swap[i], 1.0)]
                if items[i].is_read:
                    needed += [(self.recompute[i], 1.0), (self._again[i], -1.0)]
                program.at_most(needed, 1.0)
        death = items[i].candidate.death
        return [(max(items[s].read_at, death), column) for s, column in zip(readers, columns, strict=True)]

    def _read_at(self, i: int) -> int:
        return self._case.items[i].read_at

    # ---- time

    def _make_cost(self, most: float) -> None:
        """Replays, stalls, and what copies take from compute where it does not wait."""
        case, program = self._case, self.program
        cost = program.variables([most], cost=1.0)[0]
        replays, stalls = self._clock.replays[-1], self._clock.stalls[-1]
        program.at_most([(replays, 1.0), (stalls, 1.0), (cost, -1.0)], 0.0)
        share = case.device.copy_interference
        out, back = out_rates(case.device).link, in_rates(case.device).link
        terms = [(replays, 1.0), (stalls, 1.0 - share), (cost, -1.0)]
        for column, item in zip(self.swap, case.items, strict=True):
            seconds = item.candidate.num_bytes * (out + (back if item.is_read else 0.0))
            terms.append((column, share * seconds * self._per_second))
        if share > 0:
            program.at_most(terms, 0.0)

    def _make_replays(self) -> None:
        """Replays take the time of their ops, after the first tick they can happen at and before they are due."""
        program, items, ops = self.program, self._case.items, self._case.problem.graph.ops
        read = [i for i, item in enumerate(items) if item.is_read and item.candidate.can_recompute]
        users: dict[int, list[int]] = {}
        for i in read:
            for op in items[i].ops:
                users.setdefault(op, []).append(i)
        own = self._own_replays()
        total: Terms = [(self._clock.replays[-1], -1.0)]
        before: Events = []
        after: Events = []
        for i in read:
            seconds = sum(ops[op].seconds for op in items[i].ops if len(users[op]) == 1) * self._per_second
            total += [(self.recompute[i], seconds), (self._again[i], seconds), (own[i], self._overhead)]
            before.append((items[i].read_at + 1, [(self.recompute[i], seconds), (own[i], self._overhead)]))
            after.append((items[i].earliest, [(self.recompute[i], seconds)]))
        for op, several in users.items():
            seconds = ops[op].seconds * self._per_second
            if len(several) > 1 and seconds > 0:
                runs: Terms = [(self._make_shared(several, own), seconds)]
                total += runs
                after.append((max(items[i].earliest for i in several), runs))
                before += ((items[i].read_at + 1, [(own[i], seconds)]) for i in several)
        program.at_most(total, 0.0)
        done, late = (
            self._clock.sums(before, 2 * self._most),
            self._clock.sums_from(after, 2 * self._most),
        )
        for g in range(len(self._clock)):
            here, end = self._clock.replays[g], self._clock.replays[-1]
            program.at_most([(done[g], 1.0), (here, -1.0)], 0.0)
            program.at_most([(late[g], 1.0), (here, 1.0), (end, -1.0)], 0.0)

    def _make_shared(self, several: Sequence[int], own: Columns) -> int:
        """How often an op runs that is behind several items."""
        count = self.program.variables([2.0 * len(several)])[0]
        for i in several:
            self.program.at_most([(self.recompute[i], 1.0), (self._again[i], 1.0), (count, -1.0)], 0.0)
        self.program.at_most([*((own[i], 1.0) for i in several), (count, -1.0)], 0.0)
        return count

    def _own_replays(self) -> Columns:
        """By item: the fraction that is replayed at its own read, not on the way to another one before that."""
        program, items = self.program, self._case.items
        own = program.variables([1.0] * len(items))
        for i, item in enumerate(items):
            wanted: Terms = [(self.recompute[i], 1.0), (own[i], -1.0)]
            others = {*item.consumers, *item.sharers} if item.earliest < item.read_at else set()
            program.at_most([*wanted, *((self.recompute[s], -1.0) for s in sorted(others))], 0.0)
            if not item.sharers and all(items[s].read_at < item.read_at for s in item.consumers):
                program.at_most([*wanted, *((column, -1.0) for _, column in self.early[i][-1:])], 0.0)
        return own

    # ---- memory

    def _make_memory(self) -> None:
        """At each tick of the grid the excess is absent, but for what is not yet out and what is back early."""
        program, items, clock = self.program, self._case.items, self._clock
        back: Events = []
        for i, item in enumerate(items):
            previous: Terms = []
            for tick, column in self.early[i]:
                now = [(column, self._sizes[i])]
                back.append((tick, now + previous))
                previous = scaled(now, -1.0)
            back.append((item.until, self._gone(i, self._sizes[i]) + previous))
        gone = [(item, self._gone(i, self._sizes[i])) for i, item in enumerate(items)]
        left = clock.sums(((item.candidate.death, terms) for item, terms in gone), _ALL_BYTES)
        due = clock.sums(((item.until, terms) for item, terms in gone), _ALL_BYTES)
        returned = clock.sums(back, _ALL_BYTES)
        early: list[Terms] = [[(r, 1.0), (d, -1.0)] for r, d in zip(returned, due, strict=True)]
        copies = Copies(
            program, self._case, clock, swap=self.swap, sizes=self._sizes, most=_ALL_BYTES,
            scale=self._per_second / self._per_byte, early=early,
        )  # fmt: skip
        for g, tick in enumerate(clock.grid):
            excess = int(self._case.excess[tick])
            if excess > 0:
                terms = [(left[g], -1.0), (returned[g], 1.0), (copies.outgoing[g], 1.0), (copies.incoming[g], 1.0)]
                program.at_most(terms, -excess * self._per_byte)


def _longest_copies(device: DeviceSpec, num_bytes: int) -> float:
    """The most that the copies of a storage can make compute wait."""
    rates = (out_rates(device), in_rates(device))
    return num_bytes * sum(each.link + (each.disk if device.has_disk else 0.0) for each in rates)
