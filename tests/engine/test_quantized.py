"""LoRA and QLoRA of a small Llama on layers of bitsandbytes and torchao: bit for bit, nearly all recomputable."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_offload import MemoryPlugin
from tests.engine.recomputable import nothing_known as nothing_known
from tests.engine.recomputable import recomputable_share

VOCABULARY, TOKENS, BATCH, STEPS = 128, 32, 2, 7
KINDS = ("fp32", "bitsandbytes-nf4", "torchao-nf4", "torchao-int8", "torchao-int4")
Bits = list[list[bytes]]


class NF4Linear(nn.Module):
    """A frozen linear layer whose weight is a tensor of torchao's."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
        self.linear = nf4.linear_nf4
        self.weight = nn.Parameter(nf4.to_nf4(weight), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Its own function dequantises the weight, in forward and in backward."""
        y: Tensor = self.linear(x, self.weight)
        return y


def frozen(layer: nn.Linear, kind: str) -> nn.Module:
    """The layer with its weight quantised."""
    weight = layer.weight.detach()
    if kind == "bitsandbytes-nf4":
        bnb = pytest.importorskip("bitsandbytes")
        new = bnb.nn.Linear4bit(*weight.shape[::-1], bias=False, compute_dtype=torch.float32, quant_type="nf4")
        new.weight = bnb.nn.Params4bit(weight.clone(), requires_grad=False, quant_type="nf4").to("cpu")
        return new  # type: ignore[no-any-return]
    if kind == "torchao-nf4":
        return NF4Linear(weight)
    layer.weight.requires_grad_(requires_grad=False)
    if kind.startswith("torchao"):
        ao = pytest.importorskip("torchao.quantization")
        config = ao.Int8WeightOnlyConfig() if kind == "torchao-int8" else ao.IntxWeightOnlyConfig(torch.int4)
        holder = nn.Sequential(layer)
        ao.quantize_(holder, config)
        return holder
    return layer


class Adapted(nn.Module):
    """A frozen layer with a low-rank one beside it."""

    def __init__(self, layer: nn.Linear, kind: str, rank: int = 4) -> None:
        super().__init__()
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)
        self.frozen = frozen(layer, kind)

    def forward(self, x: Tensor) -> Tensor:
        """Both summed."""
        y: Tensor = self.frozen(x) + self.up(self.down(x))
        return y


def build(kind: str) -> nn.Module:
    """A Llama of one block, all of whose linear layers but the head are adapted."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.requires_grad_(requires_grad=False)
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Adapted(child, kind))
    return model


def trained(kind: str, memory: MemoryPlugin | None = None) -> Bits:
    """Losses and gradients of some steps, as bytes."""
    gc.collect()  # what other trainings left counts beside these
    model = build(kind)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    found: Bits = []
    if memory is not None:
        memory.attach(model)
    try:
        for number in range(STEPS):
            torch.manual_seed(100 + number)
            tokens = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
            with memory.step(tokens) if memory is not None else contextlib.nullcontext():
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
            found.append([loss.detach().numpy().tobytes(), *(p.grad.numpy().tobytes() for p in trainable)])
            optimizer.step()
            optimizer.zero_grad()
    finally:
        if memory is not None:
            memory.detach()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_nearly_all_may_be_recomputed_and_bits_are_as_plainly(kind: str) -> None:
    """What frozen layers dequantise, too."""
    expected = trained(kind)
    memory = MemoryPlugin(policy="all-recompute")
    assert trained(kind, memory) == expected
    report = memory.report()
    assert report.phase == "planned"
    assert report.num_mismatched == 0
    assert recomputable_share(memory) >= 0.95
    assert report.floor_bytes is not None
    within = MemoryPlugin(budget=f"{report.floor_bytes + report.floor_bytes // 10}B")
    assert trained(kind, within) == expected
    assert within.report().measured_peak_bytes <= within.budget_bytes
    assert trained(kind, MemoryPlugin(policy="all-swap")) == expected
