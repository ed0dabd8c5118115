"""When a device runs out of memory all the same: free what can be freed, say what is known, put a step back."""

from __future__ import annotations

import gc
import traceback
import weakref
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_offload.accelerators import generators_in_use, kind_of, memory_of
from lightning_offload.plugins.data_parallel import num_ranks
from lightning_offload.plugins.lifecycle import ran_out_of_memory
from lightning_offload.units import format_budget, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lightning_offload.plugins.buffer_copies import BufferCopies
    from lightning_offload.plugins.plan_entry import PlanEntry

_T = TypeVar("_T")

_MAX_COPIED_BYTES = 64 << 20  # of buffers; a model with more of them (a large memory bank) is not repeated


class Attempt:
    """What a model was before a step: versions of its parameters and gradients, copies of its buffers.

    Batch norm writes its statistics without a new version, so buffers are put back whatever their versions say.

    Args:
        module: The model; without it nothing can be put back.
        buffers: Its buffers, each with a copy; None if they are not copied, and nothing can be put back.
    """

    def __init__(self, module: torch.nn.Module | None, buffers: Iterable[tuple[_Buffer, Tensor]] | None) -> None:
        self._is_known = module is not None and buffers is not None
        self._rng = _rng_states()
        parameters = module.parameters() if module is not None and buffers is not None else ()
        self._parameters = [_Parameter(weakref.ref(p), p._version, _state_of(p.grad)) for p in parameters]
        self._copies = [(each.places, weakref.ref(each.tensor), copy) for each, copy in buffers or ()]

    def restore(self) -> bool:
        """Put everything back as it was; False, with nothing put back, where that is not possible."""
        if not self._is_known or not all(parameter.is_untouched for parameter in self._parameters):
            return False
        with torch.no_grad():
            for places, reference, copy in self._copies:
                buffer = reference()
                if buffer is None:  # the step has put another in its place
                    buffer = copy.clone()
                else:
                    buffer.copy_(copy)
                for holder, name in places:
                    holder._buffers[name] = buffer
        for known in self._parameters:
            parameter = known.reference()
            if parameter is not None and known.gradient is None:
                parameter.grad = None
        for generator, state in self._rng:
            generator.set_state(state)
        return True


class _Buffer(NamedTuple):
    """A buffer, and where the model has it: the modules, and its names there."""

    places: list[tuple[torch.nn.Module, str]]
    tensor: Tensor


class _Parameter(NamedTuple):
    """A parameter as it was: its version, and which gradient it had, if any, at which version."""

    reference: weakref.ref[Tensor]
    version: int
    gradient: tuple[int, int] | None

    @property
    def is_untouched(self) -> bool:
        """Whether neither it nor a gradient that was there has been written."""
        parameter = self.reference()
        if parameter is None:
            return True
        is_same_gradient = self.gradient in (None, _state_of(parameter.grad))
        return parameter._version == self.version and is_same_gradient


def _state_of(gradient: Tensor | None) -> tuple[int, int] | None:
    return (gradient._cdata, gradient._version) if gradient is not None else None


def _buffers_of(module: torch.nn.Module) -> list[_Buffer]:
    found: dict[int, _Buffer] = {}
    for part in module.modules():
        for name, tensor in part._buffers.items():
            if tensor is not None:
                found.setdefault(id(tensor), _Buffer([], tensor)).places.append((part, name))
    return list(found.values())


def _rng_states() -> list[tuple[torch.Generator, Tensor]]:
    return [(generator, generator.get_state()) for generator in generators_in_use()]


def with_second_attempt(
    attempt: Callable[[], _T],
    module: torch.nn.Module | None,
    has_optimizer_run: Callable[[], bool],
    copies: BufferCopies,
) -> _T:
    """Run a step, and once more where the device ran out of memory and the model could be put back.

    Args:
        attempt: Runs the step.
        module: The model, if it is known.
        has_optimizer_run: Whether an optimizer ran inside the attempt: fused ones write without a new version.
        copies: Memory for copies of its buffers.

    Raises:
        torch.OutOfMemoryError: It ran out of memory twice, or could not be put back.
    """
    buffers = _buffers_of(module) if module is not None else []
    is_small = sum(buffer.tensor.nbytes for buffer in buffers) <= _MAX_COPIED_BYTES
    with copies.of([buffer.tensor for buffer in buffers] if is_small else ()) as copied:
        before = Attempt(module, zip(buffers, copied, strict=True) if is_small else None)
        del buffers, copied
        try:
            return attempt()
        except torch.OutOfMemoryError as error:
            message = str(error)
        if num_ranks() > 1:
            raise torch.OutOfMemoryError(
                f"{message}; the step was not repeated, the other processes do not repeat theirs"
            )
        if has_optimizer_run() or not before.restore():
            raise torch.OutOfMemoryError(f"{message}; the step was not repeated, it had updated tensors already")
        return attempt()


def out_of_memory(
    error: torch.OutOfMemoryError, device: torch.device, entry: PlanEntry, budget_bytes: int | None
) -> torch.OutOfMemoryError:
    """Free what can be freed, plan tighter, and give the error with all that is known."""
    told = _explained(error, device, entry, budget_bytes)
    ran_out_of_memory(entry)
    release_frames(error)
    gc.collect()
    memory = memory_of(device)
    if memory is not None:
        memory.give_back()
    return told


def release_frames(error: BaseException) -> None:
    """Let go of what an error keeps alive: its traceback holds the frames it went through, and they their tensors."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
    error.__traceback__ = error.__context__ = error.__cause__ = None


def _explained(
    error: torch.OutOfMemoryError, device: torch.device, entry: PlanEntry, budget_bytes: int | None
) -> torch.OutOfMemoryError:
    """The same error with the plan's figures and what to do."""
    figures = []
    if budget_bytes is not None:
        figures.append(f"budget {format_budget(budget_bytes)}")
    if entry.plan is not None:
        figures.append(f"predicted peak {format_bytes(entry.plan.predicted_peak_bytes)}")
        figures.append(f"smallest feasible budget {format_bytes(entry.plan.floor_bytes)}")
    memory = memory_of(device)
    if memory is not None:
        figures.append(f"allocated at most {format_bytes(memory.peak_bytes())}")
        figures.append(f"reserved {format_bytes(memory.reserved_bytes())}")
    what = "the next step of this shape is planned tighter" if entry.plan is not None else "there was no plan yet"
    if entry.phase == "unplanned":
        what = "steps of this shape run without a plan, the next one keeps nothing that it saves"
    advice = "; ".join(filter(None, ("lower the budget or the batch size", kind_of(device).advice)))
    return torch.OutOfMemoryError(f"{error}\nlightning-offload: {', '.join(figures) or 'no figures'}; {what}; {advice}")
