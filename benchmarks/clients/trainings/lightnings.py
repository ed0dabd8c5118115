"""What the trainings by Lightning share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback

from lightning_offload import OffloadStrategy

NUM_STEPS = 40


def trainer_arguments(budget: str | None, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """What a Trainer is told, whoever makes it."""
    return {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        **({"callbacks": list(callbacks)} if callbacks else {}),
        **({} if budget is None else {"strategy": OffloadStrategy(budget=budget)}),
    }
