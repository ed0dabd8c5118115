"""Public measurements of training steps, each as its source has it.

Only figures of one GPU (or of shards that hardly talk, where the note says so) whose model, batch and precision the
source or its scripts state. A throughput is turned into the seconds of one step. Rows are named by what was measured;
sorted by name, every second one is held out of the fit (`is_held`), so nobody chooses which.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lightning_offload.graph.cards import Card
from lightning_offload.graph.catalog import DType, find_card

Precision = Literal["float32", "tf32", "amp"]
Optimizer = Literal["none", "sgd", "adam"]
Casting = Literal["autocast", "model"]
Layout = Literal["nchw", "nhwc"]

DTYPES: dict[Precision, DType] = {"float32": "float32", "tf32": "tf32", "amp": "float16"}
"""The catalogue's type, by precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Public:
    """A measured training step.

    Attributes:
        model: Name in `benchmarks.calibration.models.MODELS`.
        batch_size: Samples in the step.
        precision: Arithmetic of products and convolutions: float32 outside of tensor cores, TF32, or half precision
            with float32 weights.
        card: Name of the GPU, in the catalogue or in `MORE_CARDS`.
        seconds: What the step took.
        optimizer: Whose update the figure includes.
        source: Key of `SOURCES`.
        casting: Under AMP, whether autocast casts op by op, or all of the model is in half precision (Apex' O2).
        layout: Of images; tensor cores convolve nhwc, and cuDNN transposes to it and back.
        figure: The figure as it stands there.
        note: How it is unlike what is predicted, if it is.
    """

    model: str
    batch_size: int
    precision: Precision
    card: str
    seconds: float
    optimizer: Optimizer
    source: str
    figure: str
    note: str = ""
    casting: Casting = "autocast"
    layout: Layout = "nchw"

    @property
    def name(self) -> str:
        """What it is called in tables, and what decides whether it is held out."""
        return f"{self.model} b{self.batch_size} {self.precision} {self.card} ({self.source})"

    @property
    def step(self) -> str:
        """Name of what is recorded, which several cards share."""
        types = {"autocast": "amp", "model": "half"}[self.casting] if self.precision == "amp" else "float32"
        return f"{self.model} b{self.batch_size} {types}"


SOURCES = {
    "cnn-benchmarks": (
        "github.com/jcjohnson/cnn-benchmarks, README: Torch 7, CUDA 8.0 RC, cuDNN 5.0.05, NCHW; total of forward "
        "and backward"
    ),
    "convnet-benchmarks": (
        "github.com/soumith/convnet-benchmarks, README: Torch 7, cuDNN R4, NCHW; total of forward and backward"
    ),
    "DeepLearningExamples": (
        "github.com/NVIDIA/DeepLearningExamples, PyTorch: README of ConvNets/resnet50v1.5 (container 21.03; batches "
        "of ConvNets/configs.yml; AMP channels-last) and of LanguageModeling/BERT (container 21.11; SQuAD, 384 tokens)"
    ),
    "Lambda": (
        "github.com/lambdal/deeplearning-benchmark, pytorch/pytorch-train-throughput-fp16.csv and -fp32.csv, batches "
        "of pytorch-train-bs-*.csv: DeepLearningExamples in container 22.09; fp32 is TF32 from Ampere on"
    ),
    "timm": (
        "github.com/huggingface/pytorch-image-models, results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv: "
        "PyTorch 1.12, CUDA 11.3, AMP, channels-last, SGD"
    ),
    "llm-foundry": (
        "github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md: bf16 AMP, FlashAttention, FSDP over "
        "the 8 GPUs of a node; step of one micro-batch from tokens per second and GPU"
    ),
    "nanoGPT": "github.com/karpathy/nanoGPT, README of 2022-12-30 and the defaults of its scripts at that commit",
}
"""By key: where the figures are from."""

