"""What a tuning settled on, as plain data that travels in a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_offload.errors import TuningError
from lightning_offload.tuning.scaling import Scaling
from lightning_offload.tuning.trial import Prediction, Trial

__all__ = ["TuningResult"]

_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """The chosen batch size and learning rate, and what they were chosen from.

    Attributes:
        batch_size: Samples of one step on one rank.
        lr: The learning rate in force with it; that of the first group where the model keeps none.
        base_batch_size: Effective batch (samples of one optimizer step, all ranks) that the rate was given for.
        effective_batch_size: The same with the chosen size.
        lr_factor: By how much the rate was scaled; 1.0 where it was left as it was.
        scaled_groups: Parameter groups (number of the optimizer, and of the group in it) whose rates are scaled when
            the optimizers are made, since they do not follow the model's.
        trials: Every trial, in the order that they ran, measured figures beside predicted ones.
        predictions: What the performance model says of the sizes tried and of those between them.
        largest_size: The largest size that fits the budget under the memory plan (or as the run is, where there is
            none): found by trial, or predicted where `is_largest_predicted`. None where nothing limits memory.
        largest_plain_size: The largest that fits without a memory plan; predicted. None where that is not known.
        is_largest_predicted: Whether no trial was run at `largest_size`.
        confidence: How probably the size is right, by the trials; from 0 to 1.
        budget_bytes: The budget that limited the search; None without a limit.
        scaling: What the chosen size would do on 1 to 1024 devices, simulated; None where that is not known.
        note: What a reader should know, such as why sizes were predicted and not tried.
    """

    batch_size: int
    lr: float | None
    base_batch_size: int
    effective_batch_size: int
    lr_factor: float = 1.0
    scaled_groups: tuple[tuple[int, int], ...] = ()
    trials: tuple[Trial, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    largest_size: int | None = None
    largest_plain_size: int | None = None
    is_largest_predicted: bool = False
    confidence: float = 0.0
    budget_bytes: int | None = None
    scaling: Scaling | None = None
    note: str = ""

    def state_dict(self) -> dict[str, Any]:
        """The result as plain containers, safe to load with `weights_only=True`."""
        state = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        state["scaled_groups"] = [list(place) for place in self.scaled_groups]
        state["trials"] = [_plain(trial) for trial in self.trials]
        state["predictions"] = [_plain(prediction) for prediction in self.predictions]
        state["scaling"] = None if self.scaling is None else self.scaling.state_dict()
        return {"schema": _SCHEMA, **state}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> TuningResult:
        """Read what `state_dict` wrote.

        Raises:
            TuningError: It is not a state of this version.
        """
        values = {key: value for key, value in state.items() if key != "schema"}
        try:
            values["scaled_groups"] = tuple((number, index) for number, index in values["scaled_groups"])
            values["trials"] = tuple(Trial(**{**t, "step_seconds": tuple(t["step_seconds"])}) for t in values["trials"])
            scaling = values.get("scaling")
            values["scaling"] = None if scaling is None else Scaling.from_state_dict(scaling)
            values["predictions"] = tuple(Prediction(**p) for p in values["predictions"])
            if state["schema"] != _SCHEMA:
                raise KeyError(f"schema {state['schema']}")
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise TuningError(
                f"the checkpoint's state of EfficientBatchSizeFinder cannot be read ({error!r}): it is from another"
                " version; remove the callback from this run and set the batch size"
            ) from None


def _plain(record: Any) -> dict[str, Any]:
    values = dataclasses.asdict(record)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
