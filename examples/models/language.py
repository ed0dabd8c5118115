"""Transformers of the Hugging Face library with their published sizes and random weights; nothing is downloaded.

The factories import transformers when they are called. Their defaults are those of the library, dropout included.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_offload import chunked_linear_cross_entropy

_ATTENTION = ("eager", "sdpa")


def gpt2(
    *, attention: str = "sdpa", attention_dropout: float = 0.1, layers: int = 12, width: int = 768, heads: int = 12
) -> nn.Module:
    """GPT-2 with its language-model head (Radford et al., 2019): the small one.

    Args:
        attention: "eager" for matrix products and a softmax, "sdpa" for the fused kernel.
        attention_dropout: Rate on the attention's weights.
        layers: Number of layers.
        width: Width of a token.
        heads: Attention heads.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config: Any = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, attn_pdrop=attention_dropout, use_cache=False,
        attn_implementation=_checked(attention),
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def gpt2_medium(*, attention: str = "sdpa", attention_dropout: float = 0.1) -> nn.Module:
    """GPT-2 medium: 24 layers of width 1024."""
    return gpt2(attention=attention, attention_dropout=attention_dropout, layers=24, width=1024, heads=16)


def bert_large(*, attention: str = "sdpa", attention_dropout: float = 0.1) -> nn.Module:
    """BERT-large with its masked-language-model head (Devlin et al., NAACL 2019).

    Args:
        attention: "eager" for matrix products and a softmax, "sdpa" for the fused kernel.
        attention_dropout: Rate on the attention's weights.
    """
    from transformers import BertConfig, BertForMaskedLM

    config: Any = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        attention_probs_dropout_prob=attention_dropout, attn_implementation=_checked(attention),
    )  # fmt: skip
    return BertForMaskedLM(config)


def t5_small() -> nn.Module:
    """T5-small, an encoder-decoder with relative positions (Raffel et al., JMLR 2020)."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, use_cache=False))


def _checked(attention: str) -> str:
    if attention not in _ATTENTION:
        raise ValueError(f"unknown attention {attention!r}; choose one of {', '.join(_ATTENTION)}")
    return attention


def chunked_loss(model: Any, tokens: Tensor, num_chunks: int = 8) -> Tensor:
    """The loss of a GPT-2 with each token scored against the next one, without the logits of all tokens at once.

    Args:
        model: What :func:`gpt2` makes.
        tokens: Of shape (samples, length).
        num_chunks: Into how many parts the rows of the logits are cut.
    """
    return chunked_linear_cross_entropy(
        model.transformer(input_ids=tokens).last_hidden_state,
        model.lm_head.weight,
        F.pad(tokens[:, 1:], (0, 1), value=-100),  # the last token of a sample has no next one
        num_chunks=num_chunks,
    )
