"""The published systems as policies: pure functions of one signature, ``policy(request) -> MemoryPlan``.

Each is in a module that cites its paper and says where it departs. Each is fitted to a budget in the best way that
its paper allows (:mod:`~.fitting`); all fail where they do not fit. :mod:`~.planner` plans by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from lightning_offload.graph.memory_plan import Action, MemoryPlan
from lightning_offload.planning.policies.accudnn import accudnn
from lightning_offload.planning.policies.capuchin import capuchin
from lightning_offload.planning.policies.checkmate import checkmate
from lightning_offload.planning.policies.checkpoint import checkpoint, checkpoint_sqrt
from lightning_offload.planning.policies.cpu_offload import cpu_offload
from lightning_offload.planning.policies.dtr import dtr
from lightning_offload.planning.policies.layrub import layrub
from lightning_offload.planning.policies.layup import layup
from lightning_offload.planning.policies.pofo import pofo
from lightning_offload.planning.policies.save_on_cpu import save_on_cpu
from lightning_offload.planning.policies.superneurons import superneurons
from lightning_offload.planning.policies.swap_out_in import swap_out_in
from lightning_offload.planning.policies.vdnn import vdnn_all, vdnn_conv, vdnn_dyn
from lightning_offload.planning.request import PlanRequest

Policy = Callable[[PlanRequest], MemoryPlan]

PUBLISHED: dict[str, Policy] = {
    "save-on-cpu": save_on_cpu,
    "checkpoint": checkpoint,
    "checkpoint-sqrt": checkpoint_sqrt,
    "vdnn-all": vdnn_all,
    "vdnn-conv": vdnn_conv,
    "vdnn-dyn": vdnn_dyn,
    "superneurons": superneurons,
    "swap-out-in": swap_out_in,
    "layrub": layrub,
    "layup": layup,
    "cpu-offload": cpu_offload,
    "accudnn": accudnn,
    "capuchin": capuchin,
    "checkmate": checkmate,
    "dtr": dtr,
    "pofo": pofo,
}
"""Those of others."""

ONLY: dict[str, Action] = {
    "save-on-cpu": "swap",
    "checkpoint": "recompute",
    "checkpoint-sqrt": "recompute",
    "vdnn-all": "swap",
    "vdnn-conv": "swap",
    "vdnn-dyn": "swap",
    "layrub": "swap",
    "cpu-offload": "swap",
    "accudnn": "swap",
    "checkmate": "recompute",
    "dtr": "recompute",
}
"""What those do that take one action alone, for which there is a bound of its own."""


def __getattr__(name: str) -> Any:
    if name in {"POLICIES", "check_policy", "plan"}:  # which were here
        return getattr(importlib.import_module("lightning_offload.planning.planner"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
