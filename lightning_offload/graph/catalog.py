"""GPUs as devices to plan for, none of which need be there, by name; their figures are in ``cards``.

``device_spec("k40c")`` is a device like one that was measured: its links at rates that copies reach, not at those that
a datasheet prints. Shortfalls: arithmetic and memory bandwidth are peaks, which no real op reaches, so modelled times
are the shortest possible; a machine's links depend on its mainboard too. Where the GPU itself is at hand, measure it
(``lightning-offload bench-links``).
"""

from __future__ import annotations

import difflib
import re
from typing import Literal, get_args

from lightning_offload.errors import UnsupportedError
from lightning_offload.graph.cards import CARDS, Card
from lightning_offload.graph.device_spec import DeviceSpec

DType = Literal["float32", "float16", "bfloat16"]

_OVERHEAD_SECONDS = 10e-6
"""Host cost of one swap or replay: a few kernel launches or driver calls of 2 to 5 us each."""

_DTYPES = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
_MAKERS = re.compile(r"^(nvidia|tesla|geforce|rtx|gtx)+(?=.)")


def _key(name: str) -> str:
    return re.sub(r"[\s_\-]+", "", name.strip().lower())


_BY_KEY = {_key(name): card for card in CARDS for name in (card.name, card.title, *card.aliases)}


def cards() -> tuple[Card, ...]:
    """All entries, by year."""
    return CARDS


def names() -> tuple[str, ...]:
    """The names of all entries, without aliases."""
    return tuple(card.name for card in CARDS)


def find_card(name: str) -> Card:
    """The entry of a name or alias, in any case, blanks and dashes as one likes.

    Raises:
        UnsupportedError: There is none of that name.
    """
    key = _key(name)
    card = _BY_KEY.get(key) or _BY_KEY.get(_MAKERS.sub("", key))
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


def device_spec(name: str, *, dtype: str = "float32") -> DeviceSpec:
    """A device of the catalogue, as planning takes it.

    Args:
        name: Name or alias, such as "k40c", "a100" or "RTX 3090".
        dtype: What it computes in: "float32", "float16" or "bfloat16".

    Raises:
        UnsupportedError: No such device or type.

    >>> device_spec("RTX 3090").name
    'GeForce RTX 3090'
    """
    card, arithmetic = find_card(name), check_dtype(dtype)
    return DeviceSpec(
        name=card.title,
        kind="cuda",
        memory_bytes=card.memory_bytes,
        d2h_bytes_per_second=card.link.d2h_efficiency * card.link.bytes_per_second,
        h2d_bytes_per_second=card.link.h2d_efficiency * card.link.bytes_per_second,
        copy_interference=0.0,
        overhead_seconds=_OVERHEAD_SECONDS,
        flops_per_second=getattr(card, arithmetic),
        memory_bytes_per_second=card.memory_bytes_per_second,
        compute_capability=card.compute_capability,
    )
