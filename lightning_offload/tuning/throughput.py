"""The performance model of the tuner: a step at any batch size, and what it yields under a memory budget.

Protocol: record a step at two or three batch sizes, fit, predict; real steps are then run only to decide between
sizes that the prediction cannot tell apart::

    step_model = StepModel.fit({2: graph_2, 4: graph_4, 8: graph_8})
    predict = Predictor(step_model, device, budget_bytes)
    predict.largest_feasible(1, 4096)
    predict(64).samples_per_second
"""

from __future__ import annotations

from lightning_offload.tuning.predictor import Predictor
from lightning_offload.tuning.step_model import StepModel

__all__ = ["Predictor", "StepModel"]
