"""When each saved storage must be on the device, and what is replayed for it: the static part of a simulation.

Walks the unpacks in order and does what the runtime would: what is still alive is used, swapped storages are
brought back, recomputed ones are replayed from what is at hand, and values made on the way stay for their own
unpack if they are memoised. A replayed value needs its inputs until it is replayed, so their stay is extended.
The loops are in :mod:`~.kernels.needs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_offload.graph.memory_plan import Action
from lightning_offload.planning.arrays import Buffers, Codes, StepArrays, saved_storages
from lightning_offload.planning.kernels import PLAIN, Kernels
from lightning_offload.planning.kernels.buffers import Needs, Scratch
from lightning_offload.planning.problem import Problem

Actions = Mapping[int, Action]


@dataclasses.dataclass(slots=True)
class Residency:
    """What backward needs, by storage and by tick.

    Attributes:
        needed_at: First tick at which a swapped or recomputed storage must be on the device.
        held_until: First tick at which nobody needs it any more.
        replay_seconds: Time of the replays at an unpack's tick.
        transient_bytes: Memory of those replays beyond the values that stay.
        num_replayed: Ops replayed.
    """

    needed_at: dict[int, int]
    held_until: dict[int, int]
    replay_seconds: dict[int, float]
    transient_bytes: dict[int, int]
    num_replayed: int = 0


def residency(problem: Problem, actions: Actions, no_memo: frozenset[int] = frozenset()) -> Residency:
    """Walk the step's unpacks under a choice of actions (storages without one are kept)."""
    found = find_needs(problem, problem.codes(actions), problem.flags(no_memo), PLAIN)
    assert found is not None
    needs = found[1]
    saved = saved_storages(problem)
    ticks = problem.lists.wanted_tick
    replayed = [k for k, num_calls in enumerate(needs.num_calls) if num_calls]
    return Residency(
        needed_at={saved[i]: tick for i, tick in enumerate(needs.needed) if tick >= 0},
        held_until={**problem.release, **dict(zip(saved, needs.held, strict=True))},
        replay_seconds={ticks[k]: needs.seconds[k] for k in replayed},
        transient_bytes={ticks[k]: needs.transient[k] for k in replayed},
        num_replayed=sum(needs.num_calls),
    )


def find_needs(
    problem: Problem,
    codes: Codes,
    no_memo: npt.NDArray[np.bool_] | None,
    kernels: Kernels,
    max_replay_seconds: float = float("inf"),
) -> tuple[Any, Needs] | None:
    """Run the static pass; the codes of all saved storages, and what they need, in the kernels' columns.

    Args:
        problem: The step.
        codes: By candidate: its action.
        no_memo: By candidate: whether it is not kept when it is replayed on the way to another.
        kernels: The form of the loops.
        max_replay_seconds: Give up, with None, where replays take longer.
    """
    new, step = Buffers(kernels.is_compiled), problem.columns(kernels.is_compiled)
    num_saved, num_wanted = len(step.size), len(step.wanted)
    padded = np.zeros(num_saved, dtype=np.int8)
    padded[: len(codes)] = codes
    columns = new.copy(padded), new.copy(np.zeros(len(codes), dtype=np.bool_) if no_memo is None else no_memo)
    needs = Needs(
        needed=new.whole(num_saved, -1),
        held=new.copy(step.release),
        stored=new.copy(step.dropped),
        seconds=new.real(num_wanted),
        num_calls=new.whole(num_wanted),
        transient=new.whole(num_wanted),
    )
    is_done = kernels.find_needs(step, *columns, needs, _scratch(problem, step, new), max_replay_seconds)
    return (columns[0], needs) if is_done else None


def _scratch(problem: Problem, step: StepArrays, new: Buffers) -> Scratch:
    num_values, num_ops = len(step.saved), len(step.op_seconds)
    return Scratch(
        seen=new.whole(num_ops),
        stack=new.whole(len(step.inputs) + num_ops + 1),
        calls=new.whole(num_ops),
        readers=new.whole(num_values),
        own=new.whole(num_values),
        writer=new.whole(len(problem.graph.storages)),
        held_through=new.whole(num_values),
        stored_through=new.whole(num_values),
    )
