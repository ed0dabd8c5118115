"""Page-locks host memory, so that a device copies to and from it by itself and at full speed.

Memory is mapped by the pool and registered with the driver, since torch's own pinned allocator rounds sizes up to
powers of two. Before its pages are touched, the mapping is bound to the memory next to the device where the
platform tells which that is.

Copies to page-locked memory on the far side of the processor interconnect can run at a fraction of the link's
rate. Best effort: where the platform does not tell, or refuses, memory lies where the kernel puts it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from lightning_offload.accelerators import kind_of, properties_of
from lightning_offload.runtime.hooks import bypass_mode

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1  # MPOL_PREFERRED: that node while it has memory, then any
_BITS = 64  # of a word of a node mask


def node_of(device: torch.device) -> int | None:
    """The memory node next to an accelerator; None with a single node, or where the platform does not tell."""
    if not (_NODES / "node1").exists():
        return None
    try:
        node = int((_PCI_DEVICES / _address_of(device) / "numa_node").read_text())
    except Exception:  # the device's place, its entry or the file may be missing, each in its own way
        _log.debug("the memory node of %s is not known", device, exc_info=True)
        return None
    return node if node >= 0 else None


def _address_of(device: torch.device) -> str:
    """The device's place on the PCI bus as the kernel writes it."""
    properties = properties_of(device)
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def bind_memory(address: int, num_bytes: int, node: int) -> bool:
    """Prefer a node for the pages of a mapping that was not touched yet; whether the kernel agreed."""
    number = _MBIND.get(platform.machine())
    if platform.system() != "Linux" or number is None or not 0 <= node < _BITS:
        return False
    mask = ctypes.c_ulong(1 << node)
    result = _libc().syscall(
        ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_ulong(num_bytes), ctypes.c_int(_PREFERRED),
        ctypes.byref(mask), ctypes.c_ulong(_BITS + 1), ctypes.c_uint(0),
    )  # fmt: skip
    return int(result) == 0


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


_log = logging.getLogger(__name__)


class Pinning:
    """Page-locks mappings; this one leaves them as they are, for devices that read host memory so.

    Attributes:
        is_refused: Whether page-locking was asked for and refused; only small mappings are tried again.
        can_pin: Whether there is anything to page-lock for.
    """

    is_refused = False
    can_pin = False

    def pin(self, address: int, num_bytes: int) -> bool:
        """Page-lock a mapping; whether that was done."""
        return False

    def unpin(self, address: int, num_bytes: int) -> None:
        """Undo :meth:`pin`; called from finalizers, so it raises nothing."""


class CudaPinning(Pinning):
    """Registers mappings with the driver of CUDA, or of ROCm by the same name, for all contexts.

    Args:
        device: The device that copies.
    """

    can_pin = True
    _PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process
    _CHUNK_BYTES = 64 << 30  # drivers refuse single registrations of hundreds of GiB

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._node = node_of(device)

    @override
    def pin(self, address: int, num_bytes: int) -> bool:
        if self._node is not None:
            bind_memory(address, num_bytes, self._node)
        for offset in range(0, num_bytes, self._CHUNK_BYTES):
            try:
                size = min(self._CHUNK_BYTES, num_bytes - offset)
                error = int(torch.cuda.cudart().cudaHostRegister(address + offset, size, self._PORTABLE))
                reason = f"CUDA error {error}" if error else ""
            except RuntimeError as raised:
                reason = str(raised)
            if reason:
                self._forget_error()
                self.unpin(address, offset)
                self._refuse(num_bytes, reason)
                return False
        return True

    @override
    def unpin(self, address: int, num_bytes: int) -> None:
        try:
            for offset in range(0, num_bytes, self._CHUNK_BYTES):
                if int(torch.cuda.cudart().cudaHostUnregister(address + offset)):
                    self._forget_error()
        except Exception:  # at interpreter exit the driver may be gone, and the lock with it
            _log.debug("could not unregister host memory", exc_info=True)

    def _refuse(self, num_bytes: int, reason: str) -> None:
        was_refused, self.is_refused = self.is_refused, True
        if was_refused:
            _log.debug("%d bytes of host memory could not be page-locked either (%s)", num_bytes, reason)
            return
        _log.warning(
            "%d bytes of host memory could not be page-locked (%s): swaps pass through a little that can, which is "
            "slower. Raise the limit of locked memory (ulimit -l) or lower host_budget",
            num_bytes, reason,
        )  # fmt: skip

    def _forget_error(self) -> None:
        """Take the error of a failed call off the runtime: torch would blame the next kernel for it."""
        try:
            with bypass_mode:
                torch.zeros(1, device=self._device).add_(1)  # a kernel, not a fill that might be none
        except RuntimeError:
            _log.debug("cleared a CUDA error", exc_info=True)


def pinning_for(device: torch.device) -> Pinning:
    """How host memory is page-locked for a device."""
    return CudaPinning(device) if kind_of(device).pins_mappings else Pinning()
