"""The linear program: what its variables stand for, and its rows; the package's docstring says why it is a bound.

Bytes and seconds are scaled so that the storages' total, and the plain step, are :data:`_UNITS`.

Rows about copies are lanes, tiers, and what their bytes take on the device before and after.

Rows for what the flow of bytes over a lane leaves out: a buffer is there as a whole while its copy is under way.

A storage that is absent at a tick has yet to be copied back between the next unpack, since copies are issued at
unpacks, and its need. Where less plain time than its copy takes lies between them, the missing time must be spent
there on replays or stalls. A copy of ``b`` seconds in ``c < b`` plain seconds costs ``b - c``; with its absence a
fraction ``z``, the row ``(b - c) z <= replays + stalls`` holds for every plan, and is stronger than the flow's
``b z <= c + replays + stalls`` for all ``z < 1``. Copies out, between pack and absence, are the same.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.host_layout import stored_bytes
from lightning_offload.planning.links import in_rates, out_rates
from lightning_offload.planning.relaxation.facts import Case, Clock, Events, Item
from lightning_offload.planning.relaxation.program import Columns, Floats, LinearProgram, Solution, Terms, scaled

_UNITS = 1000.0  # near the square root of what the solver takes for nothing and for everything
_ALL_BYTES = _UNITS * (1 + 1e-6)  # the most that bytes add up to, with room for rounding
_MOST_REPLAYS = 8.0  # plain steps, beyond the time of all copies one by one


class Model:
    """The program of a case on a grid of ticks.

    Args:
        case: What is relaxed.
        grid: Ticks, in order.
        integral: Whether each storage takes one action as a whole, for :meth:`solve_integral`.
        is_thin: Whether to leave out the rows that tie storages to one another, of which large steps have too many:
            what a replay reads, ops that replays share, overheads of replays, and buffers of copies under way.

    Attributes:
        program: Variables and rows.
        swap: By item: the column of the fraction that is swapped.
        recompute: By item: the column of the fraction that is recomputed.
        early: By item: for each tick at which a replay for another may bring it back, as far as these are told apart,
            the column of the fraction that is on the device from there on.
    """

    def __init__(self, case: Case, grid: Sequence[int], *, integral: bool = False, is_thin: bool = False) -> None:
        self.program = LinearProgram()
        self._case = case
        self._is_thin = is_thin
        self.early: list[list[tuple[int, int]]]
        self._per_byte = _UNITS / max(1, sum(item.candidate.num_bytes for item in case.items))
        self._per_second = _UNITS / (case.plain.step_seconds or 1.0)
        self._sizes = [item.candidate.num_bytes * self._per_byte for item in case.items]
        overheads = [case.device.copy_overhead(item.candidate.num_bytes) * self._per_second for item in case.items]
        self._replay_overhead = case.device.replay_overhead * self._per_second
        self._make_choices(overheads, integral)
        stalls = sum(_longest_copies(case.device, item.candidate.num_bytes) for item in case.items) * self._per_second
        most_overhead = 3 * max([*overheads, self._replay_overhead])
        self._most = _MOST_REPLAYS * _UNITS + stalls + len(case.items) * most_overhead
        self._clock = Clock(
            self.program, case, grid, unit=self._per_second, most_replays=self._most, most_stalls=stalls
        )
        self._make_cost(2 * (self._most + stalls))
        self._make_replays()
        self._make_memory()

    def seconds(self, value: float) -> float:
        """Seconds of a step by the program's objective; a plan that replays for longer than it allows takes longer."""
        return self._case.plain.step_seconds + min(max(0.0, value), self._most) / self._per_second

    def solve(self, seconds: float | None) -> Solution | None:
        """Solve the program, within a time if one is given; None where that fails."""
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

    def _make_choices(self, overheads: list[float], integral: bool) -> None:
        program, items = self.program, self._case.items
        can_recompute = [item.candidate.can_recompute for item in items]
        swaps = [float(item.candidate.can_swap) for item in items]
        self.swap = program.variables(swaps, cost=[2 * each for each in overheads], integral=integral)
        self.recompute = program.variables([float(can) for can in can_recompute], integral=integral)
        if self._is_thin:
            for i in range(len(items)):
                program.at_most(self._gone(i), 1.0)
            self.early = [[] for _ in items]
            return
        again = [float(can and item.is_read) for can, item in zip(can_recompute, items, strict=True)]
        self._again = program.variables(again)  # by item: how often it is replayed twice
        for i in range(len(items)):
            program.at_most(self._gone(i), 1.0)
            program.at_most([(self._again[i], 1.0), (self.recompute[i], -1.0)], 0.0)
        self.early = [self._make_early(item, i) for i, item in enumerate(items)]
        for i, item in enumerate(items):
            self._make_inputs(item, i)

    def _gone(self, i: int, factor: float = 1.0) -> Terms:
        return [(self.swap[i], factor), (self.recompute[i], factor)]

    def _make_early(self, item: Item, i: int) -> list[tuple[int, int]]:
        """The ticks at which an item may be back before its own read, with its share that is; none leaves again."""
        ticks = [tick for tick, _ in item.returns]
        columns = self.program.variables([1.0] * len(ticks))
        for k, column in enumerate(columns):
            later = [(columns[k + 1], -1.0)] if k + 1 < len(columns) else self._gone(i, -1.0)
            self.program.at_most([(column, 1.0), *later], 0.0)
        return list(zip(ticks, columns, strict=True))

    def _make_inputs(self, item: Item, i: int) -> None:
        """A replay needs what it reads: on the device from then on, or made once more later.

        That is so of a replay for the reader's own sake as of one that makes the reader on the way to another. A copy
        stays where it is if the same replay runs the producer anyhow, for another of its outputs.
        """
        made_again: Terms = [(self.recompute[i], 1.0), (self._again[i], -1.0)] if item.is_read else []
        anyhow: Terms = [(self.recompute[k], -1.0) for k in self._co_made(item)]
        needs: list[Terms] = [[(self.swap[i], 1.0), *made_again, *anyhow]]
        if anyhow and made_again:
            needs.append(made_again)
        for s in item.consumers:
            reader = self._case.items[s]
            if i not in reader.behind:
                continue
            wanted: Terms = [(self.recompute[s], 1.0)]
            made: list[tuple[int, Terms, float]] = [(reader.read_at, wanted, 1.0)]
            made += [(tick, [*wanted, (column, 1.0)], 2.0) for tick, column in self.early[s]]
            for tick, terms, most in made:
                back = next((column for at, column in self.early[i] if at >= tick), None)
                if tick < item.until and back is not None:
                    for need in needs:
                        self.program.at_most([*terms, *need, (back, -1.0)], most)

    def _co_made(self, item: Item) -> list[int]:
        """Items for whose sake a replay that reads one may run its producer beside that.

        A co-output that no replay reads is made for its own read only, by a replay that has no other purpose.
        """
        items, values = self._case.items, self._case.problem.graph.values
        producer = values[item.candidate.value].producer
        return [k for k in item.sharers if items[k].consumers or values[items[k].candidate.value].producer != producer]

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
        items, ops = self._case.items, self._case.problem.graph.ops
        read = [i for i, item in enumerate(items) if item.is_read and item.candidate.can_recompute]
        users: dict[int, list[int]] = {}
        for i in read:
            for op in items[i].ops:
                users.setdefault(op, []).append(i)
        if self._is_thin:
            self._make_thin_replays(read, users)
            return
        own = self._own_replays()
        total: Terms = [(self._clock.replays[-1], -1.0)]
        before: Events = []
        after: Events = []
        for i in read:
            seconds = sum(ops[op].seconds for op in items[i].ops if len(users[op]) == 1) * self._per_second
            total += [(self.recompute[i], seconds), (self._again[i], seconds), (own[i], self._replay_overhead)]
            before.append((items[i].read_at + 1, [(self.recompute[i], seconds), (own[i], self._replay_overhead)]))
            after += self._not_before(i, seconds)
        for op, several in users.items():
            seconds = ops[op].seconds * self._per_second
            if len(several) > 1 and seconds > 0:
                runs: Terms = [(self._make_shared(several, own), seconds)]
                total += runs
                one = max(several, key=lambda i: (items[i].candidate.num_bytes, i))
                first = max(items[i].earliest for i in several)
                after += [(first, [*runs, (self.recompute[one], -seconds)]), *self._not_before(one, seconds)]
                before += ((items[i].read_at + 1, [(own[i], seconds)]) for i in several)
        self._time_replays(total, before, after)

    def _time_replays(self, total: Terms, before: Events, after: Events) -> None:
        """Replays take no less than a total, nor than what is due before a tick or can only come after it."""
        program, clock = self.program, self._clock
        program.at_most(total, 0.0)
        done, late = clock.sums(before, 2 * self._most), clock.sums_from(after, 2 * self._most)
        for g in range(len(clock)):
            here, end = clock.replays[g], clock.replays[-1]
            program.at_most([(done[g], 1.0), (here, -1.0)], 0.0)
            program.at_most([(late[g], 1.0), (here, 1.0), (end, -1.0)], 0.0)

    def _not_before(self, i: int, seconds: float) -> Events:
        """What is not on the device at a tick is replayed there or later: that time, as it falls from tick to tick."""
        item = self._case.items[i]
        absent: list[Terms] = [[(self.recompute[i], seconds)]]
        for _, column in self.early[i]:
            if item.candidate.can_swap:  # else the share that is back is one of what is recomputed
                share = self.program.variables([1.0])[0]
                self.program.at_most([(self.recompute[i], 1.0), (column, -1.0), (share, -1.0)], 0.0)
                absent.append([(share, seconds)])
            else:
                absent.append([(self.recompute[i], seconds), (column, -seconds)])
        first = item.returns[0][0] if item.returns else item.until
        until = [first, *(following for _, following in item.returns)]
        fall = [now + scaled(then, -1.0) for now, then in itertools.pairwise([*absent, []])]
        return list(zip(until, fall, strict=True))

    def _make_thin_replays(self, read: Sequence[int], users: Mapping[int, Sequence[int]]) -> None:
        """Replays take the time of those ops that are behind no other item."""
        items, ops = self._case.items, self._case.problem.graph.ops
        total: Terms = [(self._clock.replays[-1], -1.0)]
        before: Events = []
        after: Events = []
        for i in read:
            seconds = sum(ops[op].seconds for op in items[i].ops if len(users[op]) == 1) * self._per_second
            terms = [(self.recompute[i], seconds)]
            total += terms
            before.append((items[i].read_at + 1, terms))
            after.append((items[i].earliest, terms))
        self._time_replays(total, before, after)

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
            scale=self._per_second / self._per_byte, early=early, has_buffers=not self._is_thin,
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


