"""A small sentence encoder by sentence-transformers, with its MultipleNegativesRankingLoss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from torch import nn
from transformers import BertConfig, BertModel

from benchmarks.clients.trainings import hf, texts


def model_in(folder: Path) -> SentenceTransformer:
    """A small encoder with the mean of its words."""
    tokenizer = texts.tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    encoder_folder = folder / "encoder"
    BertModel(config).save_pretrained(encoder_folder)
    tokenizer.save_pretrained(encoder_folder)
    words = Transformer(str(encoder_folder), max_seq_length=48)
    return SentenceTransformer(modules=[words, Pooling(64)], device="cpu")


def trainer_arguments(model: SentenceTransformer, folder: Path) -> dict[str, Any]:
    """What the Trainer is told, whoever makes it: pairs of texts, and the loss of their similarities."""
    pairs = {name: texts.some(320, shortest=40, longest=40) for name in ("anchor", "positive")}
    return {
        "model": model,
        "args": SentenceTransformerTrainingArguments(**hf.arguments(folder, batch_size=16)),
        "train_dataset": Dataset.from_dict(pairs),
        "loss": MultipleNegativesRankingLoss(model),
    }


def train(budget: str | None, folder: Path) -> nn.Module:
    """Train on pairs: two forwards of the encoder, one backward."""
    model = model_in(folder)
    SentenceTransformerTrainer(**trainer_arguments(model, folder), callbacks=hf.callbacks(budget)).train()
    return model
