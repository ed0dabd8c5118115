"""Numbers for people: one unit for an axis, short texts, and names that are safe to show."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable

from lightning_offload.units import format_bytes, format_seconds

__all__ = ["Unit", "bytes_unit", "escape", "format_share", "label_margin", "or_dash", "seconds_unit", "shorten"]


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A unit of an axis: what one of it is in bytes or seconds, and its name."""

    size: float
    name: str


def bytes_unit(largest: float) -> Unit:
    """The unit for sizes up to this many bytes."""
    power = 0
    while power < 4 and largest >= 1024 ** (power + 1):
        power += 1
    return Unit(1024.0**power, ("B", "KiB", "MiB", "GiB", "TiB")[power])


def seconds_unit(largest: float) -> Unit:
    """The unit for durations up to this many seconds."""
    for size, name in ((1.0, "s"), (1e-3, "ms")):
        if largest >= 2 * size:
            return Unit(size, name)
    return Unit(1e-6, "us")


def format_share(share: float | None) -> str:
    """A share as a percentage with a sign where there is one, "n/a" for None.

    >>> format_share(0.0423), format_share(0.0), format_share(None)
    ('+4.2%', '0.0%', 'n/a')
    """
    if share is None:
        return "n/a"
    text = f"{100 * share:+.1f}%"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def or_dash(value: float | None, kind: str) -> str:
    """A size ("bytes") or duration ("seconds") as text, "n/a" for None."""
    if value is None:
        return "n/a"
    return format_bytes(int(value)) if kind == "bytes" else format_seconds(value)


def shorten(name: str, length: int = 34) -> str:
    """A dotted name from its end, which tells more than its beginning."""
    return name if len(name) <= length else f"…{name[1 - length :]}"


def label_margin(labels: Iterable[str]) -> int:
    """Pixels that the longest of an axis' labels takes beside a plot.

    >>> label_margin(["compute", "disk write"])
    84
    """
    return 14 + 7 * max(map(len, labels), default=0)


def escape(text: str) -> str:
    """Text for HTML, and for the labels of plots, which read a part of it."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return html.escape(printable, quote=True)
