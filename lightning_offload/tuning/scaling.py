"""What the chosen size would do on more devices: *simulated*, from one device's measured step.

The recorded step at the chosen size is planned and given the duration that its trials measured; what its gradients'
exchange adds is simulated (:mod:`lightning_offload.planning.cluster`) over the links that machines with such a device
usually have. There is nothing to say of a device without links to others of its kind (a CPU), nor of a step in which
ranks talk to one another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_offload.graph.interconnects import has_usual_interconnects, usual_interconnects
from lightning_offload.planning.cluster import Cluster, ClusterStep, profile_step, scaling
from lightning_offload.planning.problem import Problem
from lightning_offload.tuning.predictor import Predictor

__all__ = ["COLUMNS", "Scaling", "simulate_scaling"]

COLUMNS = ("devices", "effective batch", "samples/s", "efficiency")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Simulated throughput of many devices.

    Attributes:
        steps: By number of devices, from 1 on, which is as measured.
        links: Between which devices, in words.
        are_links_assumed: Whether nothing is known of this device's usual links, and old ones were taken.
    """

    steps: tuple[ClusterStep, ...]
    links: str
    are_links_assumed: bool

    @property
    def caption(self) -> str:
        """How it came about."""
        assumed = "assumed, nothing is known of this device's" if self.are_links_assumed else "usual for this device"
        return f"Simulated from the measured step of one device, nothing here is measured. {self.links} ({assumed})."

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """Texts for a table with the columns of :data:`COLUMNS`."""
        return tuple(
            (
                f"{step.num_devices:,}",
                f"{step.effective_batch:,}",
                f"{step.samples_per_second:,.{0 if step.samples_per_second >= 1000 else 1}f}",
                f"{100 * step.efficiency:.1f}%",
            )
            for step in self.steps
        )

    def state_dict(self) -> dict[str, Any]:
        """The same as plain containers."""
        state = dataclasses.asdict(self)
        state["steps"] = [{**step, "algorithms": list(step["algorithms"])} for step in state["steps"]]
        return state

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Scaling:
        """Read what `state_dict` wrote."""
        steps = (ClusterStep(**{**step, "algorithms": tuple(step["algorithms"])}) for step in state["steps"])
        return cls(**{**state, "steps": tuple(steps)})


def simulate_scaling(
    predictor: Predictor, batch_size: int, *, step_seconds: float, accumulation: int
) -> Scaling | None:
    """Simulate 1 to 1024 devices at a batch size; None where that would say nothing.

    Args:
        predictor: Has the recorded step at any size, its device and its plan.
        batch_size: Samples of one step of one device.
        step_seconds: What such a step was measured to take, its share of the optimizer's update included.
        accumulation: Steps of one update.

    Raises:
        OffloadError: The step cannot be planned at this size.
    """
    device = predictor.device
    problem = Problem(predictor.step_model.at(batch_size), predictor.keep)
    if device.kind == "cpu" or problem.graph.has_collectives:
        return None
    within, between = usual_interconnects(device.name)
    cluster = Cluster(intra=within, inter=between)
    fixed = predictor.fixed_seconds if predictor.fixed_seconds < step_seconds else 0.0
    profile = profile_step(
        problem, predictor.plan(batch_size), device, batch_size=batch_size, update_seconds=accumulation * fixed
    )
    links = f"{within.title} within nodes of {cluster.devices_per_node}, {between.title} between them"
    return Scaling(
        steps=scaling(profile.lasting(step_seconds - fixed), cluster, accumulation=accumulation),
        links=links,
        are_links_assumed=not has_usual_interconnects(device.name),
    )
