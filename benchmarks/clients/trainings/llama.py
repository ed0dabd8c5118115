"""A small Llama by the Hugging Face Trainer."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.clients.trainings import hf


def model() -> nn.Module:
    """With random weights."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def train(budget: str | None, folder: Path) -> nn.Module:
    """Train on rows of tokens of one length; the last batch of an epoch is smaller."""
    llama, rows = model(), hf.tokens(340, 64)
    return hf.train(llama, hf.Examples(input_ids=rows, labels=rows), budget, folder, batch_size=16)