_MAX_HOST_ROWS = 64  # of the program that count host memory: more change no bound


class Copies:
    """Write the rows.

    Args:
        program: The program.
        case: What is relaxed.
        clock: Its time.
        swap: By item: the column of its swapped fraction.
        sizes: By item: its bytes, in the program's units.
        most: The most that bytes may add up to, in these units.
        scale: The program's unit of time over that of bytes: what turns seconds per byte into its own.
        early: By place in the grid: bytes that are back before their read, since replays need them.
        has_buffers: Whether to write rows for copies under way.

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
        has_buffers: bool,
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
        if has_buffers:
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
        for g, held in enumerate(self._held_after_death(min(out.link, out.disk) * self._scale)):
            if held:
                self._program.at_most([*held, (self.outgoing[g], -1.0)], 0.0)
        for g, held in enumerate(self._held_before_need(min(back.link, back.disk) * self._scale)):
            if held:
                self._program.at_most([*held, (self.incoming[g], -1.0), *scaled(self._early[g], -1.0)], 0.0)

    def _held_before_need(self, rate: float) -> list[Terms]:
        """By place in the grid: bytes that are back before their need at least, as swapped less absent.

        Args:
            rate: Time per byte, in the program's units.
        """
        grid: list[int] = self._clock.grid.tolist()
        held: list[Terms] = [[] for _ in grid]
        for i, item in enumerate(self._case.items):
            if not item.is_read or not item.candidate.can_swap:
                continue
            last = bisect.bisect_left(grid, item.read_at)
            for g in range(last - 1, -1, -1):
                if grid[g] < item.candidate.death:
                    break
                issue = min(self._clock.next_unpack(grid[g]), item.read_at)
                lacking = self._sizes[i] * rate - (self._clock.start(item.read_at) - self._clock.start(issue))
                if lacking <= 0:
                    break
                held[g] += self._hold(i, lacking, self._clock.spent(g, last))
        return held

    def _held_after_death(self, rate: float) -> list[Terms]:
        """The same of copies out: bytes that are not yet off the device after their death."""
        grid: list[int] = self._clock.grid.tolist()
        held: list[Terms] = [[] for _ in grid]
        for i, item in enumerate(self._case.items):
            c = item.candidate
            if not c.can_swap:
                continue
            first = bisect.bisect_left(grid, c.pack_tick) - 1
            for g in range(bisect.bisect_left(grid, c.death), bisect.bisect_left(grid, item.until)):
                lacking = self._sizes[i] * rate - (self._clock.start(grid[g]) - self._clock.start(c.pack_tick))
                if lacking <= 0:
                    break
                held[g] += self._hold(i, lacking, self._clock.spent(first, g))
        return held

    def _hold(self, i: int, lacking: float, spent: Terms) -> Terms:
        absent = self._program.variables([1.0])[0]
        self._program.at_most([(absent, lacking), *scaled(spent, -1.0)], 0.0)
        return [(self._swap[i], self._sizes[i]), (absent, -self._sizes[i])]
