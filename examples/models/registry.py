"""The models by name, each with a batch and a loss: one training step to run, to time or to record.

example = MODELS["resnet152"]
graph = record_fake_step(example.step(batch_size=64), device_spec)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.models import attention, cifar, language, plain, residual, vit

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A model and what a step of it needs.

    Attributes:
        build: Makes the model.
        inputs: Makes a batch of a size; images are of the given type, tokens are integers.
        loss: Runs the model on a batch.
        batch_size: A usual size.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.dtype], Inputs]
    loss: Callable[[nn.Module, Inputs], Tensor]
    batch_size: int

    def step(
        self, batch_size: int | None = None, dtype: torch.dtype = torch.float32
    ) -> Callable[[], tuple[nn.Module, Callable[[], None]]]:
        """Return what makes the model, in training mode, and a step of it (forward and backward).

        Args:
            batch_size: Samples in the batch; the model's usual size by default.
            dtype: Of the weights, the images and all that is computed.
        """

        def make() -> tuple[nn.Module, Callable[[], None]]:
            with default_dtype(dtype):
                model = self.build().train()
            inputs = self.inputs(batch_size or self.batch_size, dtype)
            return model, lambda: self.loss(model, inputs).backward()

        return make


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new floating-point tensors of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _images(batch_size: int, dtype: torch.dtype, *, side: int = 224, num_classes: int = 1000) -> Inputs:
    return torch.randn(batch_size, 3, side, side, dtype=dtype), torch.randint(0, num_classes, (batch_size,))


def _image_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    images, labels = inputs
    return F.cross_entropy(model(images), labels)


def _tokens(batch_size: int, dtype: torch.dtype, *, vocabulary: int, length: int) -> Inputs:
    return (torch.randint(0, vocabulary, (batch_size, length)),)


def _token_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    """Score each token against the next one: what is learned does not matter here, its cost does."""
    (tokens,) = inputs
    return _cross_entropy(model(input_ids=tokens).logits, tokens.roll(-1, 1))


def _sentences(batch_size: int, dtype: torch.dtype, *, vocabulary: int, length: int) -> Inputs:
    shape = (batch_size, length)
    return torch.randint(0, vocabulary, shape), torch.randint(0, vocabulary, shape)


def _translation_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    source, target = inputs
    if isinstance(model, attention.Seq2SeqAttention):
        scores = model(source, target)
    else:
        scores = model(input_ids=source, decoder_input_ids=target).logits
    return _cross_entropy(scores, target.roll(-1, 1))


def _cross_entropy(scores: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def image_example(build: Callable[..., nn.Module], batch_size: int, **sizes: Any) -> Example:
    """Return the example of a classifier of images; `sizes` may hold `side` and `num_classes`."""
    inputs = functools.partial(_images, **sizes)
    return Example(build=build, inputs=inputs, loss=_image_loss, batch_size=batch_size)


def seq2seq_example(*, length: int, hidden: int = 1024, vocabulary: int = 16_000, batch_size: int = 64) -> Example:
    """Return the example of a translation model on sentences of a length."""
    return Example(
        build=functools.partial(attention.seq2seq_attention, vocabulary=vocabulary, hidden=hidden),
        inputs=functools.partial(_sentences, vocabulary=vocabulary, length=length),
        loss=_translation_loss,
        batch_size=batch_size,
    )


def _attention(implementation: str) -> dict[str, Any]:
    """The fused kernel goes without dropout: with it, PyTorch has none on a CPU, fake or not, and does eager's ops."""
    rate = 0.0 if implementation == "sdpa" else 0.1
    return {"attention": implementation, "attention_dropout": rate}


def _gpt2(build: Callable[..., nn.Module], implementation: str, batch_size: int) -> Example:
    return Example(
        build=functools.partial(build, **_attention(implementation)),
        inputs=functools.partial(_tokens, vocabulary=50_257, length=1024),
        loss=_token_loss,
        batch_size=batch_size,
    )


def _bert(implementation: str) -> Example:
    return Example(
        build=functools.partial(language.bert_large, **_attention(implementation)),
        inputs=functools.partial(_tokens, vocabulary=30_522, length=512),
        loss=_token_loss,
        batch_size=8,
    )


MODELS: dict[str, Example] = {
    "alexnet": image_example(plain.alexnet, 128, side=227),
    "bert-large-eager": _bert("eager"),
    "bert-large-sdpa": _bert("sdpa"),
    "gpt2-eager": _gpt2(language.gpt2, "eager", 8),
    "gpt2-sdpa": _gpt2(language.gpt2, "sdpa", 8),
    "gpt2-medium-eager": _gpt2(language.gpt2_medium, "eager", 4),
    "gpt2-medium-sdpa": _gpt2(language.gpt2_medium, "sdpa", 4),
    "resnet50": image_example(residual.resnet50, 128),
    "resnet101": image_example(residual.resnet101, 64),
    "resnet152": image_example(residual.resnet152, 64),
    "resnet200": image_example(residual.resnet200, 32),
    "resnet1202-cifar": image_example(cifar.resnet_cifar, 64, side=32, num_classes=10),
    "seq2seq-attention": seq2seq_example(length=50),
    "t5-small": Example(
        build=language.t5_small,
        inputs=functools.partial(_sentences, vocabulary=32_128, length=512),
        loss=_translation_loss,
        batch_size=8,
    ),
    "vgg16": image_example(plain.vgg16, 64),
    "vgg16-bn": image_example(plain.vgg16_bn, 64),
    "vgg19": image_example(plain.vgg19, 64),
    "vgg19-bn": image_example(plain.vgg19_bn, 64),
    "vit-l-16": image_example(vit.vit_l_16, 32),
}
"""By name."""
