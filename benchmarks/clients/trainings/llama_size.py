"""The same Llama, trained by a function that finds its batch size."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainingArguments

from benchmarks.clients.trainings import hf, llama
from lightning_offload.accelerate import find_efficient_batch_size


def search(options: dict[str, Any] | None, folder: Path, times: int) -> tuple[nn.Module, Any, float]:
    """Train for an epoch.

    Args:
        options: Of the search; None to train at the size that it begins with.
        folder: For what is written.
        times: How much is trained on.

    Returns:
        What was trained, what was found, and what the search took in seconds.
    """
    rows, begun = hf.tokens(340 * times, 64), [time.perf_counter()]
    examples = hf.Examples(input_ids=rows, labels=rows)

    def train(batch_size: int) -> nn.Module:
        begun.append(time.perf_counter())
        arguments = {**hf.arguments(folder, batch_size), "max_steps": -1, "num_train_epochs": 1}
        trainer = Trainer(llama.model(), TrainingArguments(**arguments), train_dataset=examples)
        trainer.train()
        return trainer.model

    if options is None:
        return train(SIZE), None, 0.0
    found = find_efficient_batch_size(train, starting_batch_size=SIZE, **options)
    trained = found()
    return trained, found.result, begun[-1] - begun[0]


SIZE = 16
