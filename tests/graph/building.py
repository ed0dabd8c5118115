"""Write step graphs by hand, event by event, the way a recorder sees them."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from lightning_offload.graph import DeviceSpec, Op, Save, StepGraph, Storage, Value
from lightning_offload.graph.step_graph import Phase

DEVICE = DeviceSpec(
    name="paper",
    kind="cpu",
    memory_bytes=None,
    d2h_bytes_per_second=100.0,
    h2d_bytes_per_second=100.0,
    copy_interference=0.0,
    overhead_seconds=0.0,
)
"""One byte takes 10 ms on either link; copies cost no compute, replays and swaps no overhead."""


@dataclasses.dataclass
class _Saved:
    value: int
    pack_tick: int
    module: str
    must_keep: bool
    unpack_ticks: list[int] = dataclasses.field(default_factory=list)
    release_tick: int | None = None


class GraphBuilder:
    """Builds a step graph from events; values and saves are named by their index."""

    def __init__(self) -> None:
        self.tick = 0
        self.phase: Phase = "forward"
        self.ops: list[Op] = []
        self.storages: list[tuple[int, int]] = []
        self.deaths: dict[int, int] = {}
        self.values: list[Value] = []
        self.saves: list[_Saved] = []

    def given(self, num_bytes: int) -> int:
        """A value from before the step."""
        return self._value(self._storage(num_bytes, -1), -1)

    def op(
        self,
        inputs: tuple[int, ...] = (),
        sizes: tuple[int, ...] = (),
        *,
        writes: tuple[int, ...] = (),
        name: str = "aten.op.default",
        seconds: float = 1.0,
        replayable: bool = True,
        module: str = "",
        workspace_bytes: int = 0,
    ) -> tuple[int, ...]:
        """An op that reads values, makes storages of these sizes, and writes others; the values it makes."""
        index, tick = len(self.ops), self._next()
        fresh = tuple(self._value(self._storage(size, tick), index) for size in sizes)
        written = tuple(self._value(self.values[v].storage, index) for v in writes)
        op = Op(
            name=name, module=module, phase=self.phase, tick=tick, seconds=seconds,
            inputs=inputs, outputs=fresh + written, replayable=replayable, workspace_bytes=workspace_bytes,
        )  # fmt: skip
        self.ops.append(op)
        return fresh + written

    def make(self, num_bytes: int, *inputs: int, seconds: float = 1.0, replayable: bool = True) -> int:
        """An op that makes one value."""
        return self.op(inputs, (num_bytes,), seconds=seconds, replayable=replayable)[0]

    def pack(self, value: int, *, must_keep: bool = False, module: str = "") -> int:
        """Autograd saves a value."""
        self.saves.append(_Saved(value, self._next(), module, must_keep))
        return len(self.saves) - 1

    def drop(self, *values: int) -> None:
        """The program lets go of the storages of values."""
        for value in values:
            self.deaths[self.values[value].storage] = self.tick

    def backward(self) -> None:
        """From here on ops are those of backward."""
        self.phase = "backward"

    def unpack(self, save: int) -> None:
        """Autograd reads a saved value back."""
        self.saves[save].unpack_ticks.append(self._next())

    def release(self, *saves: int) -> None:
        """Autograd drops saved values."""
        for save in saves:
            self.saves[save].release_tick = self.tick

    def build(self, **extra: int) -> StepGraph:
        """The graph."""
        end = self.tick
        return StepGraph(
            num_ticks=end,
            ops=tuple(self.ops),
            storages=tuple(
                Storage(num_bytes=size, birth=birth, death=self.deaths.get(i, end))
                for i, (size, birth) in enumerate(self.storages)
            ),
            values=tuple(self.values),
            saves=tuple(
                Save(
                    value=s.value, pack_tick=s.pack_tick, unpack_ticks=tuple(s.unpack_ticks),
                    release_tick=end if s.release_tick is None else s.release_tick,
                    module=s.module, must_keep=s.must_keep,
                )
                for s in self.saves
            ),
            **extra,
        )  # fmt: skip

    def _next(self) -> int:
        self.tick += 1
        return self.tick - 1

    def _storage(self, num_bytes: int, birth: int) -> int:
        self.storages.append((num_bytes, birth))
        return len(self.storages) - 1

    def _value(self, storage: int, producer: int) -> int:
        self.values.append(Value(storage=storage, producer=producer))
        return len(self.values) - 1


def chain(*sizes: int, seconds: float = 1.0, gradient_bytes: int = 10, weight_bytes: int = 100) -> StepGraph:
    """A sequential net: each op reads the result before it; all are saved and read back in reverse order."""
    b = GraphBuilder()
    weight = b.given(weight_bytes)
    value, saves, previous = weight, [], -1
    for size in sizes:
        value = b.make(size, value, seconds=seconds)
        saves.append(b.pack(value))
        if previous >= 0:
            b.drop(previous)
        previous = value
    b.drop(previous)
    b.backward()
    gradient = -1
    for save in reversed(saves):
        b.unpack(save)
        new = b.make(gradient_bytes, *([gradient] if gradient >= 0 else []), seconds=seconds)
        b.release(save)
        if gradient >= 0:
            b.drop(gradient)
        gradient = new
    b.drop(gradient)
    return b.build()


@st.composite
def step_graphs(draw: st.DrawFn, *, max_saves: int = 6, max_ops: int = 9, unit: int = 10) -> StepGraph:
    """Small steps with reuse, in-place ops, multi-output ops, several saves of a value, and unread saves."""
    b = GraphBuilder()
    sizes = st.integers(1, 50).map(lambda n: unit * n)
    workspaces = st.sampled_from([0, 0, 0, unit, 20 * unit])
    live = [b.given(draw(sizes)) for _ in range(draw(st.integers(1, 2)))]
    fixed = len(live)
    saves: list[int] = []
    for _ in range(draw(st.integers(1, max_ops))):
        inputs = tuple(dict.fromkeys(draw(st.lists(st.sampled_from(live), min_size=1, max_size=2))))
        seconds = draw(st.sampled_from([0.0, 0.5, 1.0, 4.0]))
        replayable = draw(st.integers(0, 5)) > 0
        writes = tuple(v for v in inputs if v >= fixed) if draw(st.integers(0, 5)) == 0 else ()
        made = b.op(
            inputs, tuple(draw(st.lists(sizes, min_size=0 if writes else 1, max_size=2))),
            writes=writes, seconds=seconds, replayable=replayable, workspace_bytes=draw(workspaces),
        )  # fmt: skip
        live = [v for v in live if v not in writes] + list(made)
        if len(saves) < max_saves and draw(st.integers(0, 3)) > 0:
            saves.append(b.pack(draw(st.sampled_from(made)), must_keep=draw(st.integers(0, 9)) == 0))
        for v in list(live[fixed:-1]):
            if draw(st.booleans()):
                live.remove(v)
                b.drop(v)
    b.backward()
    keepers = live[fixed:]
    for save in reversed(saves):
        if draw(st.integers(0, 7)) > 0:
            b.unpack(save)
            gradient = b.make(draw(sizes), seconds=draw(st.sampled_from([0.0, 1.0])))
            b.drop(gradient)
        b.release(save)
        if keepers and draw(st.booleans()):
            b.drop(keepers.pop())
    if keepers:
        b.drop(*keepers)
    b.op((), (), seconds=0.25)
    return b.build()


def tiered_devices(unit: int = 10) -> st.SearchStrategy[DeviceSpec]:
    """Devices with and without a limit on host memory, a disk, memory of their own, and engines that copy."""
    rates = st.sampled_from([5.0 * unit, 50.0 * unit])
    limits = st.none() | st.integers(0, 60).map(lambda n: unit * n)
    disks = st.none() | st.tuples(rates, rates)

    def build(
        kind: str, limit: int | None, rate: float, disk: tuple[float, float] | None, small: int | None
    ) -> DeviceSpec:
        write, read = disk or (0.0, 0.0)
        return dataclasses.replace(
            DEVICE, kind=kind, d2h_bytes_per_second=rate, h2d_bytes_per_second=rate, copy_interference=0.25,
            overhead_seconds=0.01, host_memory_bytes=limit, disk_write_bytes_per_second=write,
            disk_read_bytes_per_second=read, handover_bytes=small, handover_seconds=0.0 if small is None else 0.02,
        )  # fmt: skip

    return st.builds(build, st.sampled_from(["cpu", "cuda"]), limits, rates, disks, limits)


@st.composite
def deep_chains(draw: st.DrawFn, *, max_ops: int = 9, unit: int = 10) -> StepGraph:
    """Steps whose ops read the result before theirs and maybe another one, all let go of before backward."""
    b = GraphBuilder()
    sizes = st.integers(1, 50).map(lambda n: unit * n)
    seconds = st.sampled_from([0.0, 0.5, 1.0, 4.0])
    source = b.given(unit)
    live: list[int] = []
    saves: list[int] = []
    for _ in range(draw(st.integers(3, max_ops))):
        inputs = [live[-1] if live else source]
        if len(live) > 1 and draw(st.booleans()):
            inputs.append(draw(st.sampled_from(live[:-1])))
        made = b.op(tuple(inputs), tuple(draw(st.lists(sizes, min_size=1, max_size=2))), seconds=draw(seconds))
        live += made
        saves += [b.pack(value) for value in made if draw(st.integers(0, 4)) > 0]
    b.drop(*live)
    b.backward()
    order = saves[::-1]
    if draw(st.booleans()):
        order = draw(st.permutations(order))
    for save in order:
        if draw(st.integers(0, 7)) > 0:
            b.unpack(save)
            b.drop(b.make(draw(sizes), seconds=draw(seconds)))
        b.release(save)
    b.op(seconds=0.25)
    return b.build()
