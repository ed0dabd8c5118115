"""What the kernels read and fill in: columns grouped by purpose; arrays for compiled loops, lists for plain ones."""

from __future__ import annotations

from typing import Any, NamedTuple


class Needs(NamedTuple):
    """What backward needs.

    Attributes:
        needed: By saved storage: first tick at which it must be back on the device; -1 for never.
        held: First tick at which nobody needs it on the device any more.
        stored: First tick at which nobody may read its copy on a tier any more.
        seconds: By unpack of a candidate: time of the ops replayed for it.
        num_calls: Their number.
        transient: Memory of those replays beyond the values that stay.
    """

    needed: Any
    held: Any
    stored: Any
    seconds: Any
    num_calls: Any
    transient: Any


class Scratch(NamedTuple):
    """Zeroed buffers.

    Attributes:
        seen: By op: the last walk that came by.
        stack: Values to look at, and complements of ops that come after them.
        calls: Ops to replay.
        readers: By value: how many of the calls have yet to read it.
        own: By value: its bytes while only a replay holds it.
        writer: By storage: the op, counted from 1, that was last to write it.
        held_through: By value: until when it is held, for what is behind it.
        stored_through: By value: until when it may be read, for what is behind it.
    """

    seen: Any
    stack: Any
    calls: Any
    readers: Any
    own: Any
    writer: Any
    held_through: Any
    stored_through: Any


class Transfers(NamedTuple):
    """When copies are made.

    Attributes:
        on_disk: By candidate: 1 if a swap of it goes to disk, 0 if to the host.
        release: Tick before which its device copy is released; -1 at its pack.
        prefetch: Ordinal of the unpack at which its copy back is issued; -1 on demand.
        given: ``on_disk`` where a schedule says it; -1 elsewhere.
    """

    on_disk: Any
    release: Any
    prefetch: Any
    given: Any


class Buckets(NamedTuple):
    """Candidates by tick, each list in the order of packs; candidates are named by their place in that order.

    Attributes:
        ticks: By place: the tick, -1 for none.
        heads: By tick: first place; -1 for none.
        nexts: By place: the next one of the same tick; -1 for none.
    """

    ticks: Any
    heads: Any
    nexts: Any


class Events(NamedTuple):
    """Swapped storages by the tick of their first need, of their release, and of the issue of their copy back."""

    needed: Buckets
    released: Buckets
    issued: Buckets


class Gaps(NamedTuple):
    """Most bytes between an unpack and the next one: ``peaks`` of the unpack plus ``extra`` of its block.

    Attributes:
        peaks: By unpack: buffer.
        tops: By block of unpacks: zeros; their maximum.
        extra: By block: zeros.
    """

    peaks: Any
    tops: Any
    extra: Any


class Room(NamedTuple):
    """Memory over time, and buffers of the passes that find room in it.

    Attributes:
        memory: By tick: zeros at first, bytes at last.
        fetched: By tick: zeros; bytes that copies back add.
        later: By tick: zeros.
        gaps: Memory between unpacks.
        heap: By candidate.
        deadlines: Infinite for both lanes.
        latest: By candidate.
    """

    memory: Any
    fetched: Any
    later: Any
    gaps: Gaps
    heap: Any
    deadlines: Any
    latest: Any


class Links(NamedTuple):
    """Figures of a device.

    Attributes:
        out_rates: Rates of copies out.
        in_rates: Rates of copies back.
        overheads: By saved storage: seconds of the overhead of a copy of it.
        replay_overhead: Seconds of a replay's.
        interference: Share of a copy that compute is slowed down by.
        host_bytes: What the host may hold.
        has_disk: Whether there is a disk behind it.
    """

    out_rates: Any
    in_rates: Any
    overheads: Any
    replay_overhead: float
    interference: float
    host_bytes: int
    has_disk: bool


class Lanes(NamedTuple):
    """Copies on the clock.

    Attributes:
        out_end: By candidate: when its copy out ends.
        in_end: By candidate: when its copy back ends; -1 at first.
        out: Zeros: from when the link and the disk are free for copies out.
        back: The same for copies back.
        busy: By tick: zeros; whether anything happens there.
    """

    out_end: Any
    in_end: Any
    out: Any
    back: Any
    busy: Any


