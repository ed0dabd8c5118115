"""The host link as DDP's all-reduce leaves it to the copies of a step.

On a GPU whose peers are reached over PCIe the all-reduce of gradients goes over the link that brings swapped
tensors back, and at the same time: in backward. Each device receives ``2 (N - 1) / N`` of the gradients' bytes, in
a ring. PCIe shares itself evenly between transfers, so copies get at least half of the link; averaged over backward
they get what is left, ``1 - all-reduce / backward``. Copies out are made in forward above all, where there is no
all-reduce, and keep their rate. Over NVLink, and on a CPU, nothing is shared.

Known shortfall: the network of several nodes is not told from PCIe; where its cards have links of their own, plans
are too careful. What measured steps show of a link (``capture.observed``) is true of the shared link already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from typing import Any

import torch

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.plugins.data_parallel import num_ranks
from lightning_offload.tensors.op_facts import ALL_REDUCE

_LEAST_SHARE = 0.5


def reduced_bytes(graph: StepGraph) -> int:
    """Bytes that the step's backward all-reduces."""
    values = (v for op in graph.ops if op.phase == "backward" and op.name.startswith(ALL_REDUCE) for v in op.inputs)
    return sum(graph.storages[graph.values[v].storage].num_bytes for v in values)


def beside_all_reduce(spec: DeviceSpec, graph: StepGraph, num_peers: int) -> DeviceSpec:
    """The device with the rate at which copies come back while gradients are all-reduced over the same link."""
    num_bytes = 2 * (num_peers - 1) / num_peers * reduced_bytes(graph)
    if not num_bytes:
        return spec
    backward_seconds = sum(op.seconds for op in graph.ops if op.phase == "backward")
    seconds = num_bytes / spec.h2d_bytes_per_second
    share = 1 - seconds / backward_seconds if backward_seconds > seconds else 0.0
    return dataclasses.replace(spec, h2d_bytes_per_second=max(_LEAST_SHARE, share) * spec.h2d_bytes_per_second)


def shared_spec(spec: DeviceSpec, graph: StepGraph, device: torch.device) -> DeviceSpec:
    """The device as this rank's copies find it."""
    if device.type != "cuda" or num_ranks() == 1 or has_nvlink(device):
        return spec
    return beside_all_reduce(spec, graph, num_ranks())


def has_nvlink(device: torch.device, nvml: Any = None) -> bool:
    """Whether a GPU has an active NVLink; False where the driver does not tell.

    Args:
        device: The GPU.
        nvml: The driver's library, ``pynvml`` by default.
    """
    with contextlib.suppress(Exception):  # no driver, no permission, no NVLink: there are many ways to say so
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return any(_is_active(nvml, handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS))
    return False


def _is_active(nvml: Any, handle: Any, link: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
    except nvml.NVMLError:  # this one is not there
        return False
