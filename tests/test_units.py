"""Bytes and seconds to and from text, and every budget that must be refused."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.errors import BudgetError
from lightning_offload.units import (
    format_budget,
    format_bytes,
    format_rate,
    format_seconds,
    parse_bytes,
    resolve_budget,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("12GiB", 12 * GIB),
        ("12 GiB", 12 * GIB),
        ("  12gib ", 12 * GIB),
        ("12GB", 12 * 10**9),
        ("500 MiB", 500 << 20),
        ("1.5KiB", 1536),
        (".5 kB", 500),
        ("0.3B", 0),
        ("4096", 4096),
        ("0", 0),
        ("1 TiB", 1 << 40),
        ("2PB", 2 * 10**15),
    ],
)
def test_parse_bytes_reads_decimal_and_binary_units(text: str, num_bytes: int) -> None:
    """GB is a power of 1000, GiB a power of 1024, case and spaces do not matter."""
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "12 bananas", "1,5GiB", "twelve", "-1GiB", "1e9B", "9" * 50, "9PiB9", "\u0663GiB"]
)
def test_parse_bytes_refuses_and_echoes(text: str) -> None:
    """What is no number of bytes is refused with the text in the message."""
    with pytest.raises(BudgetError, match=re.escape(repr(text)[:30])):
        parse_bytes(text)


def test_parse_bytes_calls_a_bare_letter_ambiguous() -> None:
    """12G may be 12GB or 12GiB, so the message offers both."""
    with pytest.raises(BudgetError, match=r"'12GiB' .* or '12GB'"):
        parse_bytes("12G")


@given(st.integers(min_value=0, max_value=(1 << 63) - 1))
def test_whole_bytes_round_trip_exactly(num_bytes: int) -> None:
    """A number of bytes written with the unit B is read back exactly."""
    assert parse_bytes(f"{num_bytes} B") == num_bytes
    assert parse_bytes(str(num_bytes)) == num_bytes


@given(st.integers(min_value=0, max_value=1 << 60))
def test_formatted_bytes_round_trip_to_the_shown_digit(num_bytes: int) -> None:
    """format_bytes is readable by parse_bytes, off by at most half of the last digit shown."""
    text = format_bytes(num_bytes)
    unit_bytes = parse_bytes(f"1{text.split()[1]}")
    tolerance = Fraction(unit_bytes, 20) + 1 if unit_bytes > 1 else 0
    assert abs(parse_bytes(text) - num_bytes) <= tolerance
    assert unit_bytes == 1 or re.fullmatch(r"\d{1,4}\.\d \w+", text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (12 * GIB, "12.0 GiB"),
        (-3 * GIB // 2, "-1.5 GiB"),
        (1 << 70, "1048576.0 PiB"),
    ],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    """One decimal, a binary unit, never 1024.0 of a unit that has a larger one."""
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"),
        (1.24, "1.24 s"),
        (0.0031, "3.1 ms"),
        (17e-6, "17.0 us"),
        (0.99999, "1.00 s"),
        (59.999, "1 min 0 s"),
        (125, "2 min 5 s"),
        (-0.0031, "-3.1 ms"),
        (float("nan"), "nan s"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    """The unit suits the size."""
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("budget", "num_bytes"),
    [
        (None, None),
        (GIB, GIB),
        (1 << 20, 1 << 20),
        (np.int64(GIB), GIB),
        ("12GiB", 12 * GIB),
        ("12GB", 12 * 10**9),
        ("500 MiB", 500 << 20),
        ("1B", 1),
        (str(GIB), GIB),
        (1.0, 16 * GIB),
        (0.5, 8 * GIB),
        (np.float32(0.25), 4 * GIB),
        ("0.5", 8 * GIB),
        ("1.0", 16 * GIB),
        ("5e-1", 8 * GIB),
    ],
)
def test_resolve_budget_accepts_every_documented_form(budget: Any, num_bytes: int | None) -> None:
    """Bytes, text and fractions give bytes; a command line's text is read as the number in it."""
    assert resolve_budget(budget, device_bytes=16 * GIB) == num_bytes


