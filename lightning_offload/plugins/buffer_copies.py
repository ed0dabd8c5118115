"""What a model's buffers were before a step, in memory that steps hand on to each other.

A few calls copy all of them, where a copy of each would be a kernel of its own. The memory stays from step to step, on
the device of the buffers, so it is part of what is there beside the steps.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_offload.accelerators import kind_of
from lightning_offload.tensors.op_facts import is_plain

_COPIED_AT_ONCE = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
})  # fmt: skip


class BufferCopies:
    """Memory for copies of buffers.

    Attributes:
        num_bytes: How much it keeps.
        version: Grows when that changes.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.version = 0
        self._kept: dict[Hashable, list[Tensor]] = {}
        self._is_lent = False

    def __iter__(self) -> Iterator[Tensor]:
        """The tensors that it keeps."""
        return itertools.chain.from_iterable(list(self._kept.values()))

    @contextlib.contextmanager
    def of(self, buffers: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """A copy of each buffer, which stays as it is inside; within another such block the memory is new."""
        if self._is_lent:
            copied = BufferCopies()._copied(buffers)
            del buffers  # the model may let go of them inside
            yield copied
            return
        self._is_lent = True
        try:
            copied = self._copied(buffers)
            del buffers
            yield copied
        finally:
            self._is_lent = False

    def clear(self) -> None:
        """Give the memory up."""
        self._keep({})

    def _copied(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        groups = _groups(buffers)
        self._kept = {key: kept for key, kept in self._kept.items() if key in groups}
        self._keep({key: self._kept.get(key) or [torch.empty_like(b) for b in group] for key, group in groups.items()})
        copy_of: dict[int, Tensor] = {}
        with torch.no_grad():
            for key, group in groups.items():
                torch._foreach_copy_(self._kept[key], group)
                copy_of.update((id(buffer), copy) for buffer, copy in zip(group, self._kept[key], strict=True))
        return [copy_of[id(b)] if id(b) in copy_of else b.detach().clone() for b in buffers]

    def _keep(self, kept: dict[Hashable, list[Tensor]]) -> None:
        self._kept = kept
        num_bytes = sum(tensor.nbytes for tensor in self)
        self.version += num_bytes != self.num_bytes
        self.num_bytes = num_bytes


def _groups(buffers: Sequence[Tensor]) -> dict[Hashable, list[Tensor]]:
    """Buffers that are copied at once, by what memory for their copies must be like."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for buffer in buffers:
        if type(buffer) is Tensor and buffer.dtype in _COPIED_AT_ONCE and is_plain(buffer):
            by_kind.setdefault((buffer.device, buffer.dtype), []).append(buffer)
    is_inference = torch.is_inference_mode_enabled()  # what is made there cannot be written elsewhere
    return {
        (kind, _stream(kind[0]), is_inference, tuple((b.size(), b.stride()) for b in group)): group
        for kind, group in by_kind.items()
    }


def _stream(device: torch.device) -> Hashable:
    """Whose memory it is: another stream might write it too early."""
    return torch.accelerator.current_stream(device) if kind_of(device).has_streams else None