_TESLA = find_card("v100-16gb")
MORE_CARDS = {
    card.name: card
    for card in (
        Card(
            name="gtx-1080", title="GeForce GTX 1080", generation="pascal",
            memory_bytes=8 << 30, memory_bytes_per_second=320e9,
            float32=8.87e12, float16=8.87e12, bfloat16=8.87e12, compute_capability=61, link=_TESLA.link,
            source="NVIDIA, GeForce GTX 1080 whitepaper, 2016 (2560 cores at a boost of 1733 MHz)",
            memory_source="nominal size, from the same whitepaper",
        ),
        Card(
            name="rtx-8000", title="Quadro RTX 8000", generation="turing",
            memory_bytes=48 << 30, memory_bytes_per_second=672e9,
            float32=16.3e12, float16=130.5e12, bfloat16=16.3e12, compute_capability=75, link=_TESLA.link,
            source="NVIDIA, Turing GPU Architecture whitepaper, 2018",
            memory_source="nominal size, from the same whitepaper",
        ),
        Card(
            name="h100-pcie", title="NVIDIA H100 PCIe 80GB", generation="hopper",
            memory_bytes=80 << 30, memory_bytes_per_second=2000e9,
            float32=51e12, float16=756.5e12, bfloat16=756.5e12, tf32=378e12, compute_capability=90,
            link=find_card("h100").link,
            source="NVIDIA, H100 Tensor Core GPU datasheet, 2023 (half of the figures with sparsity)",
            memory_source="nominal size, from the same datasheet",
        ),
    )
}  # fmt: skip
"""Cards that were measured publicly and are not in the catalogue, by name."""


def card_of(row: Public) -> Card:
    """The figures of the card that a row was measured on."""
    return MORE_CARDS.get(row.card) or find_card(row.card)


def rows() -> tuple[Public, ...]:
    """All measurements, sorted by name."""
    found = [*_cnn(), *_convnet(), *_deep_learning_examples(), *_lambda(), *_timm(), *_llm_foundry(), *_nano_gpt()]
    return tuple(sorted(found, key=lambda row: row.name))


def is_held(index: int) -> bool:
    """Whether the row at a place among all rows, sorted by name, is held out of the fit: every second one is."""
    return index % 2 == 1


def _cnn() -> Iterator[Public]:
    """Milliseconds on a batch of 16."""
    milliseconds = {
        "vgg16": (920.21, 262.42, 232.55),
        "vgg19": (1129.65, 323.40, 281.69),
        "resnet18": (168.30, 53.84, 47.07),
        "resnet34": (303.80, 91.94, 79.70),
        "resnet50": (449.90, 171.02, 153.90),
        "resnet101": (797.89, 260.12, 235.33),
        "resnet152": (1146.73, 366.97, 328.90),
    }
    for model, figures in milliseconds.items():
        for card, figure in zip(("k40c", "gtx-titan-x", "gtx-1080"), figures, strict=True):
            yield Public(
                model=model, batch_size=16, precision="float32", card=card, seconds=figure / 1e3, optimizer="none",
                source="cnn-benchmarks", figure=f"{figure:.2f} ms",
            )  # fmt: skip


def _convnet() -> Iterator[Public]:
    for model, batch_size, figure in (("alexnet-owt", 128, 81), ("vgg11", 64, 529)):
        yield Public(
            model=model, batch_size=batch_size, precision="float32", card="gtx-titan-x", seconds=figure / 1e3,
            optimizer="none", source="convnet-benchmarks", figure=f"{figure} ms",
            note="the source leaves dropout and softmax out",
        )  # fmt: skip


def _deep_learning_examples() -> Iterator[Public]:
    """Images and sequences per second of one GPU."""
    figures: tuple[tuple[str, int, Precision, str, float], ...] = (
        ("resnet50", 256, "tf32", "a100-80gb", 938),
        ("resnet50", 256, "amp", "a100-80gb", 2470),
        ("resnet50", 112, "float32", "v100-16gb", 367),
        ("resnet50", 256, "amp", "v100-16gb", 1200),
        ("bert-large-squad", 32, "tf32", "a100-80gb", 61.5),
        ("bert-large-squad", 32, "amp", "a100-80gb", 110.5),
        ("bert-large-squad", 8, "float32", "v100-32gb", 12),
        ("bert-large-squad", 16, "amp", "v100-32gb", 52),
    )
    for model, batch_size, precision, card, rate in figures:
        yield Public(
            model=model, batch_size=batch_size, precision=precision, card=card, seconds=batch_size / rate,
            optimizer="adam" if "bert" in model else "sgd", source="DeepLearningExamples", figure=f"{rate:g}/s",
            casting="model" if "bert" in model else "autocast", layout="nhwc" if precision == "amp" else "nchw",
        )  # fmt: skip