class Copies(NamedTuple):
    """Copies back in one order, and the clock.

    Attributes:
        prefetch: By candidate: ordinal of the unpack at which its copy back is issued; -1 on demand.
        room: Memory with them.
        events: The swapped storages by tick.
        lanes: Copies on the clock.
    """

    prefetch: Any
    room: Room
    events: Events
    lanes: Lanes


class Walk(NamedTuple):
    """What the static pass reads and fills in.

    Attributes:
        codes: By saved storage: its action; those that are no candidates are kept.
        no_memo: By candidate: whether it is not kept when it is replayed on the way to another.
        needs: What backward needs.
        scratch: Buffers.
    """

    codes: Any
    no_memo: Any
    needs: Needs
    scratch: Scratch


class Tiers(NamedTuple):
    """Buffers.

    Attributes:
        swapped: By candidate: a list of those that are swapped.
        away: By candidate: for how long.
        delta: By tick: bytes that come and go.
    """

    swapped: Any
    away: Any
    delta: Any


class Columns(NamedTuple):
    """What is filled in between the static pass and the copies back; lanes are free for copies out at first."""

    starts: Any
    transfers: Transfers
    out_lanes: Any
    room: Room
    tiers: Tiers


class Resets(NamedTuple):
    """Columns that must be as they were at first for another simulation, and how that was.

    Attributes:
        whole: Of integers; one behind another in one, where they are arrays.
        whole_at_first: How they were.
        real: Of real numbers.
        real_at_first: How they were.
    """

    whole: Any
    whole_at_first: Any
    real: Any
    real_at_first: Any


class Space(NamedTuple):
    """All that a simulation fills in.

    Attributes:
        walk: Of the static pass.
        columns: Before copies back are placed.
        first: Copies back, the last need first.
        second: The same, the first need first.
        in_order: Whether the first need chooses first, for both: as a constant in a call it would have all that is
            called compiled once more.
        resets_of_walk: Of ``walk``.
        resets: Of ``columns``.
        resets_of_first: Of ``first``.
        resets_of_second: Of ``second``.
    """

    walk: Walk
    columns: Columns
    first: Copies
    second: Copies
    in_order: tuple[bool, bool]
    resets_of_walk: Resets
    resets: Resets
    resets_of_first: Resets
    resets_of_second: Resets


class Moves(NamedTuple):
    """What a search may change.

    Attributes:
        movable: The candidates that have a choice.
        can_swap: By candidate: 1 if it may be swapped, else 0.
        can_recompute: By candidate: 1 if it may be recomputed, else 0.
        alike: Places in ``movable``, those of one size behind one another.
        alike_begin: By place: where those of its size begin.
        alike_end: By place: where they end.
    """

    movable: Any
    can_swap: Any
    can_recompute: Any
    alike: Any
    alike_begin: Any
    alike_end: Any


class Seen(NamedTuple):
    """What was simulated before, as far as no other one took its slot.

    Attributes:
        marks: By candidate and state: a random number; those of all states, combined by exclusive or, are a key.
        keys: By slot: a key; -1 for none.
        costs: By slot: what was found; negative where it costs at least that much.
    """

    marks: Any
    keys: Any
    costs: Any


class Annealing(NamedTuple):
    """A search.

    Attributes:
        states: By candidate: where it is.
        best: By candidate: the best that fits.
        changed: Four numbers: a buffer.
        counts: Trials; proposals; random numbers used; the key of ``states``.
        costs: Of ``states``; of the best of all searches.
        hot_seconds: Temperature at first.
        cooling: What it is multiplied by until the end.
        max_trials: When that is.
        max_proposals: After which it ends, too.
        enough_seconds: With so good a best it ends as well.
        hopeless: With replays as slow as that multiple of the best, a choice is taken for one that never ends.
        seconds_per_byte: Penalty for memory beyond the limit.
        is_given: Whether releases and prefetches are given, which they are not; no constant, cf. ``Space.in_order``.
    """

    states: Any
    best: Any
    changed: Any
    counts: Any
    costs: Any
    hot_seconds: float
    cooling: float
    max_trials: int
    max_proposals: int
    enough_seconds: float
    hopeless: float
    seconds_per_byte: float
    is_given: bool
