"""Networks as the papers count them: layers in the order of execution, each with one output tensor.

A layer's backward reads some of its input x and its output y, besides the output's gradient; it makes the input's
gradient, in the output's own where that is done in place (SuperNeurons, PPoPP 2018, sections 3 and 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["conv", "fc", "act", "lrn", "bn", "pool", "dropout", "softmax", "join", "fork"]

_ELEMENT_BYTES = 4
_CHECKPOINTS = {"conv", "fc", "join", "fork", "softmax"}
_READS_INPUT = {"conv", "fc", "act", "lrn", "bn", "pool"}
_READS_OUTPUT = {"act", "lrn", "pool", "softmax"}
_IN_PLACE = {"act", "lrn", "softmax"}
DATA = -1
"""Input of the first layer: the batch, which is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer.

    Attributes:
        name: As in the paper, such as "LRN1".
        kind: What it does.
        inputs: Indices of the layers whose outputs it reads; :data:`DATA` for the batch.
        num_bytes: Size of its output.
        input_bytes: Size of its (first) input.
    """

    name: str
    kind: Kind
    inputs: tuple[int, ...]
    num_bytes: int
    input_bytes: int

    @property
    def is_checkpoint(self) -> bool:
        """Whether its output is never recomputed."""
        return self.kind in _CHECKPOINTS

    @property
    def reads_input(self) -> bool:
        """Whether its backward reads its input."""
        return self.kind in _READS_INPUT

    @property
    def reads_output(self) -> bool:
        """Whether its backward reads its output."""
        return self.kind in _READS_OUTPUT

    @property
    def gradient_bytes(self) -> int:
        """Size of the gradient tensor that its backward makes: none in place, nor where it is handed on."""
        return 0 if self.kind in _IN_PLACE or self.kind in ("join", "fork") else self.input_bytes


class Network:
    """Builds layers one after another; sizes are of one batch.

    Args:
        batch_size: Samples in the batch.
        image: Channels and side of an image.
    """

    def __init__(self, batch_size: int, image: tuple[int, int]) -> None:
        self.layers: list[Layer] = []
        self._batch_size = batch_size
        self._shapes: dict[int, tuple[int, int]] = {DATA: image}

    def add(
        self, kind: Kind, name: str = "", *, channels: int = 0, side: int = 0, inputs: tuple[int, ...] | None = None
    ) -> int:
        """Add a layer behind `inputs`, by default the last one, and return its index.

        Channels and side are those of its input where they are 0.
        """
        inputs = inputs if inputs is not None else (len(self.layers) - 1,)
        shape = self._shapes[inputs[0]]
        made = (channels or shape[0], side or shape[1])
        index = len(self.layers)
        self._shapes[index] = made
        sizes = [self._batch_size * c * s * s * _ELEMENT_BYTES for c, s in (made, shape)]
        label = name or f"{kind.upper()}{index}"
        self.layers.append(Layer(name=label, kind=kind, inputs=inputs, num_bytes=sizes[0], input_bytes=sizes[1]))
        return index


def alexnet(batch_size: int) -> list[Layer]:
    """AlexNet with response normalisation on 227x227 images, in one tower: 23 layers."""
    net = Network(batch_size, (3, 227))
    for index, (channels, side, pooled) in enumerate(((96, 55, 27), (256, 27, 13)), 1):
        net.add("conv", f"CONV{index}", channels=channels, side=side)
        net.add("act", f"RELU{index}")
        net.add("lrn", f"LRN{index}")
        net.add("pool", f"POOL{index}", side=pooled)
    for index, channels in enumerate((384, 384, 256), 3):
        net.add("conv", f"CONV{index}", channels=channels)
        net.add("act", f"RELU{index}")
    net.add("pool", "POOL5", side=6)
    for index in (1, 2):
        net.add("fc", f"FC{index}", channels=4096, side=1)
        net.add("act", f"RELU{index + 5}")
        net.add("dropout", f"DROPOUT{index}")
    net.add("fc", "FC3", channels=1000)
    net.add("softmax", "SOFTMAX")
    return net.layers


def resnet(blocks: tuple[int, int, int, int], batch_size: int) -> list[Layer]:
    """A residual network of bottleneck blocks on 224x224 images, with forks and joins."""
    net = Network(batch_size, (3, 224))
    net.add("conv", "CONV1", channels=64, side=112)
    net.add("bn", "BN1")
    net.add("act", "RELU1")
    last = net.add("pool", "POOL1", side=56)
    for position, (channels, side, is_first) in enumerate(block_shapes(blocks)):
        if position:
            last = net.add("act")
        fork = net.add("fork", inputs=(last,))
        net.add("conv", channels=channels // 4, inputs=(fork,))
        _bn_act(net)
        net.add("conv", channels=channels // 4, side=side)
        _bn_act(net)
        net.add("conv", channels=channels)
        branch = net.add("bn")
        shortcut = fork
        if is_first:
            shortcut = net.add("conv", channels=channels, side=side, inputs=(fork,))
            shortcut = net.add("bn")
        last = net.add("join", inputs=(branch, shortcut))
    net.add("act")
    net.add("pool", side=1)
    net.add("fc", channels=1000)
    net.add("softmax")
    return net.layers


def _bn_act(net: Network) -> None:
    net.add("bn")
    net.add("act")


def block_shapes(blocks: Iterable[int]) -> Iterator[tuple[int, int, bool]]:
    """Yield channels and side of each block's output, and whether it is the first of its stage."""
    for stage, num_blocks in enumerate(blocks):
        for position in range(num_blocks):
            yield 256 << stage, 56 >> stage, position == 0
