"""Attention with masks, packed sequences and flex attention trains bit for bit as plainly, within budgets."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from lightning_offload.plugins.report import Report
from tests.shares import is_all
from tests.zoo.models import hugging_face

Batch = dict[str, Tensor]
LENGTH, NUM_STEPS = 96, 6


def ids(step: int, rows: int, length: int) -> Tensor:
    """Random tokens."""
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(step))


def padded(step: int) -> Batch:
    """One of two sequences begins later, by more with each step."""
    tokens = ids(step, 2, LENGTH)
    mask = torch.ones_like(tokens)
    mask[1, : 20 + 4 * step] = 0
    return {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask}


def masked(step: int) -> Batch:
    """A mask of all pairs, of truths."""
    tokens = ids(step, 2, LENGTH)
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[:, :, 40 + step :, :20] = False
    return {"input_ids": tokens, "labels": tokens, "attention_mask": mask}


def biased(step: int) -> Batch:
    """A mask of all pairs that is added."""
    batch = masked(step)
    batch["attention_mask"] = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~batch["attention_mask"], -1e9)
    return batch


def packed(step: int, length: int = 2 * LENGTH) -> Batch:
    """Sequences one after another in a row without padding: more with each step, at other places."""
    tokens = ids(step, 1, length)
    cuts = torch.randperm(length - 1, generator=torch.Generator().manual_seed(step))[: 1 + step % 4] + 1
    ends = [0, *sorted(cuts.tolist()), length]
    places = torch.cat([torch.arange(end - begin) for begin, end in itertools.pairwise(ends)])
    return {"input_ids": tokens, "labels": tokens, "position_ids": places[None]}


def packed_unevenly(step: int) -> Batch:
    """The same, each row of another length."""
    return packed(step, 2 * LENGTH - 16 * (step % 2))


def documents(step: int) -> Batch:
    """Which document each token is of."""
    tokens = ids(step, 2, LENGTH)
    begins = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(step)) < 0.1
    return {"input_ids": tokens, "labels": tokens, "documents": begins.cumsum(1)}


class Flex(nn.Module):
    """Two layers of flex attention, whose scores have a trained factor, within documents."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.head = nn.Embedding(96, 32), nn.Linear(32, 96)
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.factors = nn.Parameter(torch.ones(2))

    def forward(self, input_ids: Tensor, labels: Tensor, documents: Tensor) -> Any:
        """Attend, layer by layer."""
        x, factors = self.embed(input_ids), self.factors
        rows, length, _ = x.shape
        mask = flex.create_block_mask(
            lambda b, _h, q, k: (q >= k) & (documents[b, q] == documents[b, k]), rows, None, length, length,
            device="cpu",
        )  # fmt: skip
        for layer in self.layers:
            query, key, value = layer(x).view(rows, length, 3, 2, 16).permute(2, 0, 3, 1, 4)
            out = flex.flex_attention(
                query, key, value, lambda score, _b, h, _q, _k: score * factors[h], block_mask=mask
            )
            x = torch.tanh(x + out.transpose(1, 2).flatten(2))
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return {"loss": loss}


def llama() -> nn.Module:
    """With SDPA."""
    torch.manual_seed(1)
    return hugging_face.llama()


def train(
    build: Callable[[], nn.Module], batch: Callable[[int], Batch], policy: str | None = None, budget: int | None = None
) -> tuple[list[bytes], Report | None]:
    """Losses and gradients of a few steps, as bytes, and what the plugin reports."""
    model, found, memory = build(), list[bytes](), None
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with contextlib.ExitStack() as stack:
        if policy is not None:
            memory = MemoryPlugin(f"{budget}B" if budget else None, policy=policy, device="cpu", module=model)
            memory.attach()
            stack.callback(memory.detach)
        for step in range(NUM_STEPS):
            inputs = batch(step)
            with memory.step(inputs) if memory is not None else contextlib.nullcontext():
                loss = model(**inputs)["loss"]
                loss.backward()
            found.append(loss.detach().numpy().tobytes())
            found += [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        return found, memory.report() if memory is not None else None


def exact(build: Callable[[], nn.Module], batch: Callable[[int], Batch]) -> Report:
    """Train by every policy, each bit for bit as without; what was reported within a budget is returned."""
    expected, _ = train(build, batch)
    actual, report = train(build, batch, "all-swap")
    assert actual == expected
    assert train(build, batch, "all-recompute")[0] == expected
    assert report is not None
    assert report.floor_bytes is not None
    assert report.plain_peak_bytes is not None
    assert report.swapped_bytes > 0
    budget = (report.floor_bytes + report.plain_peak_bytes) // 2
    actual, report = train(build, batch, "auto", budget)
    assert actual == expected
    assert report is not None
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= budget
    return report


MASKS = [padded, biased, packed, packed_unevenly, *([masked] if is_all() else [])]
"""The last is of the same shapes as that which is added."""


@pytest.mark.parametrize("batch", MASKS)
def test_masks(batch: Callable[[int], Batch]) -> None:
    """Padding, masks of one's own, and packing that changes from step to step: much less than plain at the floor."""
    report = exact(llama, batch)
    assert report.floor_bytes is not None
    assert report.plain_peak_bytes is not None
    assert report.floor_bytes < 0.75 * report.plain_peak_bytes


def test_masks_in_python(in_python: None) -> None:
    """Without the native core."""
    exact(llama, packed)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.parametrize("engine", ["native", "python"])
def test_flex_attention_op_by_op(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator of higher order, whose gradient torch traces on fake tensors in each step.

    torch refuses its gradient on a CPU, where it is there all the same.
    """
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    if engine == "python":
        monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", engine)
    torch._dynamo.reset()
    exact(Flex, documents)
    torch._dynamo.reset()
