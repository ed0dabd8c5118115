"""How far below their peaks devices stay, by kind of work: fitted to public measurements of training steps.

An op of some kind reaches ``SHARES[arithmetic][kind] * FACTORS[generation, arithmetic]`` of a card's arithmetic rate,
and a share of its memory's; a launch costs the same everywhere. ``python -m benchmarks calibration`` fits the numbers
to half of the measurements and checks them on the other half; docs/calibration.md has both, with sources and errors.

Shortfalls: a generation without measurements (Blackwell) has a factor of 1; libraries got faster within the life of a
generation, so a share is that of the measurements' time; nothing was measured for recurrent layers, which are
taken for matrix products.
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
    "float32": Shares(convolution=0.5, depthwise=0.05, matmul=0.7, attention=0.5, recurrent=0.7),
    "tf32": Shares(convolution=0.5, depthwise=0.05, matmul=0.6, attention=0.5, recurrent=0.6),
    "half": Shares(convolution=0.5, depthwise=0.05, matmul=0.6, attention=0.5, recurrent=0.6),
}
"""By the cores that do it."""

FACTORS: dict[tuple[str, Arithmetic], float] = {}
"""What a generation of cards makes of a share, by its name and the cores; 1 where it is not named."""

LAUNCH_SECONDS = 5e-6
REDUCTION_BANDWIDTH = 0.8
ELEMENTWISE_BANDWIDTH = 0.8
