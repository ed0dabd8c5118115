"""Lanes of an accelerator: copies between device and page-locked host memory, on one side stream for each direction.

Host memory is used again only behind its earlier copies; device memory is :mod:`.stream_mover`'s matter.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from lightning_offload.runtime.copies import Block, Copy, HostCopy
from lightning_offload.runtime.host_pool import HostBlock
from lightning_offload.runtime.lanes import Lanes, LaneTimes
from lightning_offload.runtime.stream_mover import StreamCopy, StreamMover


class StreamLanes(Lanes):
    """See the module's docstring.

    Args:
        mover: Copies on side streams of the accelerator.
    """

    def __init__(self, mover: StreamMover) -> None:
        self.mover = mover

    @property
    def out_stream(self) -> Any:
        """The stream of copies to the host."""
        return self.mover.out_stream

    @property
    def in_stream(self) -> Any:
        """The stream of copies to the device."""
        return self.mover.in_stream

    @override
    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        assert isinstance(block, HostBlock)
        self._gate(block, self.out_stream)
        copy = self.mover.to_host(self.mover.mark(), storage, 0, block.num_bytes, block.address)
        block.busy = copy
        return copy

    @override
    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        assert isinstance(block, HostBlock)
        if isinstance(block.busy, StreamCopy):  # compute waited for the copy out, but perhaps on another stream
            block.busy.gate(self.in_stream)
        copy = self.mover.to_device(self.mover.mark(), storage, 0, block.num_bytes, block.address)
        block.busy = copy
        return copy

    @override
    def compute_stream(self) -> Any:
        return self.mover.compute_stream()

    @override
    def tidy(self) -> None:
        self.mover.tidy()

    @override
    def measure(self, is_on: bool) -> None:
        self.mover.measure(is_on)

    @override
    def take_times(self) -> LaneTimes:
        return self.mover.take_times()

    @override
    def drain(self) -> None:
        self.mover.settle()

    @override
    def close(self) -> None:
        self.mover.settle()

    def _gate(self, block: Block, stream: Any) -> None:
        """Let a stream write to a block's memory only after that memory's earlier users."""
        for copy in block.after:
            if isinstance(copy, StreamCopy):
                copy.gate(stream)
            elif isinstance(copy, HostCopy):
                copy.settle()
        block.after = ()
