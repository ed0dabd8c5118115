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
    """

    on_disk: Any
    release: Any
    prefetch: Any


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
    """Figures of a device: rates out and back, seconds of a copy's or replay's overhead, interference of copies."""

    out_rates: Any
    in_rates: Any
    overhead: float
    interference: float


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
