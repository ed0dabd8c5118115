"""A lower bound on the step time of any plan within a budget: the value of :mod:`~.relaxation`."""

from __future__ import annotations

from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.relaxation import relax


def bound_seconds(problem: Problem, device: DeviceSpec, budget_bytes: int | None) -> float:
    """Lower bound on the step time within a budget, in seconds."""
    return relax(problem, device, budget_bytes).seconds
