"""A memory plan turned into tables that the executor looks up by op and by unpack, without searching.

For every value that the plan recomputes, the program lists the ops whose calls must be recorded: its producer,
and in turn the producers of what that reads, down to values that will be at hand (kept, swapped, or persistent).

A step whose plan recomputes nothing, and releases device copies at packs and unpacks alone, needs no op to be seen:
which storage a pack is about follows from its ordinal.

:mod:`.follow` finds the place of each op, pack and unpack in it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from lightning_offload.errors import PlanError
from lightning_offload.graph.hook_points import HookPoint, hooks_before_ops
from lightning_offload.graph.host_layout import Layout, plan_layout
from lightning_offload.graph.memory_plan import AT_PACK, ON_DEMAND, Decision, MemoryPlan
from lightning_offload.graph.step_graph import StepGraph, by_structure, last_values
from lightning_offload.runtime.routes import FormRoute, SizeRoute
from lightning_offload.runtime.tiers import Place
from lightning_offload.tensors.saved_forms import SavedForm

BUSY, RECORD = 1, 2
"""Flags of an op: there is something to do around it; its call is recorded."""

KEPT, KEPT_FOR_CALLS = 1, 2
"""Values of :attr:`Program.noop_packs`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A plan compiled for the executor: what to do at each op, pack and unpack of the step.

    Columns by *place*, of ops, packs and unpacks each: plain tuples, bytes, and dicts where few places have an entry.

    Attributes:
        plan: The plan.
        op_names: The ops that are expected, in order; those of backward only where one of them asks for something.
        op_flags: By op: :data:`BUSY`, :data:`RECORD`.
        op_bytes: By busy op: sizes of the storages that it makes values on.
        op_register: By op: results to follow: (position, storage index).
        op_release: By op: storages whose device copies are released before it.
        is_strict: Whether backward's ops are among them. They are left out where they can be, since backward
            runs other ops when gradients accumulate.
        decisions: By storage index.
        layout: Where swapped storages lie in their tiers.
        places: The same by storage index.
        prefetch: By ordinal of an unpack: the storages whose copies back are issued then.
        pack_bytes: Bytes of the storage behind each pack, to recognise a step of another structure; 0 where that is on
            another device.
        is_bound: Whether sizes are the largest that the plan is for; smaller ones follow it, too.
        num_first_packs: Packs before the first unpack.
        num_first_ops: Ops of forward before it.
        first_packs: By pack: the first one of the same storage.
        made_packs: Ordinals of the packs whose storages the step made.
        pack_storages: By pack: the storage that leaves the device by it, the first that saves it; or -1.
        release_at_pack: By pack: storages whose device copies are released after it, where ops are not seen.
        release_at_unpack: By ordinal of an unpack: those released before it brings anything back. Where ops are seen
            those of forward are released at their ops, too; those of backward, which is seen for nothing else, are not.
        is_keep_all: Whether the plan keeps everything, so that the step needs no dispatch mode.
        needs_ops: Whether ops must be seen.
        recomputed: The storages that are recomputed.
        records_backward: Whether anything is that backward made, for a backward of its own.
        form_route: What steps of other structures follow it by; None where only those of its own do.
        size_route: What steps follow it by, if it was made elsewhere; None where it was made for a step seen here.
        num_objects: About how many Python objects a step makes under it that live until backward.
        noop_packs: By pack: 0, or where there is nothing to do but to keep what is saved KEPT, and KEPT_FOR_CALLS where
            calls that may be replayed read it; empty where sizes are bounds, or where packs are not known by ordinals.
        busy_unpacks: Ordinals of the unpacks at which something is released or fetched.
        compiled: What the native core made of it, by whether ops are seen.
    """

    plan: MemoryPlan
    op_names: tuple[str, ...]
    op_flags: bytes
    op_bytes: dict[int, tuple[int, ...]]
    op_register: dict[int, tuple[tuple[int, int], ...]]
    op_release: dict[int, tuple[int, ...]]
    is_strict: bool
    decisions: dict[int, Decision]
    layout: Layout
    places: dict[int, Place]
    prefetch: dict[int, tuple[int, ...]]
    pack_bytes: tuple[int, ...]
    is_bound: bool
    num_first_packs: int
    num_first_ops: int
    first_packs: tuple[int, ...]
    made_packs: frozenset[int]
    pack_storages: tuple[int, ...]
    release_at_pack: dict[int, tuple[int, ...]]
    release_at_unpack: dict[int, tuple[int, ...]]
    is_keep_all: bool
    needs_ops: bool
    recomputed: frozenset[int]
    records_backward: bool
    form_route: FormRoute | None = None
    size_route: SizeRoute | None = None
    num_objects: int = 0
    noop_packs: bytes = b""
    busy_unpacks: frozenset[int] = frozenset()
    compiled: dict[bool, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def is_recomputing(self) -> bool:
        """Whether anything is recomputed."""
        return bool(self.recomputed)

    def minds_writes(self, *, sees_ops: bool) -> bool:
        """Whether writes in other steps matter: a call may be replayed, or a copy is not what its storage will hold.

        Args:
            sees_ops: Whether the step's ops are seen. Where they are not, it hears of what may be written unseen.
        """
        return self.is_recomputing or (sees_ops and not self.is_keep_all)


class _Skeleton(NamedTuple):
    """What programs for one structure have in common.

    Attributes:
        last: By storage: the last value that it holds; earlier ones are not followed.
        saved: By pack: the storage behind it.
        saved_values: The values behind packs, but for those that a later one on their storage follows.
        names: The ops.
        forward_names: Those that do not run in backward.
        forward_places: By op: its place among those.
        made_packs: Ordinals of the packs whose storages the step made.
        in_backward: By op: whether it runs in backward.
        num_first_packs: Packs before the first unpack.
        num_first_ops: Ops of forward before it.
        first_packs: By pack: the first one of the same storage.
    """

    last: dict[int, int]
    saved: tuple[int, ...]
    saved_values: frozenset[int]
    names: tuple[str, ...]
    forward_names: tuple[str, ...]
    forward_places: tuple[int, ...]
    made_packs: frozenset[int]
    in_backward: tuple[bool, ...]
    num_first_packs: int
    num_first_ops: int
    first_packs: tuple[int, ...]


@by_structure
def _skeleton(graph: StepGraph) -> _Skeleton:
    saved = tuple(graph.values[save.value].storage for save in graph.saves)
    first: dict[int, int] = {}
    first_unpack = min((tick for save in graph.saves for tick in save.unpack_ticks), default=graph.num_ticks)
    last = last_values(graph)
    return _Skeleton(
        last=last,
        saved=saved,
        saved_values=frozenset(v for v in (save.value for save in graph.saves) if last[graph.values[v].storage] == v),
        names=tuple(op.name for op in graph.ops),
        forward_names=tuple(op.name for op in graph.ops if op.phase != "backward"),
        forward_places=tuple(itertools.accumulate((op.phase != "backward" for op in graph.ops), initial=0)),
        made_packs=frozenset(i for i, s in enumerate(saved) if not graph.storages[s].is_persistent),
        in_backward=tuple(op.phase == "backward" for op in graph.ops),
        num_first_packs=sum(save.pack_tick < first_unpack for save in graph.saves),
        num_first_ops=sum(op.tick < first_unpack and op.phase == "forward" for op in graph.ops),
        first_packs=tuple(first.setdefault(s, i) for i, s in enumerate(saved)),
    )


def compile_plan(
    graph: StepGraph,
    plan: MemoryPlan,
    *,
    is_bound: bool = False,
    forms: Sequence[SavedForm] | None = None,
    is_imported: bool = False,
) -> Program:
    """Compile a plan for a graph.

    Args:
        graph: The step.
        plan: What to do.
        is_bound: Whether the plan serves steps whose tensors are smaller, too.
        forms: By pack: what is saved, for a plan that serves steps of other structures, too; None for one that does
            not. Such a plan recomputes nothing, and releases device copies at packs and unpacks alone.
        is_imported: Whether the step was captured elsewhere, so that what the plan has nothing to do for may differ.

    Raises:
        PlanError: The plan is for another graph, recomputes what cannot be, or is none that other structures follow.
    """
    plan.check(graph)
    decisions = {d.storage: d for d in plan.decisions if d.action != "keep"}
    skeleton = _skeleton(graph)
    followed, recorded = _follow(graph, decisions)
    register = {
        i: tuple(
            (position, graph.values[v].storage) for position, v in enumerate(graph.ops[i].outputs) if v in followed
        )
        for i in {graph.values[v].producer for v in followed} - {-1}
    }
    prefetch: dict[int, list[int]] = {}
    in_backward = skeleton.in_backward
    releases = _releases_at_hooks(graph, decisions)
    releases_at_ops = [d for d in decisions.values() if d.action == "swap" and AT_PACK < d.release_op < len(graph.ops)]
    has_others = len(releases_at_ops) > sum(map(len, releases.values()))
    for decision in decisions.values():
        if decision.action == "swap" and decision.prefetch_unpack != ON_DEMAND:
            prefetch.setdefault(decision.prefetch_unpack, []).append(decision.storage)
    release_at_pack = {hook.ordinal: s for hook, s in releases.items() if hook.is_pack}
    release_at_unpack = {hook.ordinal: s for hook, s in releases.items() if not hook.is_pack}
    at_unpacks = {s for storages in release_at_unpack.values() for s in storages}
    release: dict[int, tuple[int, ...]] = {}
    for decision in releases_at_ops:
        if not (in_backward[decision.release_op] and decision.storage in at_unpacks):
            release[decision.release_op] = (*release.get(decision.release_op, ()), decision.storage)
    busy = {*recorded, *register, *release}
    recomputed = frozenset(s for s, d in decisions.items() if d.action == "recompute")
    layout = plan_layout(graph, plan)
    is_strict = any(in_backward[i] for i in busy)
    names = skeleton.names if is_strict else skeleton.forward_names
    places: Sequence[int] = range(len(names)) if is_strict else skeleton.forward_places
    flags = bytearray(len(names))
    for i in busy:
        flags[places[i]] = BUSY | RECORD if i in recorded else BUSY
    records_backward = any(in_backward[i] for i in recorded)
    followed_storages = {graph.values[v].storage for v in followed}
    is_own = not (is_bound or is_imported or records_backward or forms is not None)
    if forms is not None and (recomputed or has_others):
        raise PlanError("steps of other structures can follow a plan only where it needs no op to be seen")
    return Program(
        plan=plan,
        op_names=names,
        op_flags=bytes(flags),
        op_bytes={
            places[i]: tuple([graph.storages[graph.values[v].storage].num_bytes for v in graph.ops[i].outputs])
            for i in busy
        },
        op_register={places[i]: results for i, results in register.items()},
        op_release={places[i]: storages for i, storages in release.items()},
        is_strict=is_strict,
        decisions=decisions,
        layout=layout,
        places={
            s: Place(tier=d.tier, offset=layout.offsets.get(s)) for s, d in decisions.items() if d.action == "swap"
        },
        prefetch={ordinal: tuple(storages) for ordinal, storages in prefetch.items()},
        pack_bytes=tuple([graph.storages[s].num_bytes for s in skeleton.saved]),
        is_bound=is_bound,
        num_first_packs=skeleton.num_first_packs,
        num_first_ops=skeleton.num_first_ops,
        first_packs=skeleton.first_packs,
        made_packs=skeleton.made_packs,
        pack_storages=_leaving(graph, decisions),
        release_at_pack=release_at_pack,
        release_at_unpack=release_at_unpack,
        is_keep_all=not decisions,
        needs_ops=bool(recomputed) or has_others,
        recomputed=recomputed,
        records_backward=records_backward,
        form_route=FormRoute.of(graph, decisions, forms, release_at_pack) if forms is not None else None,
        size_route=SizeRoute.of(graph, decisions) if is_imported else None,
        num_objects=_num_objects(len(skeleton.saved), len(decisions), len(recorded)),
        noop_packs=_noop_packs(skeleton.saved, decisions, followed_storages, release_at_pack) if is_own else b"",
        busy_unpacks=frozenset({*prefetch, *release_at_unpack}),
    )


def _noop_packs(
    saved: Sequence[int], decisions: Container[int], followed: Container[int], releases: Container[int]
) -> bytes:
    """What :attr:`Program.noop_packs` says."""
    noop = bytearray(len(saved))
    for i, storage in enumerate(saved):
        if storage not in decisions and i not in releases:
            noop[i] = KEPT_FOR_CALLS if storage in followed else KEPT
    return bytes(noop)


def _num_objects(num_packs: int, num_leaving: int, num_recorded: int) -> int:
    """About how many objects a step holds: a handle and a tensor by pack, and what is known of values and of calls."""
    return 3 * num_packs + 8 * num_leaving + 20 * num_recorded


def _follow(graph: StepGraph, decisions: dict[int, Decision]) -> tuple[set[int], set[int]]:
    """The values that the executor must know by identity, and the ops to record."""
    skeleton = _skeleton(graph)
    last, saved_values = skeleton.last, skeleton.saved_values
    followed = {v for v in saved_values if graph.values[v].storage in decisions}
    stack = [v for v in followed if decisions[graph.values[v].storage].action == "recompute"]
    seen, recorded = set(stack), set[int]()
    while stack:
        made = stack.pop()
        producer = graph.values[made].producer
        if producer < 0 or not graph.ops[producer].replayable or made in graph.ops[producer].unreplayed:
            name = graph.ops[producer].name if producer >= 0 else "nothing"
            raise PlanError(f"the plan recomputes a result of {name}, which cannot be replayed")
        recorded.add(producer)
        for v in graph.ops[producer].inputs:
            storage = graph.values[v].storage
            if v in seen or (graph.storages[storage].is_persistent and last[storage] == v):
                continue
            seen.add(v)
            followed.add(v)
            decision = decisions.get(storage)
            at_hand = v in saved_values and (decision is None or decision.action != "recompute")
            if not at_hand and graph.values[v].producer >= 0:
                stack.append(v)
    return followed, recorded


def _leaving(graph: StepGraph, decisions: dict[int, Decision]) -> tuple[int, ...]:
    skeleton = _skeleton(graph)
    last, seen, leaving = skeleton.last, set[int](), []
    for save, storage in zip(graph.saves, skeleton.saved, strict=True):
        leaves = storage in decisions and last[storage] == save.value and storage not in seen
        seen.add(storage)
        leaving.append(storage if leaves else -1)
    return tuple(leaving)


def _releases_at_hooks(graph: StepGraph, decisions: dict[int, Decision]) -> dict[HookPoint, tuple[int, ...]]:
    """The releases by the pack or unpack that comes just before their op; not those before which none comes."""
    hooks = hooks_before_ops(graph)
    found: dict[HookPoint, list[int]] = {}
    for decision in decisions.values():
        if decision.action == "swap" and AT_PACK < decision.release_op < len(hooks):
            hook = hooks[decision.release_op]
            if hook is not None:
                found.setdefault(hook, []).append(decision.storage)
    return {hook: tuple(storages) for hook, storages in found.items()}