@pytest.mark.parametrize(
    "budget",
    [
        "12 bananas",
        "",
        "12G",
        "-3GiB",
        "0GiB",
        "0",
        "1",
        "nan",
        "1.5",
        "99999999PiB",
        0,
        -1,
        1,
        (1 << 20) - 1,
        1 << 63,
        1.5,
        0.0,
        -0.5,
        float("nan"),
        float("inf"),
        float("-inf"),
        True,
        False,
        [GIB],
        b"12GiB",
        1j,
    ],
    ids=repr,
)
def test_resolve_budget_refuses_with_value_choice_and_fix(budget: Any) -> None:
    """One clear error: it echoes the value, lists what is allowed, and shows a way to write it."""
    with pytest.raises(BudgetError) as caught:
        resolve_budget(budget, device_bytes=16 * GIB)
    message = str(caught.value)
    assert (budget if isinstance(budget, str) else repr(budget)) in message
    assert "bytes" in message
    assert "GiB" in message or "1.0" in message
    assert caught.value.__cause__ is None


def test_resolve_budget_of_one_names_both_readings() -> None:
    """1 may be one byte or the whole device: the error shows how to write either."""
    with pytest.raises(BudgetError, match=r'"1B" for bytes, or a float such as 1\.0 for a fraction'):
        resolve_budget(1, device_bytes=16 * GIB)


@pytest.mark.parametrize("budget", [0.5, 1.0, "0.5"])
def test_a_fraction_needs_a_known_device(budget: float | str) -> None:
    """On a device whose memory is not known a fraction is refused, and bytes are suggested."""
    with pytest.raises(BudgetError, match="not known for this device; give bytes"):
        resolve_budget(budget, device_bytes=None)


@given(
    fraction=st.floats(min_value=0, max_value=1, exclude_min=True),
    device_bytes=st.integers(min_value=1, max_value=1 << 50),
)
def test_a_fraction_never_exceeds_the_device(fraction: float, device_bytes: int) -> None:
    """Every fraction in (0, 1] gives at least one byte and at most the device."""
    resolved = resolve_budget(fraction, device_bytes=device_bytes)
    assert resolved is not None
    assert 1 <= resolved <= device_bytes


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("6GB", "6GB (5.6 GiB)"),
        (" 6 GB ", "6 GB (5.6 GiB)"),
        ("6000MB", "6000MB (5.6 GiB)"),
        ("12GiB", "12GiB"),
        ("12.0 gib", "12.0 gib"),
        ("1536MiB", "1536MiB (1.5 GiB)"),
        ("1.55GiB", "1.55GiB"),
        (6 * 10**9, "6000000000 B (5.6 GiB)"),
        ("6000000000", "6000000000 B (5.6 GiB)"),
        (GIB, "1073741824 B (1.0 GiB)"),
        (0.5, "0.5 of the device (8.0 GiB)"),
        ("0.8", "0.8 of the device (12.8 GiB)"),
        (1.0, "1 of the device (16.0 GiB)"),
    ],
)
def test_a_budget_is_echoed_as_typed(typed: Any, text: str) -> None:
    """With the bytes as they were understood beside it where these read otherwise."""
    num_bytes = resolve_budget(typed, device_bytes=16 * GIB)
    assert num_bytes is not None
    assert format_budget(num_bytes, typed) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (6 * 10**9, "6GB (5.6 GiB)"),
        (7_250_000_000, "7.25GB (6.8 GiB)"),
        (2_500_000, "2.5MB (2.4 MiB)"),
        (12 * GIB, "12.0 GiB"),
        (1_583_206_848, "1.5 GiB"),
        (7_255_000_000, "6.8 GiB"),
        (600, "600 B"),
        (1 << 20, "1.0 MiB"),
    ],
)
def test_a_budget_of_a_plan_that_was_read(num_bytes: int, text: str) -> None:
    """What was typed is not known there: a round decimal number was."""
    assert format_budget(num_bytes) == text


@given(st.integers(1, (1 << 63) - 1))
def test_every_budget_can_be_written(num_bytes: int) -> None:
    """And read: what is beside it, or stands alone, is the number to within its digit."""
    text = format_budget(num_bytes)
    shown = text.partition("(")[2].removesuffix(")") or text
    assert shown == format_bytes(num_bytes)


@pytest.mark.parametrize(
    ("rate", "text"), [(53.7e9, "53.7 GB/s"), (999e6, "999.0 MB/s"), (1.5e3, "1.5 kB/s"), (0.0, "0.0 B/s")]
)
def test_rates_are_in_one_unit(rate: float, text: str) -> None:
    """GB/s, as in datasheets; slower ones in a decimal unit too."""
    assert format_rate(rate) == text
