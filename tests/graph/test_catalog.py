"""The catalogue: its figures are possible, have a source, and are found under the names that people write."""

from __future__ import annotations

import dataclasses
import itertools
from typing import get_args

import pytest

from lightning_offload.errors import OffloadError, UnsupportedError
from lightning_offload.graph import calibration, catalog
from lightning_offload.graph.calibration import Arithmetic
from lightning_offload.graph.cards import CARDS
from lightning_offload.graph.catalog import (
    DType,
    arithmetic_of,
    check_dtype,
    device_spec,
    find_card,
    names,
    stored_dtype,
)
from lightning_offload.graph.device_spec import DeviceSpec

EXPECTED = [
    "k40c", "m40", "titan-x", "gtx-titan-x", "p100", "v100-16gb", "v100-32gb", "t4", "3090", "4090", "l4",
    "a100-40gb", "a100-80gb", "h100", "h200", "gh200", "b200",
]  # fmt: skip


def test_names_are_pinned() -> None:
    """Scripts and results refer to entries by these names."""
    assert list(names()) == EXPECTED


def test_each_entry_is_a_possible_device(subtests: pytest.Subtests) -> None:
    """A spec passes its own check, survives JSON, and can price ops and copies."""
    for name, dtype in itertools.product(EXPECTED, get_args(DType)):
        with subtests.test(name=name, dtype=dtype):
            spec = device_spec(name, dtype=dtype)
            spec.check()
            assert DeviceSpec.from_json(spec.to_json()) == spec
            assert (spec.kind, spec.has_disk) == ("cuda", False)
            assert spec != spec.at_peak()
            assert 0.005 < spec.copy_interference < 0.1
            assert 0.2 < spec.convolution_efficiency < 1.5
            assert 0.2 < spec.matmul_efficiency < 1.1
            assert 0.3 < spec.reduction_bandwidth < spec.elementwise_bandwidth < 1.0
            assert 1e-6 < spec.launch_seconds < 2e-5
            assert spec.memory_bytes is not None
            assert 8 << 30 < spec.memory_bytes < 200 << 30
            assert 1e12 < spec.flops_per_second < 1e16
            assert 1e11 < spec.memory_bytes_per_second < 1e13
            assert spec.h2d_bytes_per_second < spec.memory_bytes_per_second


def test_every_figure_has_its_source_and_none_repeats_a_name() -> None:
    """Sources are texts that name a document; names and aliases are unique, whatever their blanks and dashes."""
    for card in CARDS:
        assert all(len(text) > 20 for text in (card.source, card.memory_source, card.link.source)), card
    written = [name for card in CARDS for name in (card.name, card.title, *card.aliases)]
    assert len({catalog._key(name) for name in written}) == len(written)


def test_links_are_slower_than_the_standard_allows() -> None:
    """Rates are what copies reach: below 16 lanes at 8, 16 and 32 GT/s, and below 450 GB/s of C2C a direction."""
    for name, limit in (("p100", 15.76e9), ("a100", 31.51e9), ("h200", 63.02e9), ("gh200", 450e9)):
        spec = device_spec(name)
        assert 0.6 * limit < spec.d2h_bytes_per_second <= spec.h2d_bytes_per_second < limit


def test_figures_that_the_papers_rest_on() -> None:
    """The K40c as CUDA reports it, with 12,000 MB and a bit, and its measured link."""
    spec = device_spec("k40c")
    assert spec.memory_bytes == 11520 << 20
    assert spec.flops_per_second == 4.29e12
    assert round(spec.d2h_bytes_per_second / 1e9, 1) == 10.1


def test_copies_take_their_share_of_the_memory() -> None:
    """3.5% of its bandwidth on a K40c and 1.2% on an A100, by the faster direction where they differ."""
    for name, share in (("k40c", 0.035), ("a100", 0.012)):
        spec = device_spec(name)
        assert spec.copy_interference == spec.d2h_bytes_per_second / spec.memory_bytes_per_second
        assert spec.copy_interference == pytest.approx(share, abs=5e-4)
    spec = device_spec("gh200")
    assert spec.copy_interference == spec.h2d_bytes_per_second / spec.memory_bytes_per_second


