"""The catalogue of links between devices: possible figures, sources, and the names that people write."""

from __future__ import annotations

import pytest

from benchmarks.scale.interconnects import interconnect, usual_interconnects
from lightning_offload.errors import UnsupportedError
from lightning_offload.graph.cards import CARDS

EXPECTED = [
    "nvlink2", "nvlink3", "nvlink4", "nvlink5", "pcie3", "pcie4", "pcie5", "edr100", "hdr200", "ndr400", "10gbe",
    "25gbe", "100gbe",
]  # fmt: skip


def test_figures_are_possible_and_have_sources() -> None:
    """Collectives reach less than the standard, and more than two thirds of it; each figure names its source."""
    for name in EXPECTED:
        entry = interconnect(name)
        assert entry.name == name
        assert 2 / 3 < entry.bytes_per_second / entry.peak_bytes_per_second < 1, entry
        assert 1e-6 < entry.latency_seconds < 1e-4
        assert min(len(entry.source), len(entry.latency_source)) > 20
        assert entry.uses_host_link == (not entry.name.startswith("nvlink"))


def test_datasheet_rates() -> None:
    """Of one direction: half of what datasheets print for both."""
    peaks = {
        "nvlink2": 150e9, "nvlink3": 300e9, "nvlink4": 450e9, "nvlink5": 900e9, "pcie4": 31.508e9, "hdr200": 25e9,
        "ndr400": 50e9, "10gbe": 1.25e9,
    }  # fmt: skip
    assert {name: interconnect(name).peak_bytes_per_second for name in peaks} == pytest.approx(peaks, rel=1e-4)


def test_spelling() -> None:
    """Case, blanks and dashes do not matter."""
    for name in ("NVLink4", "nvlink-4", " NVLINK 4 ", "nvlink_4"):
        assert interconnect(name).name == "nvlink4", name


def test_a_rate_of_ones_own(subtests: pytest.Subtests) -> None:
    """Bytes or bits a second, of which all is reached; zero, no number or a unit that may mean bits is refused."""
    for text, rate in (("25GB/s", 25e9), ("25 GiB/s", 25 * 2**30), ("200Gbit/s", 25e9), ("1.6 tbit/s", 200e9)):
        found = interconnect(text)
        assert (found.bytes_per_second, found.peak_bytes_per_second, found.name) == (rate, rate, text)
    for text in ("25Gb/s", "25gb/s", "25G/s", "0GB/s", "-1GB/s", "fastGB/s", "1.2.3Gbit/s", "/s", "GB/s"):
        with subtests.test(text), pytest.raises(UnsupportedError, match=r"is no rate: write bytes or bits, as 25GB/s"):
            interconnect(text)


def test_an_unknown_name() -> None:
    """The error echoes it, guesses, and lists all."""
    with pytest.raises(UnsupportedError, match=r"unknown interconnect 'nvlink44': did you mean 'nvlink4'\? choose one"):
        interconnect("nvlink44")
    with pytest.raises(
        UnsupportedError, match=r"unknown interconnect 'carrier pigeon': choose one of nvlink2, .*100gbe"
    ):
        interconnect("carrier pigeon")


def test_usual_links_of_machines() -> None:
    """Every device of the catalogue has some, by name and by title; what is not in there gets the oldest."""
    for card in CARDS:
        assert usual_interconnects(card.name) == usual_interconnects(card.title)
    within, between = usual_interconnects("H200")
    assert (within.name, between.name) == ("nvlink4", "ndr400")
    assert [link.name for link in usual_interconnects("abacus")] == ["pcie3", "10gbe"]
    assert [link.name for link in usual_interconnects("k40c")] == ["pcie3", "10gbe"]
