"""Executes a planned step in the native core: its ops, packs and unpacks run in C++, which holds the step's state.

What the core does not foresee it asks for here, by the methods of *upward*; they work on the same values and handles
by the same attributes, so what is rare is written once: :class:`StepExecutor`, :mod:`.fallback`, :mod:`.materialize`
and :mod:`.write_barrier`. Ops are seen by a dispatch key below autograd, not by a mode, so no formula of autograd
computes otherwise than plainly.

In Python remain steps that are observed or verified, those under plans from elsewhere, those under plans of other
structures whose ops are seen, and those whose plan asks for something among backward's ops.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_offload.errors import ReplayError, UnsupportedError
from lightning_offload.graph.memory_plan import AT_PACK
from lightning_offload.runtime.environment import Environment
from lightning_offload.runtime.executor import NOT_THERE_FOR_GRAPH, StepExecutor
from lightning_offload.runtime.follow import ByForm
from lightning_offload.runtime.hooks import DisableTorchFunction, bypass_mode, dynamo_disabled
from lightning_offload.runtime.lanes import Block
from lightning_offload.runtime.ledger import Ledger
from lightning_offload.runtime.program import Program
from lightning_offload.runtime.sight import core_on
from lightning_offload.runtime.tiers import Tiers
from lightning_offload.runtime.values import Handle, LiveValue, ValueTable, raise_modified
from lightning_offload.tensors import compiled_code, modes
from lightning_offload.tensors.op_facts import as_saved

_MADE, _EXTERNAL = 1, 2  # flags of packs
_SWAP, _RECOMPUTE, _MEMO, _RELEASED_AT_PACK = 1, 2, 4, 8  # actions of storages

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _upward(method: _Method) -> _Method:
    """Mark what the core calls: the runtime's own ops within are nobody's business."""

    @functools.wraps(method)
    def unseen(*args: Any) -> Any:
        bypass_mode.depth += 1
        try:
            with DisableTorchFunction():
                return method(*args)
        finally:
            bypass_mode.depth -= 1

    return cast("_Method", dynamo_disabled(unseen))


class NativeExecutor(StepExecutor):
    """The state of one step that runs in the core.

    Args:
        core: The core.
        device: Where the step runs.
        tiers: Where its tensors may go.
        program: What to do.
        sees_ops: Whether the step's ops are seen; they must be unless the program says otherwise.
        persistent: Gives the identities of storages that outlive the step.
    """

    def __init__(
        self,
        core: ModuleType,
        *,
        device: torch.device,
        tiers: Tiers,
        program: Program,
        sees_ops: bool,
        persistent: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        self._core, self._tiers = core, tiers
        super().__init__(
            device=device, tiers=tiers, program=program, observer=None, verifier=None, sees_ops=sees_ops,
            persistent=persistent,
        )  # fmt: skip

    @override
    def _num_objects(self, program: Program) -> int:
        return 0

    @override
    def _new_table(self) -> ValueTable:
        assert self.program is not None
        compiled = _compiled(self._core, self.program, sees_ops=self.sees_ops)
        capturing = self._is_capturing if self._can_capture else None
        lanes = self._tiers.in_core(self._core)
        self._step = self._core.Step(compiled, str(self._device), self, self._lease, capturing, lanes)
        return cast("ValueTable", self._step)

    @override
    def _new_ledger(self) -> Ledger:
        return cast("Ledger", self._step)

    @override
    def _new_lock(self) -> contextlib.AbstractContextManager[Any]:
        return _Lock(self._core)

    @override
    def _maker(self) -> Callable[[LiveValue], torch.UntypedStorage]:
        make: Callable[[LiveValue], torch.UntypedStorage] = self._step.replay
        return make

    @property
    @override
    def num_packs(self) -> int:
        return cast("int", self._step.num_packs)

    @property
    @override
    def num_unpacks(self) -> int:
        return cast("int", self._step.num_unpacks)

    @property
    @override
    def took_data(self) -> bool:
        return bool(self._fallback.took_data or self._step.took_data)

    @property
    @override
    def replay_seconds(self) -> float:
        return float(self._materializer.replay_seconds + self._step.replay_seconds)

    # ---- what runs in the core

    @override
    @dynamo_disabled
    def pack(self, tensor: Tensor) -> Handle | Tensor:
        if compiled_code.is_being_traced():
            return tensor.detach()
        handle: Handle = self._step.pack(tensor)
        return handle

    @override
    @dynamo_disabled
    def unpack(self, packed: Any) -> Tensor:
        tensor: Tensor = packed if isinstance(packed, Tensor) else self._step.unpack(packed)
        return tensor

    @override
    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Those of Python, which the core stands in for: they are called where another thread saves."""
        self._step.hook(self)
        try:
            with super().hooks():
                yield
        finally:
            self._step.unhook()

    @override
    @contextlib.contextmanager
    def seeing(self) -> Iterator[None]:
        self._step.enter()
        try:
            yield
        finally:
            self._step.leave()

    # ---- what does not

    @override
    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.dispatch_writes(func, args, kwargs)

    @override
    def _track(self, tensor: Tensor) -> None:
        self._step.track(tensor)

    @override
    def data_escapes(self, storage: torch.UntypedStorage, tensor: Tensor | None) -> None:
        with self._lock, self.unseen():
            super().data_escapes(storage, tensor)

    @override
    def _know(self, tensor: Tensor) -> None:
        self._step.know(tensor)

    @override
    def resizes(self, storage: torch.UntypedStorage) -> None:
        with self._lock, self.unseen():
            super().resizes(storage)

    @override
    def materialize_readers_of(self, tensors: list[Tensor]) -> None:
        with self._lock, self.unseen(), bypass_mode, DisableTorchFunction():
            super().materialize_readers_of(tensors)

    @override
    def backward_begins(self) -> None:
        with self.unseen():
            super().backward_begins()

    @override
    def backward_ends(self) -> None:
        self._step.backward_ends()

    @override
    def _check_forward(self) -> None:
        if isinstance(self._follower, ByForm):
            self._follower.place = self._step.route_place
        elif self._follower is not None:
            self._follower.go_to(self._step.place)
        super()._check_forward()

    @override
    def reopen(self) -> bool:
        is_going_on = super().reopen()
        if self._lease is not None:
            self._step.go_on(self._lease)
        return is_going_on

    @override
    def close(self) -> None:
        with self.unseen():
            super().close()
            self._step.end()

    # ---- upward

    @override
    @_upward
    def deviate(self, how: str) -> None:
        self._step.has_deviated = True
        self._fallback.keep_for_now(self._step.take_kept())
        super().deviate(how)

    @_upward
    def _leave_at_op(self, name: str, place: int) -> None:
        assert self._follower is not None
        self._follower.go_to(place)
        self.deviate(self._follower.refuse(name))

    @dynamo_disabled
    def _allocate(self, index: int, num_bytes: int) -> tuple[Block, int] | None:
        assert self.program is not None
        block = self._tiers.allocate(num_bytes, self.program.places.get(index))
        return (block, self._tiers.address_of(block)) if block is not None else None

    @_upward
    def _start_out(self, value: LiveValue, storage: torch.UntypedStorage, block: Block) -> None:
        self._materializer.start_out(value, storage, block)

    @_upward
    def _release(self, value: LiveValue) -> None:
        self._materializer.release(value)

    @_upward
    def _fetch(self, value: LiveValue) -> None:
        self._materializer.fetch(value)

    @_upward
    def _first_unpack(self) -> None:
        self._has_read = True
        self._tell_of_backward()  # the core closes its table in the same call

    @_upward
    def _bring_back_at(self, first: int, last: int, value: LiveValue | None) -> None:
        self._bring_back(range(first, last), value)

    @_upward
    def _save_by_rule(self, handle: Handle, is_plain: bool) -> tuple[int, int, int, bool]:
        assert self.superset is not None
        assert isinstance(self._follower, ByForm)
        assert handle.kept is not None
        follower = self._follower
        follower.place = self._step.route_place
        place = self.superset.save(handle, handle.kept, is_plain=is_plain, num_unpacks=self.num_unpacks)
        return place, follower.place, follower.end, follower.num_unmatched > 0

    @_upward
    def _late_ones_leave(self) -> None:
        assert self.superset is not None
        assert isinstance(self._follower, ByForm)
        self._follower.place = self._step.route_place
        self.superset.let_late_ones_go()

    @_upward
    def _outliving(self) -> Collection[int]:
        return self._fallback.outliving()

    @_upward
    def _swap_out(self, value: LiveValue, storage: torch.UntypedStorage) -> bool:
        return self._fallback.leave(value, storage)

    @_upward
    def _leave_late(self, handle: Handle, tensor: Tensor) -> None:
        self._fallback.leave_late(handle, tensor)

    @_upward
    def _strangely_saved(self, tensor: Tensor) -> Tensor:
        return as_saved(tensor)[0]

    @_upward
    def _before_write(self, tensor: Tensor) -> bool:
        return self._writes.before_anywhere(tensor)

    @_upward
    def _materialize(self, value: LiveValue) -> torch.UntypedStorage:
        return self._materializer.materialize(value)

    @_upward
    def _await(self, value: LiveValue, storage: torch.UntypedStorage) -> None:
        self._materializer.make_ready(value, storage)

    @_upward
    def _dismiss_visitors(self) -> None:
        self._materializer.dismiss_visitors()

    @_upward
    def _environment_now(self) -> Environment:
        return self._tracker.environment()

    def _take_modes_off(self) -> list[TorchDispatchMode]:
        return modes.take_off()

    def _put_modes_back(self, stack: list[TorchDispatchMode]) -> None:
        modes.put_back(stack)

    @_upward
    def _modified(self, tensor: Tensor, size: tuple[int, ...], now: int, version: int) -> None:
        raise_modified(tensor, size, version, now)

    def _not_there_for_graph(self) -> None:
        raise UnsupportedError(NOT_THERE_FOR_GRAPH)

    def _replay_failed(self, name: str, why: str, did_run: bool) -> None:
        raise ReplayError(f"{name} could not be run again: {why}" if did_run else f"{name} {why}".strip())


