"""The stream path broken on purpose, one ordering at a time, and which workloads notice: by bits, a race or an error.

`python -m tests.emulated_cuda --all` prints the table of all mutants and workloads; `test_mutants` tries each mutant on
those that are known to notice it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from lightning_offload import MemoryPlugin
from lightning_offload.runtime import staged_lanes
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.host_pool import Slab
from lightning_offload.runtime.materialize import Materializer
from lightning_offload.runtime.ranges import Ranges
from lightning_offload.runtime.stream_lanes import StreamCopy, StreamLanes
from lightning_offload.runtime.write_barrier import WriteBarrier
from tests.emulated_cuda.workloads import RUNS, same
from tests.fuzz.running import random_planner

Plain = list[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a workload runs under.

    Attributes:
        policy: Of the emulated device's schedule, which is lazy.
        seed: Of its dice.
        plan: Seed of a plan that swaps, prefetches and releases anywhere; None for the planner's own of all-swap.
        tier: Where tensors go.
        host_budget: Most host memory; None for as much as there is.
    """

    policy: str
    seed: int
    plan: int | None = None
    tier: str = "host"
    host_budget: int | None = None


COPIES_LAST = Setting(policy="copies_last", seed=1)
RANDOM = Setting(policy="random", seed=3)
PLANNED = Setting(policy="copies_last", seed=1, plan=1)
DISK = Setting(policy="random", seed=3, tier="disk")
OVERWRITTEN = Setting(policy="copies_last", seed=1, plan=7)
"""What is overwritten is swapped and not released before, and a replay reads it: by other dice no plan is like that."""

