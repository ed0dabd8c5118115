"""Hugging Face's language models under `chunked_loss=True`: their own losses, without all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from lightning_offload import UnsupportedError
from lightning_offload.plugins.module_steps import ModuleMemoryPlugin
from lightning_offload.transformers import OffloadCallback
from tests.adapters.test_transformers import run, trainer_for

VOCABULARY = 300
_LLAMA = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": VOCABULARY,
}  # fmt: skip
_T5 = {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8, "dropout_rate": 0.0}
_BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "dropout": 0.0,
}  # fmt: skip

MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA)),
    "Gemma2, capped": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**_LLAMA, head_dim=8, final_logit_softcapping=0.5)
    ),
    "Cohere, scaled": lambda: hf.CohereForCausalLM(hf.CohereConfig(**_LLAMA, logit_scale=0.5)),
    "Granite, divided": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**_LLAMA, logits_scaling=4.0)),
    "Qwen3 of experts": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(
            **_LLAMA, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            output_router_logits=True,
        )
    ),
    "T5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5, vocab_size=VOCABULARY, decoder_start_token_id=0)),
    "Bart, moved": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**_BART, vocab_size=VOCABULARY)),
    "masked Bert": lambda: hf.BertForMaskedLM(
        hf.BertConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=VOCABULARY,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, autocast: bool) -> None:
    """Loss, gradients and logits are the model's own."""
    tokens = torch.randint(2, VOCABULARY, (4, 128), generator=torch.Generator().manual_seed(0))
    labels = tokens.masked_fill(tokens % 5 == 0, -100)
    found = []
    for chunked in (False, True):
        torch.manual_seed(0)
        model = MODELS[name]().train()
        memory = ModuleMemoryPlugin("1GiB", chunked_loss=chunked, policy="all-swap")
        memory.follow(model, device="cpu")
        for _ in range(3):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = model(input_ids=tokens, labels=labels)
            out.loss.backward()
        found.append((out, dict(model.named_parameters()), memory.report()))
        memory.detach()
    (plain, parameters, whole), (out, others, cut) = found
    room = 2e-2 if autocast else 1e-5
    assert out.loss.dtype is plain.loss.dtype
    assert abs(out.loss - plain.loss) <= room * plain.loss
    assert out.logits.dtype is plain.logits.dtype
    torch.testing.assert_close(out.logits.detach(), plain.logits.detach(), rtol=room, atol=room)
    largest = max(float(p.grad.abs().max()) for p in parameters.values() if p.grad is not None)
    for key, parameter in parameters.items():
        if parameter.grad is not None:
            assert (parameter.grad - others[key].grad).abs().max() <= room * largest  # type: ignore[operator]
    assert whole.plain_peak_bytes is not None
    assert cut.plain_peak_bytes is not None
    assert cut.plain_peak_bytes < whole.plain_peak_bytes


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}])
def test_trainer(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Hugging Face's Trainer, with its own count of tokens over accumulated batches."""
    plain, actual = (
        run(tmp_path, None, **settings),
        run(tmp_path, OffloadCallback("1GiB", chunked_loss=True), **settings),
    )
    room = 2e-2 if settings.get("bf16") else 1e-5
    assert actual.keys() == plain.keys()
    for key, one in plain.items():
        if one.is_floating_point():
            torch.testing.assert_close(actual[key], one, rtol=room, atol=room)


def test_a_loss_of_the_trainer(tmp_path: Path) -> None:
    """Its label smoothing reads all logits: training ends after the first step, with why."""
    callback = OffloadCallback("1GiB", chunked_loss=True)
    trainer = trainer_for(tmp_path, callback, label_smoothing_factor=0.1)
    with pytest.raises(UnsupportedError, match=r"`lm_head` made was read by `log_softmax` \(.*trainer_pt_utils"):
        trainer.train()
    callback.detach()
    assert type(trainer.model.lm_head) is nn.Linear
