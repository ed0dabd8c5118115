"""What an error tells of a budget that no plan meets: which step it is, and what is on the device beside it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor

from lightning_offload.capture.live import live_tensors
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.plugins.persistent import PersistentState
from lightning_offload.plugins.shape_families import StepShape
from lightning_offload.tensors.op_facts import is_plain, tensors_in
from lightning_offload.units import format_bytes

_NUM_SHOWN = 3  # of the largest storages, in a message
_LITTLE = 0.02  # of the budget: what is beside the step is not told of


def with_reasons(error: BudgetInfeasibleError, *reasons: str, growth_bytes: int = 0) -> BudgetInfeasibleError:
    """The error, with more to tell.

    Args:
        error: The error.
        reasons: What to tell; those that are empty are left out.
        growth_bytes: By how much an optimizer's state is yet to grow: the budget that is named is one that lasts.
    """
    if not (growth_bytes or any(reasons)):
        return error
    told, floor_bytes = str(error), error.floor_bytes + growth_bytes
    if growth_bytes:
        now, lasting = (f"{format_bytes(n)} ({n} bytes)" for n in (error.floor_bytes, floor_bytes))
        growth = (
            f"{format_bytes(growth_bytes)} of that are for the history of L-BFGS, which is yet to grow: a shorter one "
            "needs less (history_size=)"
        )
        told, reasons = told.replace(now, lasting, 1), (growth, *reasons)
    return BudgetInfeasibleError(
        "; ".join(filter(None, (told, *reasons))), budget_bytes=error.budget_bytes, floor_bytes=floor_bytes, op=error.op
    )


def shapes_of(shape: StepShape) -> str:
    """What the step is given, for an error's end."""
    shapes = ", ".join(map(str, shape.shapes))
    return f"this step is given tensors of the shapes {shapes}" if shapes else ""


def baseline_parts(
    num_bytes: int,
    budget_bytes: int,
    state: PersistentState,
    device: torch.device,
    external: Collection[int],
    num_waiting: int = 0,
) -> str:
    """What is on the device and no part of the step, for an error's end.

    Args:
        num_bytes: How much it is.
        budget_bytes: The budget.
        state: The state of the training.
        device: The device.
        external: Identities of storages that the step has to do with.
        num_waiting: How many earlier steps have saved what no backward has come for yet.
    """
    if num_bytes <= _LITTLE * budget_bytes:
        return ""
    parts = []
    optimizers = _bytes_of(tensors_in(state.optimizer_states()), device, external)
    if optimizers:
        parts.append(f"{format_bytes(optimizers)} are optimizer state")
    if num_waiting:
        parts.append(
            f"what {num_waiting} earlier forward{'s' * (num_waiting > 1)} saved is among them, for which no backward "
            "has come yet: where several forwards belong to one backward, put `with memory.step(batch):` around all "
            "of them and the backward"
        )
    own = state.identities() | state.gradients().keys() | set(external)
    others = {key: tensor for key, tensor in _others(device) if key not in own}
    if others:
        total = sum(tensor.untyped_storage().nbytes() for tensor in others.values())
        largest = Counter({_described(tensor): 0 for tensor in others.values()})
        for tensor in others.values():
            largest[_described(tensor)] += tensor.untyped_storage().nbytes()
        shown = ", ".join(f"{name} ({format_bytes(n)})" for name, n in largest.most_common(_NUM_SHOWN) if n)
        parts.append(
            f"{format_bytes(total)} are other tensors (an earlier training, a data set, outputs that are kept?), most "
            f"of it {shown}"
        )
    told = f"{format_bytes(num_bytes)} of what it needs are on the device beside the step"
    return told + (": " + "; ".join(parts) if parts else "")


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")


def _bytes_of(tensors: Iterable[Tensor], device: torch.device, but: Collection[int]) -> int:
    plain = (tensor for tensor in tensors if tensor.device == device and is_plain(tensor))
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in plain}
    return sum(n for key, n in sizes.items() if key not in but)


def _others(device: torch.device) -> Iterator[tuple[int, Tensor]]:
    for tensor in live_tensors(device):
        with contextlib.suppress(Exception):  # one that refuses to tell is not told of
            yield tensor.untyped_storage()._cdata, tensor
