"""Train a small GPT-2 on text that ships with Python with the Hugging Face Trainer, within a memory budget.

Usage: python -m examples.transformers.train --budget 64MiB

The model and the data are ordinary ones, letters instead of tokens so that nothing is downloaded; `callbacks=` is all
that changes.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import tempfile

import torch
from rich import print
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lightning_offload.transformers import OffloadCallback

LENGTH = 64


class Text(torch.utils.data.Dataset):
    """Pieces of Python's own help, one token a byte."""

    def __init__(self, num_pieces: int = 640) -> None:
        text = "".join(pydoc_data.topics.topics.values()).encode()
        self.pieces = torch.tensor(list(text[: num_pieces * LENGTH])).view(num_pieces, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="64MiB", help="peak memory of a training step")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=96, n_layer=4, n_head=4, use_cache=False)
    offload = OffloadCallback(budget=args.budget)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            GPT2LMHeadModel(config),
            TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=32,
                num_train_epochs=args.epochs,
                learning_rate=3e-3,
                logging_steps=10,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=torch.cuda.is_available(),
            ),
            train_dataset=Text(),
            callbacks=[offload],
        )
        trainer.train()
    print(f"training loss: {trainer.state.log_history[-2]['loss']}")
    print(offload.memory.report())


if __name__ == "__main__":
    main()
