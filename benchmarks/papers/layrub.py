"""Layrub's constant intermediates (TACO 2018): what stays on the device whatever the depth of a residual network.

Gradients overwrite the outputs that they belong to, so backward needs no more than forward. An output whose reference
count is zero is on the host, and those of one block after another use the same buffers: what stays is the block with
the largest outputs. A block is read as Caffe has it: a convolution, a normalisation and a scale have an output each,
ReLU and the sum are in place.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers.layers import block_shapes

_ELEMENT_BYTES = 4
_OUTPUTS_PER_CONV = 3


def constant_bytes(blocks: tuple[int, int, int, int], batch_size: int) -> int:
    """Return the bytes of the largest block's outputs with its input, the stem among the blocks."""
    return batch_size * _ELEMENT_BYTES * max(_block_elements(blocks))


def all_bytes(blocks: tuple[int, int, int, int], batch_size: int) -> int:
    """Return the same for all blocks at once, which is what grows with the depth."""
    return batch_size * _ELEMENT_BYTES * sum(_block_elements(blocks))


def _block_elements(blocks: tuple[int, int, int, int]) -> Iterator[int]:
    """Elements a sample, of the stem and of each block."""
    pooled = 64 * 56 * 56
    yield _OUTPUTS_PER_CONV * 64 * 112 * 112 + pooled
    before = pooled
    for channels, side, is_first in block_shapes(blocks):
        output = channels * side * side
        convs = 2 * output // 4 + output + (output if is_first else 0)
        yield before + _OUTPUTS_PER_CONV * convs
        before = output
