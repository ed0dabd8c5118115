"""Moves ranges of bytes between device memory and host memory: the primitive under every lane.

A mover belongs to one device and serves one lane of each direction. ``mark`` is called by the thread that computes and
stands for all that compute was asked to do so far; the moves may be made by another thread, and happen after their
mark.
"""

from __future__ import annotations

import abc
import ctypes
from typing import Any

import torch
from typing_extensions import override

from lightning_offload.runtime.copies import DONE, Copy


class Mover(abc.ABC):
    """See the module's docstring."""

    @abc.abstractmethod
    def mark(self) -> Any:
        """The point that compute has reached."""

    @abc.abstractmethod
    def to_host(self, mark: Any, storage: torch.UntypedStorage, offset: int, num_bytes: int, address: int) -> Copy:
        """Start copying bytes of a device storage to host memory.

        Args:
            mark: What the copy comes after.
            storage: Device memory, which must stay unchanged until the copy is done; the mover holds it until then.
            offset: First byte of the storage.
            num_bytes: How many.
            address: Host memory; must live until the copy is done.
        """

    @abc.abstractmethod
    def to_device(self, mark: Any, storage: torch.UntypedStorage, offset: int, num_bytes: int, address: int) -> Copy:
        """Start copying host memory to bytes of a device storage; arguments as in :meth:`to_host`."""

    def measure(self, is_on: bool) -> None:  # noqa: B027  (nothing to measure where no stream waits)
        """Whether the times for which compute streams wait should be measured."""

    def take_stall_seconds(self) -> float:
        """Time for which compute streams waited since this was last asked; threads' waits are told by the copies."""
        return 0.0


class CpuMover(Mover):
    """Copies by the calling thread, outside the GIL; they have ended when the call returns."""

    @override
    def mark(self) -> None:
        return None

    @override
    def to_host(self, mark: Any, storage: torch.UntypedStorage, offset: int, num_bytes: int, address: int) -> Copy:
        ctypes.memmove(address, storage.data_ptr() + offset, num_bytes)
        return DONE

    @override
    def to_device(self, mark: Any, storage: torch.UntypedStorage, offset: int, num_bytes: int, address: int) -> Copy:
        ctypes.memmove(storage.data_ptr() + offset, address, num_bytes)
        return DONE


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a flat tensor of bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


def memory_bytes(address: int, num_bytes: int) -> torch.Tensor:
    """Host memory as a flat tensor of bytes, which does not keep it alive."""
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)
