"""Models with a batch and a loss, as training steps of forward and backward; their plans, and what budgets lie between.

The optimizer's step is left out: it costs the same either way and would dilute ratios. Gradients start as
None in every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from examples.demo.data import NUM_CLASSES, load_images
from examples.models import ResNet
from examples.models.residual import Bottleneck
from lightning_offload import MemoryPlugin

_MAX_PLANNING_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and what it is trained on.

    Attributes:
        model: In training mode.
        batch: The inputs of every step.
        loss: Takes the model and the batch, returns a scalar.
        config: Sizes, ready for JSON.
    """

    model: nn.Module
    batch: tuple[Tensor, ...]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    config: dict[str, Any]

    def step(self, context: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """Run forward and backward inside a fresh `context()`."""
        self.model.zero_grad(set_to_none=True)
        with context():
            self.loss(self.model, self.batch).backward()

    def managed_step(self, memory: MemoryPlugin) -> None:
        """Run one under a plugin."""
        self.step(functools.partial(memory.step, *self.batch))

    def limits(self) -> Limits:
        """Return the limits of the step."""
        return learn_limits(self.model, self.managed_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Between which peaks the budgets of a step lie, and what autograd saves in it."""

    floor_bytes: int
    plain_peak_bytes: int
    saved_bytes: int

    def budget(self, height: float) -> int:
        """Return the budget at a height between the floor (0) and the plain peak (1)."""
        return self.floor_bytes + round(height * (self.plain_peak_bytes - self.floor_bytes))

    def roomy(self) -> int:
        """Return a budget that the plain step fits in."""
        return round(1.1 * self.plain_peak_bytes)

    def height(self, peak_bytes: int) -> float:
        """Return where a peak lies between the floor (0) and the plain peak (1)."""
        return (peak_bytes - self.floor_bytes) / max(1, self.plain_peak_bytes - self.floor_bytes)


def learn_limits(model: nn.Module, step: Callable[[MemoryPlugin], None]) -> Limits:
    """Return the limits of a model's step, from a few steps that keep everything.

    Args:
        model: The model.
        step: Runs a step of it under a plugin.

    Raises:
        RuntimeError: They are not known after that.
    """
    with MemoryPlugin("1TiB", module=model) as memory:
        plan_steps(memory, functools.partial(step, memory))
        report = memory.report()
    if report.floor_bytes is None or report.plain_peak_bytes is None:
        raise RuntimeError("the plugin planned a step without knowing its floor and its plain peak")
    return Limits(
        floor_bytes=report.floor_bytes, plain_peak_bytes=report.plain_peak_bytes, saved_bytes=report.kept_bytes
    )


def plan_steps(memory: MemoryPlugin, step: Callable[[], None], *, at_least: int = 1) -> None:
    """Run steps until the plan is final.

    Args:
        memory: The plugin.
        step: Runs a step under it.
        at_least: How many are run in any case: stalls may still change a plan that is final.

    Raises:
        RuntimeError: There is no such plan after many steps.
    """
    for index in range(_MAX_PLANNING_STEPS):
        step()
        if index + 1 >= at_least and memory.report().phase == "planned":
            return
    phase = memory.report().phase
    raise RuntimeError(f"no final plan after {_MAX_PLANNING_STEPS} steps, but '{phase}'; is LIGHTNING_OFFLOAD=0 set?")


def demo_resnet(device: torch.device, *, quick: bool) -> Workload:
    """Return the demo's ResNet-50 on its digits."""
    batch_size, size, width, blocks = (4, 32, 8, (1, 1)) if quick else (64, 64, 64, (3, 4, 6, 3))
    torch.manual_seed(0)
    model = ResNet(blocks, num_classes=NUM_CLASSES, width=width)
    images, labels = (tensor.clone() for tensor in load_images(size, limit=batch_size))  # a batch is the device's
    return Workload(
        model=model.to(device),
        batch=(images.to(device), labels.to(device)),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        config={
            "batch_size": batch_size,
            "image_size": size,
            "width": width,
            "num_blocks": sum(isinstance(module, Bottleneck) for module in model.modules()),
        },
    )


def gpt2(device: torch.device, *, quick: bool) -> Workload:
    """Return a randomly initialised GPT-2 (Hugging Face's) on random tokens, dropout on."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads, vocabulary, length, batch_size = (
        (2, 64, 2, 500, 32, 2) if quick else (12, 768, 12, 50257, 256, 4)
    )
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    sizes = {"num_layers": layers, "width": width, "attention": str(model.config._attn_implementation)}
    return _on_tokens(model, vocabulary, (batch_size, length), device, sizes)


def transformer(name: str, device: torch.device, *, quick: bool) -> Workload:
    """Return a language model of six layers of width 512, randomly initialised, on random tokens.

    Args:
        name: "gpt2" or "bert", with their dropout, or "llama", with grouped queries and without dropout.
        device: Where it runs.
        quick: Whether a tiny one will do.
    """
    layers, width, heads, vocabulary, length, batch_size = (
        (2, 64, 2, 500, 32, 2) if quick else (6, 512, 8, 8192, 256, 2)
    )
    torch.manual_seed(0)
    model = _transformer(name, layers, width, heads, vocabulary, length)
    return _on_tokens(model, vocabulary, (batch_size, length), device, {"num_layers": layers, "width": width})


def _on_tokens(
    model: nn.Module, vocabulary: int, shape: tuple[int, int], device: torch.device, sizes: dict[str, Any]
) -> Workload:
    """A language model on random tokens."""
    model = model.train().to(device)
    batch_size, length = shape
    return Workload(
        model=model,
        batch=(torch.randint(0, vocabulary, shape, device=device),),
        loss=_language_model_loss,
        config={"batch_size": batch_size, "length": length, "vocabulary": vocabulary, **sizes},
    )


def _transformer(name: str, layers: int, width: int, heads: int, vocabulary: int, length: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"vocab_size": vocabulary, "max_position_embeddings": length}
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(use_cache=False, bos_token_id=0, eos_token_id=0, **sizes))
    if name == "bert":
        return BertForMaskedLM(BertConfig(intermediate_size=4 * width, **sizes))
    return LlamaForCausalLM(
        LlamaConfig(intermediate_size=8 * width // 3, num_key_value_heads=heads // 2, use_cache=False, **sizes)
    )


def _language_model_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    (tokens,) = batch
    logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def many_ops(device: torch.device, *, num_elements: int, quick: bool) -> Workload:
    """Return a chain of element-wise ops, where the host's work per op is what counts.

    Args:
        device: Where it runs.
        num_elements: Elements of each tensor.
        quick: Whether a short chain will do.
    """
    length = 10 if quick else 200
    torch.manual_seed(0)
    return Workload(
        model=_ManyOps(length).to(device),
        batch=(torch.randn(num_elements, device=device),),
        loss=lambda model, batch: model(batch[0]).sum(),
        config={"num_elements": num_elements, "length": length},
    )


class _ManyOps(nn.Module):
    """A chain of cheap ops that all save something for backward."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.length):
            x = torch.sin(x * self.scale)
        return x


def small_layers(device: torch.device, *, quick: bool) -> Workload:
    """Return a stack of transformer layers whose every op is tiny, dropout on.

    Args:
        device: Where it runs.
        quick: Whether two layers will do.
    """
    num_layers, width, batch_size, length = (2 if quick else 24), 16, 4, 8
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True) for _ in range(num_layers)]
    return Workload(
        model=nn.Sequential(*layers).to(device),
        batch=(torch.randn(batch_size, length, width, device=device),),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        config={"num_layers": num_layers, "width": width, "batch_size": batch_size, "length": length},
    )


