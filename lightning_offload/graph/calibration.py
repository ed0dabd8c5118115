"""How far below their peaks devices stay, by kind of work: fitted to public measurements of training steps.

An op of some kind reaches ``SHARES[cores][kind] * FACTORS[generation, cores]`` of a card's arithmetic rate, and
``REDUCTION_BANDWIDTH`` or ``ELEMENTWISE_BANDWIDTH``, times ``BANDWIDTH_FACTORS[generation]``, of its memory's. A launch
costs the same everywhere. ``python -m benchmarks calibration`` fits the numbers to half of the measurements and checks
them on the other half; docs/calibration.md has both, with sources and errors.

Shortfalls: a generation without measurements (Blackwell; from Ampere on, float32 without TF32) has factors of 1;
libraries got faster within the life of a generation, so a share is that of the measurements' time. Not measured, and
left at the prior of the fit: fused attention outside of half precision, and depthwise convolutions, which memory
limits. Recurrent layers are taken for matrix products.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Arithmetic = Literal["float32", "tf32", "half"]
"""Plain cores, or tensor cores by what they read."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of the peak arithmetic rate, by kind of work; see :class:`DeviceSpec`."""

    convolution: float
    depthwise: float
    matmul: float
    attention: float
    recurrent: float


SHARES: dict[Arithmetic, Shares] = {
    "float32": Shares(convolution=0.631, depthwise=0.05, matmul=0.603, attention=0.5, recurrent=0.603),
    "tf32": Shares(convolution=1.0, depthwise=0.05, matmul=0.554, attention=0.5, recurrent=0.554),
    "half": Shares(convolution=0.552, depthwise=0.05, matmul=0.592, attention=0.475, recurrent=0.592),
}
"""By the cores that do it."""

FACTORS: dict[tuple[str, Arithmetic], float] = {
    ("ampere", "half"): 0.949,
    ("ampere", "tf32"): 1.03,
    ("ga102-ada", "half"): 1.39,
    ("ga102-ada", "tf32"): 1.21,
    ("hopper", "half"): 0.829,
    ("hopper", "tf32"): 0.867,
    ("kepler", "float32"): 0.462,
    ("maxwell", "float32"): 1.57,
    ("pascal", "float32"): 1.08,
    ("turing", "float32"): 1.13,
    ("turing", "half"): 0.935,
    ("volta", "float32"): 1.17,
    ("volta", "half"): 0.981,
}
"""What a generation of cards makes of a share, by its name and the cores; 1 where it is not named."""

BANDWIDTH_FACTORS: dict[str, float] = {
    "ampere": 0.977,
    "ga102-ada": 1.26,
    "hopper": 1.03,
    "kepler": 0.827,
    "maxwell": 0.745,
    "pascal": 0.778,
    "turing": 0.939,
    "volta": 1.12,
}
"""What a generation of cards makes of the shares of memory bandwidth; 1 where it is not named."""

LAUNCH_SECONDS = 5.43e-06
REDUCTION_BANDWIDTH = 0.549
ELEMENTWISE_BANDWIDTH = 0.651