SHORT = Setting(policy="copies_last", seed=1, host_budget=12 << 20)
SETTINGS = (COPIES_LAST, RANDOM, PLANNED, OVERWRITTEN, DISK, SHORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A deliberate breakage.

    Attributes:
        name: What is wrong.
        broken: Breaks the runtime while it is open.
        noticed_by: Workloads that are known to notice it, each with the setting it needs.
    """

    name: str
    broken: Callable[[], AbstractContextManager[Any]]
    noticed_by: tuple[tuple[str, Setting], ...]


def _early_release(self: Any, lanes: Any, event: Any, owner: Any, storage: Any) -> None:
    self._lanes, self._event, self._owner, self.storage = lanes, event, owner, None


def _wait_but_owner(self: Any, event: Any, owner: Any) -> None:
    self.compute_stream().wait_event(event)


def _note_nothing(self: Any, storage: Any) -> None:
    pass


@contextlib.contextmanager
def _nothing_for_the_owner() -> Iterator[None]:
    """Neither does the stream wait that memory is of, nor does the allocator hear who uses it: one of them will do."""
    with (
        mock.patch.object(StreamLanes, "let_compute_wait", _wait_but_owner),
        mock.patch.object(StreamLanes, "note_use", _note_nothing),
    ):
        yield


@contextlib.contextmanager
def _no_mark(self: Any, stream: Any, mark: Any, num_bytes: int, direction: Any) -> Iterator[None]:
    with self.on_stream(stream):
        yield


def _swap_in_without_gate(self: Any, block: Any, storage: Any) -> Any:
    copy = self.to_device(self.mark(), storage, 0, block.num_bytes, block.address)
    block.busy = copy
    return copy


def _first_compute_stream(self: Any) -> Any:
    return torch.cuda.default_stream(self.device)


def _ready_without_recording(self: Any, value: Any, storage: Any) -> None:
    if value.is_ours:
        self.wait(value)


class _StoringFirst:
    """A mover that has a chunk stored before it copies there; stored afterwards, the device might have been faster."""

    def __init__(self, mover: Any, store: Callable[[int, int, int], None]) -> None:
        self._mover = mover
        self._store = store

    def to_host(self, mark: Any, storage: Any, begin: int, num_bytes: int, address: int) -> Any:
        self._store(begin, address, num_bytes)
        return self._mover.to_host(mark, storage, begin, num_bytes, address)


@contextlib.contextmanager
def _store_before_copy() -> Iterator[None]:
    ask = staged_lanes.Writer._ask

    def write_nothing(*_: Any) -> None:  # not a mock, which would remember, and so hold, all chunks
        pass

    def new_ask(self: Any, job: Any, begin: int, num_bytes: int) -> Any:
        mover = self._mover
        self._mover = _StoringFirst(mover, job.block.put)
        try:
            return ask(self, job, begin, num_bytes)
        finally:
            self._mover = mover

    with (
        mock.patch.object(staged_lanes.Writer, "_ask", new_ask),
        mock.patch.object(staged_lanes.Writer, "_write", write_nothing),
    ):
        yield


def _write_before_copy(before: Callable[..., bool]) -> Callable[..., bool]:
    def write(self: Any, tensor: torch.Tensor) -> bool:
        value = self._table.find(tensor.untyped_storage())
        if value is not None:
            value.copy = None
        return before(self, tensor)

    return write


def _release_before_copy(self: Any, value: Any) -> None:
    if value.block is not None and value.copy is not None and value.origin is not None:
        value.copy = value.storage = None


@contextlib.contextmanager
def _slabs_go_at_once() -> Iterator[None]:
    """Page-locked no more, that is: a copy of memory that is not mapped would end the process."""
    mappings: list[Any] = []
    finish = Slab.__del__

    def keep_mapped(self: Any) -> None:
        mappings.append(getattr(self, "_memory", None))
        finish(self)

    with mock.patch.object(Ranges, "settle"), mock.patch.object(Slab, "__del__", keep_mapped):
        yield
        torch.cuda.synchronize()


def _new_storage_on(stream_of: Callable[[Any], Any], new: Callable[..., Any]) -> Callable[..., Any]:
    def allocate(self: Any, num_bytes: int) -> Any:
        with torch.cuda.stream(stream_of(self)):
            return new(self, num_bytes)

    return allocate


def _patch(owner: Any, name: str, new: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, new)


MUTANTS = (
    Mutant(
        name="compute does not wait for copies",
        broken=_patch(StreamLanes, "let_compute_wait", lambda *_: None),
        noticed_by=(("perceptron", COPIES_LAST),),
    ),
    Mutant(
        name="copies do not wait for compute",
        broken=_patch(StreamLanes, "_on", _no_mark),
        noticed_by=(("perceptron", COPIES_LAST),),
    ),
    Mutant(
        name="memory is let go when its copy is asked for",
        broken=_patch(StreamCopy, "__init__", _early_release),
        noticed_by=(("forwards thrown away", PLANNED),),
    ),
    Mutant(
        name="values are released before compute waits",
        broken=_patch(Materializer, "release", _release_before_copy),
        noticed_by=(("peaks", COPIES_LAST),),
    ),
    Mutant(
        name="writes do not wait for copies out",
        broken=_patch(WriteBarrier, "before", _write_before_copy(WriteBarrier.before)),
        noticed_by=(("overwritten later", OVERWRITTEN),),
    ),
    Mutant(
        name="nobody hears of storages that are emptied",
        broken=_patch(StepExecutor, "resizes", lambda *_: None),
        noticed_by=(("emptied later", OVERWRITTEN),),
    ),
    Mutant(
        name="lanes do not gate used host memory",
        broken=_patch(StreamLanes, "_gate", lambda *_: None),
        noticed_by=(("two models in turns", PLANNED),),
    ),
    Mutant(
        name="host memory does not cool",
        broken=_patch(Ranges, "users", lambda *_: ()),
        noticed_by=(("two models in turns", PLANNED),),
    ),
    Mutant(
        name="slabs go while copies use them",
        broken=_slabs_go_at_once,
        noticed_by=(("large forward after a small one", SHORT),),
    ),
    Mutant(
        name="copies gate nothing",
        broken=_patch(StreamCopy, "gate", lambda *_: None),
        noticed_by=(("two models in a row", PLANNED),),
    ),
    Mutant(
        name="copies in are not gated by copies out",
        broken=_patch(StreamLanes, "swap_in", _swap_in_without_gate),
        noticed_by=(("two models in a row", PLANNED),),
    ),
    Mutant(
        name="memory of another stream is not ordered",
        broken=_nothing_for_the_owner,
        noticed_by=(("two models in a row", PLANNED),),
    ),
    Mutant(
        name="readers on other streams are not recorded",
        broken=_patch(Materializer, "make_ready", _ready_without_recording),
        noticed_by=(("two models in turns", PLANNED),),
    ),
    Mutant(
        name="the compute stream is not looked up",
        broken=_patch(StreamLanes, "compute_stream", _first_compute_stream),
        noticed_by=(("new stream each step", PLANNED),),
    ),
    Mutant(
        name="memory for copies in is the side stream's",
        broken=_patch(
            Materializer,
            "_new_storage",
            _new_storage_on(lambda self: self._tiers.lanes.in_stream, Materializer._new_storage),
        ),
        noticed_by=(("perceptron", COPIES_LAST),),
    ),
    Mutant(
        name="chunks are written to disk before they are there",
        broken=_store_before_copy,
        noticed_by=(("part of a backward", DISK),),
    ),
    Mutant(
        name="chunks are filled from disk while copies read them",
        broken=_patch(staged_lanes, "settled", lambda copy: None),
        noticed_by=(("perceptron", DISK),),
    ),
)
NAMES = tuple(mutant.name for mutant in MUTANTS)
NOTHING = "nothing is broken"


def plain(name: str) -> Plain:
    """What a workload leaves behind without the runtime."""
    import emulated_cuda

    emulated_cuda.configure("eager")
    return RUNS[name](None)


def notice(name: str, expected: Plain, setting: Setting, broken: AbstractContextManager[Any]) -> str:
    """Run a workload under the runtime, and say what was noticed; nothing if all was well."""
    import emulated_cuda

    emulated_cuda.configure("lazy", setting.policy, setting.seed)
    emulated_cuda.take_races()
    told: list[str] = []
    try:
        with broken, _planned(setting.plan), _plugin(setting) as memory:
            found = RUNS[name](memory)
            phase = memory.report().phase
        told += [] if same(expected, found) else ["other bits"]
        # Steps may leave a plan by dice, which is then made anew, or be of structures that cannot follow it.
        told += [] if phase == "planned" or setting.plan is not None else [f"phase {phase}"]
    except Exception as error:
        told.append(f"{type(error).__name__}: {str(error)[:150]}")
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
    races = emulated_cuda.take_races()
    told += [f"{len(races)} races, as: {races[0]}"] if races else []
    return " ".join("; ".join(told).split())


def _planned(seed: int | None) -> AbstractContextManager[Any]:
    if seed is None:
        return contextlib.nullcontext()
    return mock.patch("lightning_offload.planning.planner.plan", random_planner(seed))


def _plugin(setting: Setting) -> MemoryPlugin:
    return MemoryPlugin(budget=None, policy="all-swap", tier=setting.tier, host_budget=setting.host_budget)


def main() -> None:
    """Print what each workload notices of each mutant; fails where there is one of which nothing is noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutant", choices=[*NAMES, NOTHING], help="one alone, in this process")
    parser.add_argument("--workloads", default=",".join(RUNS), help="by commas")
    options = parser.parse_args()
    if options.mutant is not None:
        _try_all(options.mutant, options.workloads.split(","))
        return
    noticed = {name: _try_elsewhere(name, options.workloads) for name in (NOTHING, *NAMES)}
    for name, workloads in noticed.items():
        _say(f"{name}: {', '.join(workloads) or '-'}")
    sys.exit(any(bool(workloads) == (name == NOTHING) for name, workloads in noticed.items()))


def _try_all(name: str, workloads: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    logging.disable()
    broken = {mutant.name: mutant.broken for mutant in MUTANTS}.get(name, contextlib.nullcontext)
    for workload in workloads:
        _say(f"{workload}\t...")
        expected = plain(workload)
        told = [notice(workload, expected, setting, broken()) for setting in SETTINGS]
        _say(f"{workload}\t{' | '.join(text or '-' for text in told) if any(told) else ''}")


def _try_elsewhere(name: str, workloads: str) -> list[str]:
    """The workloads that notice a mutant, one that ends the process among them, after which the others go on."""
    noticed: dict[str, str] = {}
    left = workloads.split(",")
    while left:
        command = [sys.executable, "-m", "tests.emulated_cuda.mutants", "--mutant", name, "--workloads", ",".join(left)]
        lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.splitlines()
        told = dict(line.split("\t", 1) for line in lines if "\t" in line)
        assert told, f"{name}: no workload could be run"
        noticed |= {workload: text for workload, text in told.items() if text}
        left = left[len(told) :]
    _say("\n".join([name, *(f"  {workload}: {text}" for workload, text in noticed.items())]))
    return list(noticed)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