def test_names_are_found_as_people_write_them() -> None:
    """Case, blanks, dashes and the maker's words do not matter; "a100" is the one of 80 GB."""
    known = {
        "K40c": "k40c", "Tesla K40c": "k40c", " k 40 ": "k40c", "a100": "a100-80gb", "A100_40GB": "a100-40gb",
        "RTX 3090": "3090", "nvidia geforce rtx 4090": "4090", "titan x": "titan-x", "GTX Titan X": "gtx-titan-x",
        "NVIDIA GeForce GTX TITAN X": "gtx-titan-x", "NVIDIA TITAN X": "titan-x", "TITAN X (Pascal)": "titan-x",
        "NVIDIA Tesla V100-SXM2-32GB": "v100-32gb", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA GH200 480GB": "gh200",
        "V100": "v100-16gb", "NVIDIA H200": "h200", "GH-200": "gh200",
    }  # fmt: skip
    assert {written: find_card(written).name for written in known} == known
    assert device_spec("Tesla K40c") == device_spec("k40c")


def test_half_precision_where_there_is_any() -> None:
    """A GPU without faster arithmetic in a type computes at its float32 rate; with tensor cores it is faster."""
    for name, dtype, factor in (
        ("k40c", "float16", 1.0),
        ("v100", "bfloat16", 1.0),
        ("t4", "bfloat16", 1.0),
        ("v100", "float16", 7.9),
        ("a100", "bfloat16", 16.0),
    ):
        found = device_spec(name, dtype=dtype).at_peak()
        plain = device_spec(name).at_peak()
        assert found.flops_per_second / plain.flops_per_second == pytest.approx(factor, abs=0.1)
        assert dataclasses.replace(found, flops_per_second=plain.flops_per_second) == plain


def test_shares_are_those_of_the_cores() -> None:
    """What a card has no tensor cores for is computed on the others, at their shares."""
    known: dict[tuple[str, DType], Arithmetic] = {
        ("k40c", "float16"): "float32", ("p100", "float16"): "float32", ("v100", "bfloat16"): "float32",
        ("v100", "float16"): "half", ("3090", "bfloat16"): "half", ("a100", "float32"): "float32",
        ("a100", "tf32"): "tf32", ("v100", "tf32"): "float32", ("t4", "float16"): "half",
    }  # fmt: skip
    assert {(name, dtype): arithmetic_of(find_card(name), dtype) for name, dtype in known} == known
    for (name, dtype), cores in known.items():
        factor = calibration.FACTORS.get((find_card(name).generation, cores), 1.0)
        expected = factor * calibration.SHARES[cores].matmul
        assert device_spec(name, dtype=dtype).matmul_efficiency == expected, (name, dtype)


def test_tf32_is_float32_in_memory() -> None:
    """It has a rate of its own where there is any, and float32's elsewhere."""
    assert stored_dtype("tf32") == "float32"
    assert stored_dtype("bfloat16") == "bfloat16"
    assert device_spec("a100", dtype="tf32").flops_per_second == 156e12
    assert device_spec("k40c", dtype="tf32") == device_spec("k40c")


def test_an_unknown_device() -> None:
    """One error suggests the nearest name and lists them all."""
    with pytest.raises(
        UnsupportedError, match=r"unknown device 'h20': did you mean 'h200'.*choose one of k40c, m40"
    ) as e:
        device_spec("h20")
    assert all(name in str(e.value) for name in names())
    with pytest.raises(OffloadError, match="unknown device 'abacus': choose one of"):
        device_spec("abacus")


def test_types_by_their_usual_names() -> None:
    """Short and torch's names of a type mean the same; another is refused with those that there are figures for."""
    for written in ("fp32", "torch.float32", "FLOAT32", "float"):
        assert check_dtype(written) == "float32", written
    with pytest.raises(UnsupportedError, match="unknown dtype 'int8': choose one of float32, float16, bfloat16"):
        device_spec("a100", dtype="int8")
