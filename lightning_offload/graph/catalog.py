"""GPUs as devices to plan for, none of which need be there, by name; their figures are in ``cards``.

``device_spec("k40c")`` is a device like one that was measured: its links at rates that copies reach, not at those that
a datasheet prints, and ops at the shares of the peaks that public measurements show (``calibration``).
``device_spec("k40c").at_peak()`` is the datasheet's, whose modelled times are the shortest possible.

Copies and compute share the device's memory: a copy of some bytes takes as much of its bandwidth as they need, so
compute that could use all of it loses the link's share of it, ``copy_interference``. Compute that is limited by
arithmetic loses less; where copies go both ways at once each takes its own.

Shortfalls: a copy starts at once, where a driver takes about 10 us, which counts as host cost of a swap
(``overhead_seconds``) instead; a machine's links depend on its mainboard too. Where the GPU itself is at hand, measure
it (``lightning-offload bench-links``).
"""

from __future__ import annotations

import difflib
import re
from typing import Literal, get_args

from lightning_offload.errors import UnsupportedError
from lightning_offload.graph import calibration
from lightning_offload.graph.calibration import Arithmetic
from lightning_offload.graph.cards import CARDS, Card
from lightning_offload.graph.device_spec import DeviceSpec

DType = Literal["float32", "float16", "bfloat16", "tf32"]

_OVERHEAD_SECONDS = 10e-6
"""Host cost of one swap or replay: a few kernel launches or driver calls of 2 to 5 us each."""

_DTYPES = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
_MAKER = re.compile(r"^(nvidia|tesla|geforce|rtx|gtx)(?=.)")


def _key(name: str) -> str:
    return re.sub(r"[\s_\-]+", "", name.strip().lower())


_BY_KEY = {_key(name): card for card in CARDS for name in (card.name, card.title, *card.aliases)}


def names() -> tuple[str, ...]:
    """The names of all entries, without aliases."""
    return tuple(card.name for card in CARDS)


def find_card(name: str) -> Card:
    """The entry of a name or alias, in any case, blanks and dashes as one likes.

    Raises:
        UnsupportedError: There is none of that name.
    """
    key = rest = _key(name)
    while rest not in _BY_KEY and _MAKER.match(rest):  # one word at a time: a GTX TITAN X is no TITAN X
        rest = _MAKER.sub("", rest)
    card = _BY_KEY.get(rest)
    if card is None:
        close = difflib.get_close_matches(key, _BY_KEY, n=1)
        hint = f"did you mean {_BY_KEY[close[0]].name!r}? " if close else ""
        raise UnsupportedError(f"unknown device {name!r}: {hint}choose one of {', '.join(names())}")
    return card


def check_dtype(dtype: str) -> DType:
    """The full name of a floating-point type, checked.

    Raises:
        UnsupportedError: None of those that the catalogue has figures for.
    """
    name = dtype.strip().lower().removeprefix("torch.")
    name = _DTYPES.get(name, name)
    if name not in get_args(DType):
        raise UnsupportedError(f"unknown dtype {dtype!r}: choose one of {', '.join(get_args(DType))}")
    return name  # type: ignore[return-value]


def stored_dtype(dtype: DType) -> str:
    """The type that tensors have: TF32 is a way to multiply those in float32."""
    return "float32" if dtype == "tf32" else dtype


def device_spec(name: str, *, dtype: str = "float32") -> DeviceSpec:
    """A device of the catalogue, as planning takes it.

    Args:
        name: Name or alias, such as "k40c", "a100" or "RTX 3090".
        dtype: What it computes in: "float32", "float16", "bfloat16", or "tf32", which is float32 with products and
            convolutions on tensor cores.

    Raises:
        UnsupportedError: No such device or type.

    >>> device_spec("RTX 3090").name
    'GeForce RTX 3090'
    """
    return spec_of(find_card(name), check_dtype(dtype))


def spec_of(card: Card, dtype: DType) -> DeviceSpec:
    """A card as planning takes it."""
    peak = float(getattr(card, dtype) or card.float32)
    d2h, h2d = (share * card.link.bytes_per_second for share in (card.link.d2h_efficiency, card.link.h2d_efficiency))
    arithmetic = arithmetic_of(card, dtype)
    shares = calibration.SHARES[arithmetic]
    factor = calibration.FACTORS.get((card.generation, arithmetic), 1.0)
    bandwidth = calibration.BANDWIDTH_FACTORS.get(card.generation, 1.0)
    return DeviceSpec(
        name=card.title,
        kind="cuda",
        memory_bytes=card.memory_bytes,
        d2h_bytes_per_second=d2h,
        h2d_bytes_per_second=h2d,
        copy_interference=max(d2h, h2d) / card.memory_bytes_per_second,
        overhead_seconds=_OVERHEAD_SECONDS,
        flops_per_second=peak,
        memory_bytes_per_second=card.memory_bytes_per_second,
        launch_seconds=calibration.LAUNCH_SECONDS,
        convolution_efficiency=factor * shares.convolution,
        depthwise_efficiency=factor * shares.depthwise,
        matmul_efficiency=factor * shares.matmul,
        attention_efficiency=factor * shares.attention,
        recurrent_efficiency=factor * shares.recurrent,
        reduction_bandwidth=bandwidth * calibration.REDUCTION_BANDWIDTH,
        elementwise_bandwidth=bandwidth * calibration.ELEMENTWISE_BANDWIDTH,
        compute_capability=card.compute_capability,
    )


def arithmetic_of(card: Card, dtype: DType) -> Arithmetic:
    """The cores that a card computes a type on."""
    peak = getattr(card, dtype)
    if dtype == "float32" or peak is None or (dtype != "tf32" and peak < 4 * card.float32 and card.tf32 is None):
        return "float32"
    return "tf32" if dtype == "tf32" else "half"
