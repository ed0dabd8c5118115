"""Places host memory next to a device, on machines with several memory nodes (Linux).

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

_log = logging.getLogger(__name__)
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NODES = Path("/sys/devices/system/node")
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1  # MPOL_PREFERRED: that node while it has memory, then any
_BITS = 64


def node_of(device: torch.device) -> int | None:
    """The memory node next to a CUDA device; None with a single node, or where the platform does not tell."""
    if not (_NODES / "node1").exists():
        return None
    try:
        node = int((_PCI_DEVICES / _address_of(device) / "numa_node").read_text())
    except Exception:  # the driver's library, the device's entry or the file may be missing, each in its own way
        _log.debug("the memory node of %s is not known", device, exc_info=True)
        return None
    return node if node >= 0 else None


def _address_of(device: torch.device) -> str:
    """The device's place on the PCI bus as the kernel writes it."""
    properties: Any = torch.cuda.get_device_properties(device)
    if hasattr(properties, "pci_bus_id"):
        place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    else:
        import pynvml

        pynvml.nvmlInit()
        info = pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}"))
        place = (info.domain, info.bus, info.device)
    return "{:04x}:{:02x}:{:02x}.0".format(*place)


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