class _Lock:
    """The core's mutex: whoever waits for it lets others have the GIL."""

    def __init__(self, core: ModuleType) -> None:
        self._core = core

    def __enter__(self) -> None:
        self._core.take_lock()

    def __exit__(self, *exc: object) -> None:
        self._core.give_lock_back()


def _compiled(core: ModuleType, program: Program, *, sees_ops: bool) -> Any:
    """What the core reads of a program."""
    found = program.compiled.get(sees_ops)
    if found is None:
        num_packs = len(program.pack_bytes)
        route = program.form_route
        found = program.compiled[sees_ops] = core.Program(
            op_names=program.op_names,
            op_flags=program.op_flags,
            op_bytes=program.op_bytes,
            op_registers={place: [n for pair in pairs for n in pair] for place, pairs in program.op_register.items()},
            op_releases=program.op_release,
            pack_bytes=program.pack_bytes,
            pack_storages=program.pack_storages if route is None else route.storages,
            first_packs=program.first_packs,
            pack_flags=bytes(
                _MADE if place in program.made_packs else _EXTERNAL if route is not None else 0
                for place in range(num_packs)
            ),
            pack_releases=program.release_at_pack,
            unpack_releases=program.release_at_unpack,
            fetches=program.prefetch,
            is_routed=route is not None,
            forms=route.forms if route is not None else (),
            kept_bytes=route.kept_bytes if route is not None else (),
            unpacks=route.unpacks if route is not None else (),
            first_border=route.borders[0] if route is not None and route.borders else num_packs,
            busy_unpacks=bytes(n in program.busy_unpacks for n in range(max(program.busy_unpacks, default=-1) + 1)),
            actions=bytes(map(functools.partial(_action, program), range(max(program.decisions, default=-1) + 1))),
            is_bound=program.is_bound,
            is_recomputing=program.is_recomputing,
            minds_writes=program.minds_writes(sees_ops=sees_ops),
            sees_ops=sees_ops,
        )
    return found


def _action(program: Program, storage: int) -> int:
    decision = program.decisions.get(storage)
    if decision is None or decision.action == "keep":
        return 0
    if decision.action == "swap":
        return _SWAP | (_RELEASED_AT_PACK if decision.release_op == AT_PACK else 0)
    return _RECOMPUTE | (_MEMO if decision.memo else 0)


def core_for(program: Program, device: torch.device, *, sees_ops: bool = False) -> ModuleType | None:
    """The core, if a step under a program that nobody observes can run in it.

    Args:
        program: The program.
        device: Where the step runs.
        sees_ops: Whether its ops are seen though the program does not ask for that.
    """
    if program.is_strict or program.size_route is not None or (program.form_route is not None and sees_ops):
        return None
    if not all(name.count(".") > 1 for name in set(program.op_names)):  # operators of higher order run in Python
        return None
    return core_on(device)