def _lambda() -> Iterator[Public]:
    """Batch and rate in float32 or TF32, and under AMP, of ResNet-50 and of BERT base and large on SQuAD."""
    models = ("resnet50", "bert-base-squad", "bert-large-squad")
    figures = {
        "v100-16gb": (((128, 369), (24, 42), (8, 12)), ((256, 833), (48, 189), (16, 57))),
        "rtx-8000": (((496, 274), (96, 41), (32, 12)), ((928, 651), (192, 146), (64, 50))),
        "3090": (((224, 513), (48, 85), (16, 24)), ((448, 905), (96, 172), (28, 52))),
        "a100-80gb": (((640, 1066), (172, 239), (64, 75)), ((1280, 1582), (320, 443), (112, 152))),
        "4090": (((224, 721), (48, 137), (16, 44)), ((448, 1301), (96, 297), (28, 93))),
        "h100-pcie": (((640, 1197), (172, 292), (64, 97)), ((1280, 1866), (320, 567), (112, 203))),
        "h100": (((640, 1753), (172, 408), (64, 141)), ((1280, 2616), (320, 812), (112, 301))),
    }
    note = "batch of the 80 GB template: the table of batches does not list this card"
    for card, (full, half) in figures.items():
        single: Precision = "float32" if card in ("v100-16gb", "rtx-8000") else "tf32"
        for precision, measured in ((single, full), ("amp", half)):
            for model, (batch_size, rate) in zip(models, measured, strict=True):
                yield Public(
                    model=model, batch_size=batch_size, precision=precision, card=card, seconds=batch_size / rate,
                    optimizer="adam" if "bert" in model else "sgd", source="Lambda", figure=f"{rate:g}/s",
                    note=note if card == "h100" else "", casting="model" if "bert" in model else "autocast",
                )  # fmt: skip


def _timm() -> Iterator[Public]:
    """Batch and milliseconds a step on an RTX 3090."""
    figures = {
        "resnet18": (512, 146.713),
        "resnet34": (512, 250.813),
        "resnet50": (512, 419.528),
        "resnet101": (256, 340.740),
        "resnet152": (192, 380.547),
        "wide-resnet50-2": (512, 573.358),
        "resnext50-32x4d": (384, 382.776),
        "vgg16": (384, 702.994),
        "vgg16-bn": (256, 543.999),
        "densenet121": (256, 278.353),
        "mobilenetv2": (512, 220.563),
        "convnext-tiny": (256, 311.536),
        "mixer-b16": (256, 459.152),
        "vit-s16": (384, 362.157),
        "vit-b16": (192, 487.729),
        "vit-l16": (64, 544.512),
    }
    for model, (batch_size, figure) in figures.items():
        yield Public(
            model=model, batch_size=batch_size, precision="amp", card="3090", seconds=figure / 1e3, optimizer="sgd",
            source="timm", figure=f"{figure:.1f} ms", layout="nhwc",
        )  # fmt: skip


def _llm_foundry() -> Iterator[Public]:
    """Micro-batch, and tokens per second and GPU, on sequences of 2048 tokens."""
    figures = (
        ("mpt-125m", "a100-80gb", 32, 141_737),
        ("mpt-350m", "a100-80gb", 32, 58_782),
        ("mpt-760m", "a100-80gb", 24, 32_434),
        ("mpt-1b", "a100-80gb", 14, 20_513),
        ("mpt-760m", "h100", 24, 63_147),
        ("mpt-1b", "h100", 14, 45_455),
    )
    for model, card, batch_size, rate in figures:
        yield Public(
            model=model, batch_size=batch_size, precision="amp", card=card, seconds=batch_size * 2048 / rate,
            optimizer="none", source="llm-foundry", figure=f"{rate:,} tokens/s a GPU", casting="model",
            note="8 GPUs: gathering shards and the optimizer's eighth are not modelled",
        )  # fmt: skip


def _nano_gpt() -> Iterator[Public]:
    yield Public(
        model="gpt2-nanogpt", batch_size=8, precision="amp", card="a100-40gb", seconds=0.250, optimizer="adam",
        source="nanoGPT", figure="~250 ms",
        note="without torch.compile; the README names neither card nor batch: an A100 40GB and 8 x 1024 are assumed",
    )  # fmt: skip
