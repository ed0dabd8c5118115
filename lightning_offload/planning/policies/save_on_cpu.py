"""What ``torch.autograd.graph.save_on_cpu`` does: every saved tensor is on the host from pack to unpack.

PyTorch's documentation of ``torch.autograd.graph.save_on_cpu``. Each saved tensor is copied out when it is packed and
back when it is unpacked, and compute waits for both.

Departures. One copy for each storage, where the original copies each saved tensor anew; parameters and the batch stay
on the device, where the original copies them too; a cast of a parameter is cast again. Host memory is page-locked
where the device has links. What a host of limited size has no room for is kept, the smallest first.
"""

from __future__ import annotations

from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.planning.policies.fitting import Fitting, Tried, everything_swapped
from lightning_offload.planning.request import PlanRequest
from lightning_offload.planning.simulator import ON_DEMAND


def save_on_cpu(request: PlanRequest) -> MemoryPlan:
    """Swap everything, and wait for each copy."""
    tried = Tried(actions=everything_swapped(request), schedule=ON_DEMAND)
    return Fitting(request, "save-on-cpu").one(tried).plan()
