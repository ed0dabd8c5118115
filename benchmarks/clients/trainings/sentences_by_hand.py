"""The same with a step around all forwards of a loss, since a callback makes each forward one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformerTrainer
from torch import nn

from benchmarks.clients.trainings.sentences import model_in, trainer_arguments
from lightning_offload import MemoryPlugin


class SteppingTrainer(SentenceTransformerTrainer):
    memory: MemoryPlugin

    def compute_loss(self, model: nn.Module, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        with self.memory.step(inputs):
            return super().compute_loss(model, inputs, *arguments, **keywords)


def train(budget: str | None, folder: Path) -> nn.Module:
    """Train on pairs."""
    model = model_in(folder)
    arguments = trainer_arguments(model, folder)
    if budget is None:
        SentenceTransformerTrainer(**arguments).train()
        return model
    with MemoryPlugin(budget, module=model) as memory:
        trainer = SteppingTrainer(**arguments)
        trainer.memory = memory
        trainer.train()
    return model
