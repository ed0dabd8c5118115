"""Language models: Hugging Face transformers, recurrent networks and scans."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.case import Case, adamw, integers, normal, simple
from tests.zoo.models import hugging_face
from tests.zoo.models.sandwich import square_loss
from tests.zoo.models.sequence import CellRNN, HandLSTM, RecurrentLM, SelectiveScan, Seq2Seq


def _tokens(step: int) -> dict[str, Tensor]:
    tokens = integers(step, 96, 8, 48)
    mask = torch.ones_like(tokens)
    mask[0, -7:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def _pairs(step: int) -> dict[str, Tensor]:
    return {"input_ids": integers(step, 96, 8, 32), "labels": integers(step, 96, 8, 24, salt=2)}


def _model_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _bf16_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast(batch["input_ids"].device.type, dtype=torch.bfloat16):
        return _model_loss(model, batch)


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    scores = model(tokens[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def _translate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    source, target = batch
    scores = model(source, target[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), target[:, 1:].flatten())


def _transformer(name: str, build: Any, batch: Any = _tokens, loss: Any = _model_loss, **options: Any) -> Case:
    return Case(name=name, build=build, batch=batch, train_step=simple(loss), optimizers=adamw, **options)


def _scan_stack() -> nn.Module:
    return nn.Sequential(SelectiveScan(), SelectiveScan())


LANGUAGE: tuple[Case, ...] = (
    _transformer("bert", hugging_face.bert, budgeted=True),
    _transformer("bert-bf16", hugging_face.bert, loss=_bf16_loss),
    _transformer("gpt2-eager", lambda: hugging_face.gpt2("eager"), budgeted=True),
    _transformer("gpt2-sdpa", lambda: hugging_face.gpt2("sdpa"), budgeted=True),
    _transformer("gpt2-bf16", lambda: hugging_face.gpt2("sdpa"), loss=_bf16_loss),
    _transformer("t5", hugging_face.t5, _pairs, budgeted=True),
    _transformer("llama", hugging_face.llama, budgeted=True),
    _transformer("llama-bf16", hugging_face.llama, loss=_bf16_loss),
    _transformer("mixtral", hugging_face.mixtral, static=False, steps=6),
    Case(
        name="lstm",
        build=lambda: RecurrentLM("lstm"),
        batch=lambda step: integers(step, 64, 48, 14),
        train_step=simple(next_token),
        budgeted=True,
    ),
    Case(
        name="gru",
        build=lambda: RecurrentLM("gru"),
        batch=lambda step: integers(step, 64, 48, 14),
        train_step=simple(next_token),
        budgeted=True,
    ),
    Case(
        name="lstm-unsafe-chunk",
        build=HandLSTM,
        batch=lambda step: normal(step, 8, 160, 64),
        train_step=simple(square_loss),
        budgeted=True,
    ),
    Case(
        name="rnn-cells",
        build=CellRNN,
        batch=lambda step: normal(step, 8, 160, 64),
        train_step=simple(square_loss),
        budgeted=True,
    ),
    Case(
        name="mamba-scan",
        build=_scan_stack,
        batch=lambda step: normal(step, 24, 10, 48),
        train_step=simple(square_loss),
        budgeted=True,
    ),
    Case(
        name="seq2seq",
        build=Seq2Seq,
        batch=lambda step: (integers(step, 48, 40, 10), integers(step, 48, 40, 8, salt=2)),
        train_step=simple(_translate),
        budgeted=True,
    ),
)
