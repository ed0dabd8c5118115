"""Supervised fine-tuning of a small Llama with LoRA, by TRL."""

from __future__ import annotations

from pathlib import Path

from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from benchmarks.clients.trainings import hf, texts


def train(budget: str | None, folder: Path) -> nn.Module:
    """Train on texts of several lengths."""
    tokenizer = texts.tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=96,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        use_cache=False,
    )
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=SFTConfig(**hf.arguments(folder, batch_size=8), max_length=96, bf16=False, gradient_checkpointing=False),
        train_dataset=Dataset.from_dict({"text": texts.some(320, shortest=72, longest=80)}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.05, task_type="CAUSAL_LM"),
        callbacks=hf.callbacks(budget),
    )
    trainer.train()
    return trainer.model
