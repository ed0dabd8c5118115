"""The example models are the published ones: parameters to the last one, and shapes, at full size on fake tensors."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from examples import models
from examples.models import MODELS
from examples.models.plain import ResponseNorm
from examples.models.registry import Example, image_example, seq2seq_example

SIZES = {
    "alexnet": 62_378_344,
    "bert-large-eager": 335_174_458,
    "bert-large-sdpa": 335_174_458,
    "gpt2-eager": 124_439_808,
    "gpt2-sdpa": 124_439_808,
    "gpt2-medium-eager": 354_823_168,
    "gpt2-medium-sdpa": 354_823_168,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnet200": 64_673_832,
    "resnet1202-cifar": 19_421_274,
    "t5-small": 60_506_624,
    "vgg16": 138_357_544,
    "vgg16-bn": 138_365_992,
    "vgg19": 143_667_240,
    "vgg19-bn": 143_678_248,
    "vit-l-16": 304_326_632,
}
"""Parameters: He et al. and torchvision for ResNet and VGG, Hugging Face for the language models. AlexNet's are those
of its eight layers without groups, ResNet-1202's those of its 1,202 without projections."""


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def check_learns(
    example: Example, model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, *, num_steps: int
) -> None:
    """The loss of one batch is halved."""
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = example.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_parameters_of_the_published_size(subtests: pytest.Subtests) -> None:
    """A model has as many parameters as the published one; tied ones count once."""
    for name in sorted(SIZES):
        with subtests.test(name=name), torch.device("meta"):
            assert num_parameters(MODELS[name].build()) == SIZES[name]


def test_parameters_of_the_translation_model() -> None:
    """Embeddings, four gates of each LSTM with two biases, three projections of the attention, and the head."""
    vocabulary, hidden = 100, 8
    with FakeTensorMode():
        model = models.seq2seq_attention(vocabulary=vocabulary, hidden=hidden, layers=2)
    lstm = 4 * (2 * hidden * hidden + 2 * hidden)
    decoder = 4 * (3 * hidden * hidden + 2 * hidden)
    attention = 2 * hidden * hidden + 2 * hidden
    assert num_parameters(model) == 2 * vocabulary * hidden + 2 * lstm + decoder + attention + (hidden + 1) * vocabulary


@pytest.mark.parametrize("blocks", [(1, 1, 1, 1), (6, 32, 12, 6)])
def test_depth_of_a_residual_network(blocks: tuple[int, int, int, int]) -> None:
    """A network has 3 (n1 + n2 + n3 + n4) + 2 layers with weights, projections aside."""
    with FakeTensorMode():
        model = models.resnet(*blocks)
    weighted = [
        name for name, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear)) and "shortcut" not in name
    ]
    assert len(weighted) == 3 * sum(blocks) + 2


def test_narrow_residual_network() -> None:
    """Another width and number of stages: the stem divides by four, each stage but the first by two."""
    network = models.ResNet((1, 2), num_classes=10, width=4)
    images = torch.randn(3, 3, 32, 32)
    assert network(images).shape == (3, 10)
    assert network.stages(network.stem(images)).shape == (3, 4 * 2 * 4, 4, 4)


@pytest.mark.parametrize("pre_activation", [False, True])
def test_depth_of_a_cifar_network(pre_activation: bool) -> None:
    """A network of depth 6 n + 2 has as many layers with weights, in both orders of activation."""
    model = models.resnet_cifar(20, pre_activation=pre_activation)
    assert sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in model.modules()) == 20
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_impossible_depth_is_named() -> None:
    """A depth that is not 6 n + 2 is refused with the rule."""
    with pytest.raises(ValueError, match=r"depth 21 is not 6 n \+ 2"):
        models.resnet_cifar(21)


def test_unknown_attention_is_named() -> None:
    """An attention implementation that does not exist is refused with those that do."""
    with pytest.raises(ValueError, match=r"'flash'; choose one of eager, sdpa"):
        models.gpt2(attention="flash")


@pytest.mark.parametrize("name", sorted({"resnet50", "vgg16", "vgg19-bn", "alexnet", "vit-l-16", "resnet1202-cifar"}))
def test_scores_of_images(name: str) -> None:
    """A classifier gives each image of its example a score for each class."""
    example = MODELS[name]
    with FakeTensorMode(), torch.no_grad():
        images, labels = example.inputs(3, torch.float32)
        scores = example.build()(images)
    assert images.shape[0] == labels.shape[0] == 3
    assert scores.shape == (3, 10 if name == "resnet1202-cifar" else 1000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["resnet50", "gpt2-eager", "bert-large-sdpa", "t5-small"])
def test_step_gives_every_parameter_a_gradient(name: str, dtype: torch.dtype) -> None:
    """A recorded step runs forward and backward in the type that was asked for, in training mode."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, step = MODELS[name].step(batch_size=2, dtype=dtype)()
        assert model.training
        step()
        gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.dtype == dtype for gradient in gradients)
    assert torch.get_default_dtype() == torch.float32


def test_response_normalisation_is_that_of_pytorch() -> None:
    """AlexNet's normalisation has the values and gradients of PyTorch's, and saves one tensor instead of several."""
    torch.manual_seed(0)
    x = (3 * torch.randn(5, 12, 4, 3, dtype=torch.double)).requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.detach()) or t, lambda t: t):
        ours = ResponseNorm(5)(x)
    assert [tuple(t.shape) for t in saved] == [(5, 12, 4, 3)]
    expected = nn.LocalResponseNorm(5)(x)
    torch.testing.assert_close(ours, expected)
    weights = torch.randn_like(ours)
    (gradient,) = torch.autograd.grad((ours * weights).sum(), x)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), x)
    torch.testing.assert_close(gradient, expected_gradient)


def test_fused_attention_saves_no_weights() -> None:
    """Eager attention saves its weights, heads x length x length; the fused kernel recomputes them."""
    sizes = {}
    for name in ("gpt2-eager", "gpt2-sdpa"):
        example, saved = MODELS[name], []

        def pack(tensor: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(tensor.detach())
            return tensor

        small = dataclasses.replace(example, build=functools.partial(example.build, layers=1))
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = small.build().train()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                small.loss(model, small.inputs(2, torch.float32))
        sizes[name] = {tuple(tensor.shape) for tensor in saved}
    weights = (2, 12, 1024, 1024)
    assert weights in sizes["gpt2-eager"]
    assert weights not in sizes["gpt2-sdpa"]


def test_translation_model_learns_by_teacher_forcing() -> None:
    """The translation model scores each target position, saves source x target states, and its loss falls."""
    torch.manual_seed(0)
    example = seq2seq_example(length=6, hidden=16, vocabulary=20)
    model = example.build().train()
    batch = example.inputs(4, torch.float32)
    assert model(*batch).shape == (4, 6, 20)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    check_learns(example, model, batch, optimizer, num_steps=30)


def test_small_network_learns_from_images() -> None:
    """A residual network of the smallest depth learns one batch by heart."""
    torch.manual_seed(0)
    example = image_example(functools.partial(models.resnet, 1, 1, 1, 1, num_classes=4), 4, side=32, num_classes=4)
    model, batch = example.build().train(), example.inputs(4, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    check_learns(example, model, batch, optimizer, num_steps=12)