def recurrence(device: torch.device, *, quick: bool) -> Workload:
    """Return a gated recurrence unrolled in Python: 17,000 ops on a few elements each, forward and backward.

    Args:
        device: Where it runs.
        quick: Whether a few steps of it will do.
    """
    length, width, batch_size = (4 if quick else 386), 16, 4
    torch.manual_seed(0)
    return Workload(
        model=_Recurrence(width, length).to(device),
        batch=(torch.randn(batch_size, width, device=device),),
        loss=lambda model, batch: model(batch[0]).sum(),
        config={"batch_size": batch_size, "width": width, "length": length},
    )


class _Recurrence(nn.Module):
    """A gated cell that reads the same input again and again."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.of_input = nn.Linear(width, 2 * width)
        self.of_state = nn.Linear(width, 2 * width)
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for _ in range(self.length):
            gate, new = (self.of_input(x) + self.of_state(state)).chunk(2, -1)
            gate = torch.sigmoid(gate)
            state = (1 - gate) * torch.tanh(new) + gate * state
        return state


class _OpCounter(TorchDispatchMode):
    num_ops: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += 1
        return func(*args, **(kwargs or {}))


def count_ops(workload: Workload) -> int:
    """Return the number of ops that forward and backward of one plain step dispatch."""
    counter = _OpCounter()  # type: ignore[no-untyped-call]
    with counter:
        workload.step()
    return counter.num_ops
