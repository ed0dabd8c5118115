"""Tiny, randomly initialised transformers of the Hugging Face library; nothing is downloaded."""

from __future__ import annotations

from typing import Any

from torch import nn


def bert() -> nn.Module:
    """A BERT for masked language modelling, with its usual dropout."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64,
    )  # fmt: skip
    return BertForMaskedLM(config)


def gpt2(attention: str) -> nn.Module:
    """A GPT-2 with tied embeddings and dropout.

    Args:
        attention: The attention implementation, "eager" or "sdpa".
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=96, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
        attn_implementation=attention, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def t5(layers: int = 2) -> nn.Module:
    """A T5 encoder-decoder with relative positions and dropout.

    Args:
        layers: The number of them, in the encoder as in the decoder.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=96, d_model=64, d_kv=16, d_ff=128, num_layers=layers, num_heads=4, decoder_start_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def _llama_like() -> dict[str, Any]:
    return {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False,
    }  # fmt: skip


def llama() -> nn.Module:
    """A Llama with grouped-query attention and rotary positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_llama_like()))


def mixtral() -> nn.Module:
    """A Mixtral whose routing, and so its graph, changes from step to step."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            **_llama_like(),
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
            experts_implementation="eager",
        )
    )


def olmoe() -> nn.Module:
    """An OLMoE: many small experts, some of which get nothing in some steps."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    return OlmoeForCausalLM(
        OlmoeConfig(
            **_llama_like(),
            num_experts=16,
            num_experts_per_tok=2,
            experts_implementation="eager",
        )
    )


def wav2vec2() -> nn.Module:
    """A wav2vec 2.0 that leaves layers out at random."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    return Wav2Vec2ForCTC(
        Wav2Vec2Config(
            vocab_size=32, hidden_size=48, num_hidden_layers=6, num_attention_heads=4, intermediate_size=96,
            conv_dim=(32, 32, 32), conv_stride=(5, 4, 2), conv_kernel=(10, 8, 4), num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4, layerdrop=0.2, mask_time_prob=0.0, ctc_loss_reduction="mean",
        )
    )  # fmt: skip


def whisper() -> nn.Module:
    """A Whisper that leaves layers of its encoder and of its decoder out at random."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=96, num_mel_bins=16, d_model=48, encoder_layers=5, decoder_layers=5, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_source_positions=64,
            max_target_positions=32, encoder_layerdrop=0.2, decoder_layerdrop=0.2, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=3,
        )
    )  # fmt: skip
