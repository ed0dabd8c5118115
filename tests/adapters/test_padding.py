"""A Hugging Face Trainer whose batches are padded to their longest sample: exact, under a plan, within the budget."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from lightning_offload.transformers import OffloadCallback
from tests.adapters.nets import assert_same, state_of
from tests.engine.live_tracker import LiveStorageTracker
from tests.shares import is_all, share

NUM_STEPS = 300 if is_all() else 60
NUM_LEARNING = 20
"""From there on nine steps of ten are to be planned."""
BATCH_SIZE = 2
_LOOK_EVERY = 8
SHORTEST, LONGEST = 16, 512 if is_all() else 256
VOCABULARY = 64

Sample = dict[str, list[int]]


class Texts(torch.utils.data.Dataset[Sample]):
    """Random tokens of random lengths, short ones more often; some with an answer of another length."""

    def __init__(self, *, has_answers: bool) -> None:
        rng = random.Random(7)
        self._rows: list[Sample] = []
        for _ in range(NUM_STEPS * BATCH_SIZE):
            tokens = [rng.randrange(1, VOCABULARY) for _ in range(int(SHORTEST * (LONGEST / SHORTEST) ** rng.random()))]
            answer = tokens[: rng.randrange(4, 4 + len(tokens) // 2)] if has_answers else tokens
            self._rows.append({"input_ids": tokens, "labels": answer})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        return self._rows[index]


def padded(samples: list[Sample]) -> dict[str, Tensor]:
    """A batch, padded to its longest sample, and what is no padding."""

    def filled(name: str, value: int) -> Tensor:
        longest = max(len(sample[name]) for sample in samples)
        return torch.tensor([sample[name] + [value] * (longest - len(sample[name])) for sample in samples])

    tokens = filled("input_ids", 0)
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": filled("labels", -100)}


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=LONGEST, use_cache=False,
            bos_token_id=1, eos_token_id=1,
        )
    )  # fmt: skip


def _t5() -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            d_model=32, d_ff=64, d_kv=16, num_layers=1, num_heads=2, vocab_size=VOCABULARY, decoder_start_token_id=0,
            pad_token_id=0, use_cache=False,
        )
    )  # fmt: skip


JOBS: dict[str, tuple[Callable[[], nn.Module], bool]] = {"gpt2": (_gpt2, False), "t5": (_t5, True)}
"""A model, and whether its samples have answers."""


class Watched(Trainer):
    """Notes the loss and the peak of every training step."""

    def __init__(self, *args: Any, tracker: LiveStorageTracker, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker = tracker
        self.losses: list[Tensor] = []
        self.peaks: list[int] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if len(self.losses) % _LOOK_EVERY == 0 or len(self.losses) < _LOOK_EVERY:
            self.tracker.register_all()
        with self.tracker.window() as window:
            loss: Tensor = super().training_step(*args, **kwargs)
        self.losses.append(loss)
        self.peaks.append(window.peak_bytes)
        return loss


class Phases(TrainerCallback):
    """Notes what each step did."""

    def __init__(self, offload: OffloadCallback) -> None:
        self._offload = offload
        self.phases: list[str] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.phases.append(self._offload.memory.report().phase)


class Trained:
    """What a training left and showed."""

    def __init__(self, name: str, folder: Path, offload: OffloadCallback | None = None) -> None:
        build, has_answers = JOBS[name]
        phases = Phases(offload) if offload is not None else None
        torch.manual_seed(2)
        arguments = TrainingArguments(
            output_dir=str(folder), use_cpu=True, per_device_train_batch_size=BATCH_SIZE, num_train_epochs=1,
            report_to="none", logging_steps=NUM_STEPS, save_strategy="no", disable_tqdm=True,
            dataloader_pin_memory=False, seed=3, learning_rate=1e-3,
        )  # fmt: skip
        with LiveStorageTracker() as tracker:
            trainer = Watched(
                build(), arguments, data_collator=padded, train_dataset=Texts(has_answers=has_answers),
                callbacks=[callback for callback in (offload, phases) if callback is not None], tracker=tracker,
            )  # fmt: skip
            trainer.train()
        self.state = state_of(trainer.model, trainer.optimizer, trainer.losses)
        self.peaks = trainer.peaks
        self.phases = phases.phases if phases is not None else []


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Nothing of another training counts, and the Trainer prints no logs."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)


@pytest.mark.parametrize("name", share(list(JOBS), 2))
def test_dynamic_padding(name: str, tmp_path: Path) -> None:
    """Nine steps of ten planned from the twentieth on; within the budget from the tenth on; to the bit as without."""
    plain = Trained(name, tmp_path)
    floor = max(Trained(name, tmp_path, OffloadCallback("64GiB", policy="all-swap")).peaks)
    for height in (0.5, 0.2) if is_all() else (0.5,) if name == "gpt2" else (0.2,):
        budget = int(floor + height * (max(plain.peaks) - floor))
        trained = Trained(name, tmp_path, OffloadCallback(budget))
        assert_same(trained.state, plain.state)
        assert max(trained.peaks[10:]) <= budget
        assert trained.phases[NUM_LEARNING:].count("planned") >= 0.9 * (NUM_STEPS - NUM_LEARNING)
