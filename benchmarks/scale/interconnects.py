"""Links between devices, for simulated clusters: datasheet rates and what collectives reach of them, each sourced.

``interconnect("nvlink4")`` is the link of one device, one direction at a time. Its rate is what a collective reaches,
its latency that of one hop, both as NCCL's own tuner takes them. Shortfalls: a network is its links, without switches
that are shared or congested; reductions within switches (NVLS, SHARP) are not counted, which a large all-reduce on
NVLink 4 or later is faster by; a rate that a user writes ("25GB/s") is taken as it stands.
"""

from __future__ import annotations

import dataclasses
import difflib
import re

from lightning_offload.errors import BudgetError, UnsupportedError
from lightning_offload.graph import catalog
from lightning_offload.units import parse_bytes

_NCCL = "NCCL, src/graph"
_HOPS = f"hop of a ring, Simple protocol: {_NCCL}/tuning.cc at 01afd20"
_NVLINK_HOP, _PCIE_HOP, _NETWORK_HOP = 3.4e-6, 5.7e-6, 9.6e-6

_PCIE3 = 16 * 8e9 / 8 * 128 / 130
_NETWORK_SHARE = 0.96
_NETWORK_SOURCE = f"NCCL counts 12 of 12.5 GB/s for 100 Gbit/s: {_NCCL}/topo.h; ib_write_bw reached 96.6 Gbit/s of EDR"
_TCP_SHARE = 1448 / 1538
_TCP_SOURCE = "TCP's payload of an Ethernet frame at an MTU of 1500; a host's CPU may reach less"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """A link of one device to others.

    Attributes:
        name: What a user calls it by.
        title: Its full name.
        peak_bytes_per_second: Rate of one direction, by its standard or datasheet.
        bytes_per_second: What collectives reach of it.
        latency_seconds: Duration of one hop of a message without length.
        uses_host_link: Whether its traffic goes through the device's link to the host, which swaps use too: PCIe
            itself, and network cards behind it.
        source: Where the rates are from.
        latency_source: Where the latency is from.
    """

    name: str
    title: str
    peak_bytes_per_second: float
    bytes_per_second: float
    latency_seconds: float
    uses_host_link: bool
    source: str
    latency_source: str = _HOPS


def _nvlink(generation: int, num_links: int, link_gigabytes: float, reached: float, gpu: str) -> Interconnect:
    return Interconnect(
        name=f"nvlink{generation}",
        title=f"NVLink {generation}, {num_links} links",
        peak_bytes_per_second=num_links * link_gigabytes * 1e9,
        bytes_per_second=num_links * reached * 1e9,
        latency_seconds=_NVLINK_HOP,
        uses_host_link=False,
        source=f"NVIDIA, {gpu} datasheet; NCCL counts {reached} GB/s a link: {_NCCL}/topo.h at 069a3d4",
    )


def _pcie(generation: int) -> Interconnect:
    lanes = 2 ** (generation - 3)
    return Interconnect(
        name=f"pcie{generation}",
        title=f"PCIe {generation}.0 x16",
        peak_bytes_per_second=lanes * _PCIE3,
        bytes_per_second=lanes * 12e9,
        latency_seconds=_PCIE_HOP,
        uses_host_link=True,
        source=f"PCI-SIG; NCCL counts 12 GB/s for PCIe 3.0 x16, others in proportion: {_NCCL}/topo.h at 069a3d4",
    )


def _network(name: str, title: str, gigabits: int, share: float, source: str) -> Interconnect:
    return Interconnect(
        name=name,
        title=title,
        peak_bytes_per_second=gigabits / 8 * 1e9,
        bytes_per_second=gigabits / 8 * 1e9 * share,
        latency_seconds=_NETWORK_HOP,
        uses_host_link=True,
        source=source,
    )


