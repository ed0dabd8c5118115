"""One model on one device under several budgets: what each policy's plan would take.

A step is recorded once without running, priced for the device by its datasheet, and planned by everybody. Budgets are
given by their height between the smallest feasible peak and the plain one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from examples.models import MODELS
from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph.catalog import device_spec
from lightning_offload.planning.planner import POLICIES
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.relaxation import integral_bound
from lightning_offload.planning.request import PlanRequest
from lightning_offload.plugins.fake import record_fake

MODEL_NAMES = (
    "resnet152",
    "vgg19-bn",
    "gpt2-eager",
    "gpt2-sdpa",
    "bert-large-eager",
    "bert-large-sdpa",
    "t5-small",
    "seq2seq-attention",
)
CARDS = ("k40c", "a100", "h100", "h200", "4090")
DTYPES = ("float32", "bfloat16")
DEVICES = tuple(itertools.product(CARDS, DTYPES))
BEATEN = 1.001
"""How many times as long a plan takes that is beaten: less is what the order of sums and rounding may do."""
_FAR = 1.03
_FEW_CANDIDATES = 64
_MAX_NODES = 2000
HEIGHTS = (0.8, 0.6, 0.4, 0.2, 0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A model on a device under a budget, with everybody's step time.

    Attributes:
        model: Name in `examples.models.MODELS`.
        device: Name in the catalogue.
        dtype: Of weights and activations.
        height: Of the budget, between floor (0) and plain peak (1).
        budget_bytes: The budget.
        plain_seconds: The step with everything kept.
        bound_seconds: What no plan within the budget is faster than; where a plan is far above the linear program's
            figure and candidates are few, that of the integral one.
        policy_seconds: By policy: the step under its plan; without those that cannot meet the budget.
        planning_seconds: What auto took, its bound included, in CPU time: planning is one thread, and both cores are
            taken by cells.
    """

    model: str
    device: str
    dtype: str
    height: float
    budget_bytes: int
    plain_seconds: float
    bound_seconds: float
    policy_seconds: dict[str, float]
    planning_seconds: float

    @property
    def name(self) -> str:
        """What the cell is called in tables."""
        return f"{self.model}, {self.device} {self.dtype}, h={self.height:g}"

    @property
    def over_bound(self) -> float:
        """Step time of auto's plan as a multiple of the bound."""
        return self.policy_seconds["auto"] / self.bound_seconds

    @property
    def best_policy(self) -> str | None:
        """The fastest of the others; None where none is feasible."""
        others = {name: seconds for name, seconds in self.policy_seconds.items() if name != "auto"}
        return min(others, key=lambda name: others[name], default=None)

    @property
    def over_best_policy(self) -> float | None:
        """Step time of auto's plan as a multiple of the best other one; above :data:`BEATEN` the cell is lost."""
        best = self.best_policy
        return self.policy_seconds["auto"] / self.policy_seconds[best] if best is not None else None


def cells(
    model: str, device: str, dtype: str, heights: tuple[float, ...], batch_size: int | None = None
) -> Iterator[Cell]:
    """Plan one model on one device under several budgets."""
    spec = device_spec(device, dtype=dtype)
    step = record_fake(MODELS[model].step(batch_size, getattr(torch, dtype)), spec)
    problem = Problem(step.on(spec))
    free = PlanRequest(problem, spec, None)
    floor_bytes, plain_bytes = free.floor.peak_bytes, free.plain.peak_bytes
    for height in heights:
        budget_bytes = floor_bytes + int(height * (plain_bytes - floor_bytes))
        request = PlanRequest(problem, spec, budget_bytes)
        start = time.process_time()
        bound_seconds = request.bound_seconds
        seconds = {"auto": POLICIES["auto"](request).predicted_step_seconds}
        planning_seconds = time.process_time() - start
        if seconds["auto"] > _FAR * bound_seconds and len(problem.candidates) <= _FEW_CANDIDATES:
            higher = integral_bound(problem, spec, budget_bytes, max_nodes=_MAX_NODES)
            bound_seconds = max(bound_seconds, higher or 0.0)
        for name, policy in POLICIES.items():
            if name != "auto":
                try:
                    seconds[name] = policy(request).predicted_step_seconds
                except BudgetInfeasibleError:
                    continue
        yield Cell(
            model=model, device=device, dtype=dtype, height=height, budget_bytes=budget_bytes,
            plain_seconds=free.plain.step_seconds, bound_seconds=bound_seconds, policy_seconds=seconds,
            planning_seconds=planning_seconds,
        )  # fmt: skip
