"""The models of the GPU suite with their batches: published architectures, randomly initialised, dropout on.

All run in full precision: TF32 is switched off for the process. Sizes are such that a step takes well above 50 ms
on a data-centre GPU, and such that what its activations take is several times the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads import Workload
from tests.zoo.models.plain_conv import VGG
from tests.zoo.models.resnet import ResNet

_NUM_CLASSES = 1000
_RESNETS = {"resnet50": (3, 4, 6, 3), "resnet152": (3, 8, 36, 3)}
_VGG19 = (2, 2, 4, 4, 4)
_BATCH_SIZES = {"resnet50": 128, "resnet152": 64, "vgg19": 64, "gpt2-medium": 4, "bert-large": 8, "vit-large": 32}


def workload(
    name: str, device: torch.device, *, quick: bool, batch_size: int | None = None, precision: str = "fp32"
) -> Workload:
    """Return a model with its batch.

    Args:
        name: Which model.
        device: Where it runs.
        quick: Whether a tiny model of the same kind will do.
        batch_size: Samples in the batch; the model's own size by default.
        precision: "fp32", or "bf16" for autocast.

    Raises:
        ValueError: If there is no such model or precision.
    """
    if name not in _BATCH_SIZES or precision not in ("fp32", "bf16"):
        raise ValueError(f"unknown {name!r} or {precision!r}; there are {', '.join(_BATCH_SIZES)}, in fp32 and bf16")
    without_tf32()
    torch.manual_seed(0)
    size = batch_size if batch_size is not None else (4 if quick else _BATCH_SIZES[name])
    with torch.device(device):
        model, batch, sizes = _build(name, size, quick=quick)
    loss = _image_loss if len(batch) == 2 else _token_loss
    return Workload(
        model=model.train(),
        batch=batch,
        loss=_under_bf16(loss) if precision == "bf16" else loss,
        config={"batch_size": size, **sizes, "precision": precision},
    )


def without_tf32() -> None:
    """Multiply in full precision."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def _build(name: str, size: int, *, quick: bool) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    if name in _RESNETS:
        side = 64 if quick else 224
        layers = (2, 2, 1) if quick else _RESNETS[name]
        model: nn.Module = ResNet(layers, bottleneck=True, width=16 if quick else 64)
        return model, _images(size, side), {"image_size": side}
    if name == "vgg19":
        side = 32 if quick else 224
        return _vgg19(quick=quick), _images(size, side), {"image_size": side}
    if name == "vit-large":
        model, side = _vit_large(quick=quick)
        return model, _images(size, side), {"image_size": side, "attention": "sdpa"}
    model, vocabulary, length = _language_model(name, quick=quick)
    tokens = torch.randint(0, vocabulary, (size, length))
    return model, (tokens,), {"length": length, "attention": "sdpa"}


def _images(size: int, side: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, side, side), torch.randint(0, _NUM_CLASSES, (size,))


def _vgg19(*, quick: bool) -> VGG:
    """Return the network with its convolutions grouped by stage, which changes nothing that it computes."""
    model = VGG((1, 1, 2), width=16, hidden=64, grid=2) if quick else VGG(_VGG19)
    stages: list[nn.Module] = []
    stage: list[nn.Module] = []
    for layer in model.features:
        stage.append(layer)
        if isinstance(layer, nn.MaxPool2d):
            stages.append(nn.Sequential(*stage))
            stage = []
    model.features = nn.Sequential(*stages)
    return model


def _vit_large(*, quick: bool) -> tuple[nn.Module, int]:
    from transformers import ViTConfig, ViTForImageClassification

    side = 32 if quick else 224
    config = ViTConfig(
        image_size=side, patch_size=8 if quick else 16, num_labels=_NUM_CLASSES,
        hidden_dropout_prob=0.1, attn_implementation="sdpa", **_encoder_sizes(quick=quick),
    )  # fmt: skip
    return ViTForImageClassification(config), side


def _encoder_sizes(*, quick: bool) -> dict[str, Any]:
    width, layers, heads = (64, 2, 2) if quick else (1024, 24, 16)
    return {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * width,
    }  # fmt: skip


def _language_model(name: str, *, quick: bool) -> tuple[nn.Module, int, int]:
    """Return the model, its vocabulary and the length of its sequences."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    if name == "bert-large":
        vocabulary, length = (500, 32) if quick else (30522, 512)
        config = BertConfig(vocab_size=vocabulary, attn_implementation="sdpa", **_encoder_sizes(quick=quick))
        return BertForMaskedLM(config), vocabulary, length
    vocabulary, length = (500, 32) if quick else (50257, 1024)
    width, layers, heads = (64, 2, 2) if quick else (1024, 24, 16)
    gpt2 = GPT2Config(
        vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=heads, use_cache=False, bos_token_id=0,
        eos_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    return GPT2LMHeadModel(gpt2), vocabulary, length


def _image_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    images, labels = batch
    scores = model(images)
    return F.cross_entropy(getattr(scores, "logits", scores), labels)


def _token_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Score each token against itself, shifted by one: what is learned does not matter here, its cost does."""
    (tokens,) = batch
    logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def _under_bf16(
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor],
) -> Callable[[nn.Module, tuple[Tensor, ...]], Tensor]:
    def mixed(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        with torch.autocast(batch[0].device.type, dtype=torch.bfloat16):
            return loss(model, batch)

    return mixed
