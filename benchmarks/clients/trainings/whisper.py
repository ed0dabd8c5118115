"""A small Whisper by the Hugging Face Trainer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import WhisperConfig, WhisperForConditionalGeneration

from benchmarks.clients.trainings import hf


def train(budget: str | None, folder: Path) -> nn.Module:
    """Train from spectra to tokens."""
    config = WhisperConfig(
        vocab_size=256,
        num_mel_bins=20,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_source_positions=100,
        max_target_positions=32,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        use_cache=False,
    )
    examples = hf.Examples(input_features=torch.randn(160, 20, 200), labels=hf.tokens(160, 32))
    return hf.train(WhisperForConditionalGeneration(config), examples, budget, folder, batch_size=12)
