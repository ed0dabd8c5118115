"""What kind of layer an op is, in the words of the papers, from its name.

The papers speak of the layers of Caffe or the ops of TensorFlow; a recorded step has aten ops. One kind covers all
kernels of a layer: ``aten.convolution``, ``aten.cudnn_convolution`` and their backward are all convolutions. A layer
that PyTorch composes of several ops (local response normalization, dropout on a CPU) has the kinds of its parts.
"""

from __future__ import annotations

import enum
import functools
import re


class Kind(enum.Enum):
    """Kinds of layers that some policy treats apart, and the rest."""

    CONV = "convolution"
    RECURRENT = "recurrent layer"
    ATTENTION = "fused attention"
    LINEAR = "fully connected layer"
    MATMUL = "product of two activations"
    JOIN = "sum of two activations"
    CONCAT = "concatenation"
    SOFTMAX = "softmax"
    ACTIVATION = "activation function"
    OTHER = "other"


DEAR = (Kind.CONV, Kind.RECURRENT, Kind.ATTENTION, Kind.LINEAR, Kind.MATMUL, Kind.JOIN, Kind.CONCAT)
"""The kinds that policies do not run twice, in the order in which they count where a result is made by several ops.

All the papers find the first ones too dear; attention and its products take the place of layers of their time. Sums and
concatenations would chain back to a network's input. Other kinds count only if they come last.
"""

_PATTERNS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (Kind.CONV, r"conv(olution|_|\d)"),
        (Kind.RECURRENT, r"rnn|lstm|gru"),
        (Kind.ATTENTION, r"attention"),
        (Kind.MATMUL, r"bmm|^dot$"),
        (Kind.LINEAR, r"(^|_)mm$|addmm|linear|mv$"),
        (Kind.SOFTMAX, r"softmax"),
        (Kind.CONCAT, r"^(cat|stack|concat)$"),
        (Kind.JOIN, r"^add$"),
        (Kind.ACTIVATION, r"elu|sigmoid|tanh|silu|mish|hardswish|softplus|threshold|glu|clamp"),
    )
)


@functools.lru_cache(maxsize=1024)
def kind_of(name: str) -> Kind:
    """The kind of an op by its qualified name; a sum counts as a join only if both parts are activations.

    >>> kind_of("aten.convolution_backward.default"), kind_of("aten.relu_.default")
    (<Kind.CONV: 'convolution'>, <Kind.ACTIVATION: 'activation function'>)
    """
    parts = name.split(".")
    base = (parts[1] if len(parts) > 1 else parts[0]).rstrip("_")
    return next((kind for kind, pattern in _PATTERNS if pattern.search(base)), Kind.OTHER)
