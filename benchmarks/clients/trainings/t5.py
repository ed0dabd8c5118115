"""A small T5, with its dropout, by the Hugging Face Trainer."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from benchmarks.clients.trainings import hf


def train(budget: str | None, folder: Path) -> nn.Module:
    """Train from rows of tokens to others."""
    config = T5Config(
        vocab_size=256,
        d_model=64,
        d_kv=16,
        d_ff=192,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    examples = hf.Examples(input_ids=hf.tokens(340, 64), labels=hf.tokens(340, 32))
    return hf.train(T5ForConditionalGeneration(config), examples, budget, folder, batch_size=16)
