"""Kinds of work that a device does at different shares of its peaks: convolving is not multiplying, nor copying.

The set is closed and small, since each kind needs public measurements to be calibrated by. It is not that of
``planning.policies.kinds``, which has the layers that the papers treat apart.
"""

from __future__ import annotations

import enum


class WorkKind(enum.Enum):
    """What limits an op, as far as its name and shapes tell."""

    CONVOLUTION = "convolution"
    DEPTHWISE = "depthwise convolution"
    MATMUL = "matrix product"
    ATTENTION = "fused attention"
    RECURRENT = "recurrent layer"
    REDUCTION = "reduction or normalization"
    ELEMENTWISE = "elementwise or copy"