_INTERCONNECTS = (
    _nvlink(2, 6, 25.0, 20.0, "V100"),
    _nvlink(3, 12, 25.0, 20.0, "A100"),
    _nvlink(4, 18, 25.0, 20.6, "H100"),
    _nvlink(5, 18, 50.0, 40.1, "Blackwell"),
    _pcie(3),
    _pcie(4),
    _pcie(5),
    _network("edr100", "InfiniBand EDR, 100 Gbit/s", 100, _NETWORK_SHARE, _NETWORK_SOURCE),
    _network("hdr200", "InfiniBand HDR, 200 Gbit/s", 200, _NETWORK_SHARE, _NETWORK_SOURCE),
    _network("ndr400", "InfiniBand NDR, 400 Gbit/s", 400, _NETWORK_SHARE, _NETWORK_SOURCE),
    _network("10gbe", "10 Gbit/s Ethernet", 10, _TCP_SHARE, _TCP_SOURCE),
    _network("25gbe", "25 Gbit/s Ethernet", 25, _TCP_SHARE, _TCP_SOURCE),
    _network("100gbe", "100 Gbit/s Ethernet", 100, _TCP_SHARE, _TCP_SOURCE),
)

_USUAL = {
    "v100-16gb": ("nvlink2", "edr100"), "v100-32gb": ("nvlink2", "edr100"),
    "a100-40gb": ("nvlink3", "hdr200"), "a100-80gb": ("nvlink3", "hdr200"),
    "h100": ("nvlink4", "ndr400"), "h200": ("nvlink4", "ndr400"), "gh200": ("nvlink4", "ndr400"),
    "b200": ("nvlink5", "ndr400"),
    "3090": ("pcie4", "100gbe"), "4090": ("pcie4", "100gbe"), "l4": ("pcie4", "100gbe"),
}  # fmt: skip
_OTHERS = ("pcie3", "10gbe")


def _key(name: str) -> str:
    return re.sub(r"[\s_\-]+", "", name.strip().lower())


_BY_KEY = {entry.name: entry for entry in _INTERCONNECTS}


def interconnect(name: str) -> Interconnect:
    """The entry of a name, in any case, blanks and dashes as one likes; or a rate such as "25GB/s" or "200Gbit/s".

    A rate stands for a network card of that rate: collectives reach all of it, with a network's latency.

    Raises:
        UnsupportedError: There is none of that name, and it is no rate.
    """
    key = _key(name)
    if key in _BY_KEY:
        return _BY_KEY[key]
    if key.endswith("/s"):
        return _of_rate(name.strip())
    known = ", ".join(entry.name for entry in _INTERCONNECTS)
    close = difflib.get_close_matches(key, _BY_KEY, n=1)
    hint = f"did you mean {_BY_KEY[close[0]].name!r}? " if close else ""
    raise UnsupportedError(f"unknown interconnect {name!r}: {hint}choose one of {known}, or a rate such as 25GB/s")


def usual_interconnects(device: str) -> tuple[Interconnect, Interconnect]:
    """What machines with a device have as a rule: the link within a machine, and the one between machines.

    Args:
        device: Name of the catalogue's, as :func:`~lightning_offload.graph.catalog.find_card` takes it; the oldest
            links for one that it does not know.
    """
    try:
        within, between = _USUAL.get(catalog.find_card(device).name, _OTHERS)
    except UnsupportedError:
        within, between = _OTHERS
    return _BY_KEY[within], _BY_KEY[between]


def _of_rate(text: str) -> Interconnect:
    bits = re.fullmatch(r"([0-9.]+)\s*([kmgt]?)bit/s", text, re.IGNORECASE)
    try:
        if bits is None and not text.endswith("B/s"):  # lower case may mean bits
            raise BudgetError(text)
        rate = parse_bytes(f"{bits[1]}{bits[2]}B") / 8 if bits is not None else float(parse_bytes(text[:-2]))
    except BudgetError:
        rate = 0.0
    if rate <= 0:
        raise UnsupportedError(f"interconnect {text!r} is no rate: write bytes or bits, as 25GB/s or 200Gbit/s")
    return Interconnect(
        name=text,
        title=text,
        peak_bytes_per_second=rate,
        bytes_per_second=rate,
        latency_seconds=_NETWORK_HOP,
        uses_host_link=True,
        source="given",
    )
