"""What a training step *is*: plain frozen data that round-trips through JSON, without torch.

Capture writes a :class:`StepGraph`, calibration a :class:`DeviceSpec`, planning turns both into a
:class:`MemoryPlan`, and the runtime executes it. They meet in this data only.
"""

from __future__ import annotations

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.memory_plan import Action, Decision, MemoryPlan
from lightning_offload.graph.step_graph import Op, Save, StepGraph, Storage, Value

__all__ = ["Action", "Decision", "DeviceSpec", "MemoryPlan", "Op", "Save", "StepGraph", "Storage", "Value"]
