"""Models large enough for memory to be about activations: ResNet-50, a GPT-2 and an LSTM. On a CPU or the emulated
device, small ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.gpu.device import IS_FAST
from tests.zoo.case import Case, adamw, integers, normal, sgd, simple
from tests.zoo.models.resnet import ResNet
from tests.zoo.models.sequence import RecurrentLM

_SIDE, _IMAGES = (224, 32) if IS_FAST else (64, 4)
_LAYERS = (3, 4, 6, 3) if IS_FAST else (1, 1, 1)
_WIDTH, _NUM_LAYERS, _VOCABULARY = (768, 6, 8192) if IS_FAST else (64, 2, 96)
_SEQUENCES, _LENGTH = (8, 512) if IS_FAST else (8, 48)
_RNN_WIDTH, _RNN_LENGTH = (512, 256) if IS_FAST else (64, 32)


def _resnet() -> nn.Module:
    return ResNet(_LAYERS, bottleneck=True, width=64 if IS_FAST else 16)


def _classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=_VOCABULARY, n_positions=_LENGTH, n_embd=_WIDTH, n_layer=_NUM_LAYERS, n_head=_WIDTH // 32,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    scores = model(tokens[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def _case(name: str, **options: Any) -> Case:
    return Case(name=name, steps=8, budgeted=True, **options)


LARGE: tuple[Case, ...] = (
    _case(
        "resnet50-like",
        build=_resnet,
        batch=lambda step: (normal(step, _IMAGES, 3, _SIDE, _SIDE), integers(step, 10, _IMAGES)),
        train_step=simple(_classify),
        optimizers=sgd,
    ),
    _case(
        "gpt2-like",
        build=_gpt2,
        batch=lambda step: integers(step, _VOCABULARY, _SEQUENCES, _LENGTH),
        train_step=simple(_language_loss),
        optimizers=adamw,
    ),
    _case(
        "lstm-like",
        build=lambda: RecurrentLM("lstm", vocabulary=64, dim=_RNN_WIDTH),
        batch=lambda step: integers(step, 64, 64, _RNN_LENGTH),
        train_step=simple(_next_token),
        optimizers=sgd,
    ),
)
BY_NAME = {case.name: case for case in LARGE}


class DeepMlp(nn.Module):
    """Layers whose activations are all of one size, many times that of the weights."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the last layer's features, and count the calls."""
        assert isinstance(self.count, Tensor)
        self.count += 1
        for layer in self.layers:
            x = layer(x).sin() * x.sigmoid()
        return x
