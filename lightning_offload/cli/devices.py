"""``devices``: what can be planned for, and what is in this machine."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from lightning_offload.cli.output import console, say, write_json
from lightning_offload.errors import UnsupportedError
from lightning_offload.graph import catalog
from lightning_offload.graph.cards import CARDS, Card
from lightning_offload.report.tables import add_row, make_table
from lightning_offload.units import format_bytes, format_rate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHere:
    """A compute device of this machine.

    Attributes:
        device: What torch calls it.
        title: Its full name.
        memory_bytes: Its memory; that of the machine for a CPU, None where it is not known.
        catalog_name: What the catalogue calls it; None if it is not in there.
        d2h_bytes_per_second: Rate of its link as it was measured before; None if it was not.
        h2d_bytes_per_second: The same, host to device.
    """

    device: str
    title: str
    memory_bytes: int | None
    catalog_name: str | None
    d2h_bytes_per_second: float | None
    h2d_bytes_per_second: float | None


def devices(*, as_json: bool) -> None:
    """Print the catalogue and this machine's devices."""
    here = devices_here()
    if as_json:
        write_json({
            "catalog": [_entry(card) for card in CARDS],
            "here": [dataclasses.asdict(device) for device in here],
        })  # fmt: skip
        return
    _print_catalog()
    _print_here(here)


def devices_here() -> list[DeviceHere]:
    """The devices of this machine."""
    import torch

    from lightning_offload.accelerators import accelerators_here

    return [_describe(device) for device in (torch.device("cpu"), *accelerators_here())]


def host_memory_bytes() -> int | None:
    """Memory of this machine; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on every system
        return None


def _describe(device: Any) -> DeviceHere:
    from lightning_offload.accelerators import name_of, total_bytes_of
    from lightning_offload.capture import spec_cache

    name, memory_bytes = name_of(device), total_bytes_of(device)
    known = spec_cache.load(spec_cache.key_for(device))
    return DeviceHere(
        device=str(device),
        title=name,
        memory_bytes=memory_bytes if memory_bytes is not None else host_memory_bytes(),
        catalog_name=_catalog_name(name) if memory_bytes is not None else None,
        d2h_bytes_per_second=known.d2h_bytes_per_second if known is not None else None,
        h2d_bytes_per_second=known.h2d_bytes_per_second if known is not None else None,
    )


def _catalog_name(title: str) -> str | None:
    try:
        return catalog.find_card(title).name
    except UnsupportedError:
        return None


def _entry(card: Card) -> dict[str, Any]:
    spec = catalog.device_spec(card.name)
    return {
        "name": card.name,
        "aliases": list(card.aliases),
        "title": card.title,
        "memory_bytes": card.memory_bytes,
        "memory_bytes_per_second": card.memory_bytes_per_second,
        "generation": card.generation,
        "flops_per_second": {dtype: getattr(card, dtype) for dtype in ("float32", "float16", "bfloat16", "tf32")},
        "link": card.link.name,
        "d2h_bytes_per_second": spec.d2h_bytes_per_second,
        "h2d_bytes_per_second": spec.h2d_bytes_per_second,
        "sources": [card.source, card.memory_source, card.link.source],
    }


_WITH_TITLES = 100  # columns of a terminal; the names say nearly as much
_FIGURES = (
    "memory\nGiB",
    "memory\nGB/s",
    "fp32\nTFLOP/s",
    "fp16\nTFLOP/s",
    "bf16\nTFLOP/s",
    "to host\nGB/s",
    "back\nGB/s",
)


def _print_catalog() -> None:
    say("Devices to plan for", style="bold")
    has_titles = console().width >= _WITH_TITLES
    table = make_table("", "name", *(["GPU"] if has_titles else []), *(f">{name}" for name in _FIGURES))
    for card in CARDS:
        spec = catalog.device_spec(card.name)
        add_row(
            table,
            card.name,
            *([card.title] if has_titles else []),
            f"{card.memory_bytes / (1 << 30):.1f}",
            f"{card.memory_bytes_per_second / 1e9:,.0f}",
            *(f"{getattr(card, dtype) / 1e12:,.1f}" for dtype in ("float32", "float16", "bfloat16")),
            f"{spec.d2h_bytes_per_second / 1e9:.1f}",
            f"{spec.h2d_bytes_per_second / 1e9:.1f}",
        )
    console().print(table)
    say(
        "Datasheet peaks without sparsity, fp32 without TF32; links at the rates that copies reach. Plans take ops "
        "at the shares of the peaks that public measurements show. --json names the sources."
    )


def _print_here(here: list[DeviceHere]) -> None:
    say("\nIn this machine", style="bold")
    table = make_table("", "device", "name", ">memory", ">in the\ncatalogue", ">to host", ">back")
    for device in here:
        rates = (device.d2h_bytes_per_second, device.h2d_bytes_per_second)
        add_row(
            table,
            device.device,
            device.title,
            format_bytes(device.memory_bytes) if device.memory_bytes is not None else "-",
            device.catalog_name or "-",
            *(format_rate(rate) if rate is not None else "not measured" for rate in rates),
        )
    console().print(table)
