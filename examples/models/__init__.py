"""Published architectures in plain PyTorch: what examples, benchmarks and the command line train and plan.

Every factory is called without arguments for the published size, or with keywords for another, and returns an
`nn.Module` with random weights: `lightning-offload plan examples.models:resnet152 --input 3x224x224`. The language
models are made from Hugging Face configurations; transformers is imported when one is built. Nothing is downloaded
and torchvision is not needed. :data:`MODELS` adds to each a batch and a loss, so that one training step can be run
or recorded.
"""

from __future__ import annotations

from examples.models.attention import Seq2SeqAttention, seq2seq_attention
from examples.models.cifar import CifarResNet, resnet_cifar
from examples.models.language import bert_large, gpt2, gpt2_medium, t5_small
from examples.models.plain import VGG, AlexNet, alexnet, vgg16, vgg16_bn, vgg19, vgg19_bn
from examples.models.registry import MODELS, Example
from examples.models.residual import ResNet, resnet, resnet50, resnet101, resnet152, resnet200
from examples.models.vit import ViT, vit_l_16

__all__ = [
    "MODELS",
    "VGG",
    "AlexNet",
    "CifarResNet",
    "Example",
    "ResNet",
    "Seq2SeqAttention",
    "ViT",
    "alexnet",
    "bert_large",
    "gpt2",
    "gpt2_medium",
    "resnet",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet200",
    "resnet_cifar",
    "seq2seq_attention",
    "t5_small",
    "vgg16",
    "vgg16_bn",
    "vgg19",
    "vgg19_bn",
    "vit_l_16",
]
