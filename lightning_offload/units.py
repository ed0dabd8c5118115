"""Bytes and seconds to and from text, and the budgets that users write.

Input is what a person types, output is plain ``int`` bytes or text for a person. Decimal units (``GB``) are
powers of 1000, binary units (``GiB``) powers of 1024; a unit without its ``B`` could be either, so it is
refused. Nothing here imports torch or looks at a device.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from numbers import Integral, Real

from lightning_offload.errors import BudgetError

__all__ = [
    "format_budget",
    "format_budget_exactly",
    "format_bytes",
    "format_rate",
    "format_seconds",
    "parse_bytes",
    "resolve_budget",
]

MIB = 1 << 20
"""Integers below this many bytes are refused as budgets: ``1`` may mean a byte or the whole device."""

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_UNIT_BYTES = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", start=1)},
}
_RATE_UNITS = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))
_QUANTITY = re.compile(r"([+-]?)([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)")
_PLAIN_NUMBER = re.compile(r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|nan|inf|infinity)", re.IGNORECASE)
_MAX_BYTES = (1 << 63) - 1  # that torch can count
_ALLOWED = (
    'allowed are an int of bytes, a text such as "12GiB" or "500 MB", a float in (0, 1] as a fraction of '
    "device memory, or None"
)


def parse_bytes(text: str) -> int:
    """Read a number of bytes such as ``"12GiB"``, ``"500 MB"`` or ``"4096"``.

    Args:
        text: A decimal number and an optional unit, in any case; a fraction of a byte is rounded down.

    Returns:
        The number of bytes, 0 or more.

    Raises:
        BudgetError: If the text is no number of bytes, is negative, has a unit without its ``B`` (``"12G"``),
            or does not fit into 63 bits.

    >>> parse_bytes("12GiB")
    12884901888
    >>> parse_bytes("1.5 kB")
    1500
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise BudgetError(f"{text!r} is not a number of bytes; write one with a unit, such as '12GiB' or '500 MB'")
    sign, number, unit = match.groups()
    if unit.lower() not in _UNIT_BYTES:
        raise BudgetError(_unknown_unit(text, number, unit))
    if len(number) > 40:
        raise BudgetError(f"{text[:40]!r}... has too many digits; the largest number is {_MAX_BYTES}")
    num_bytes: int = math.floor(Fraction(number) * _UNIT_BYTES[unit.lower()])
    if sign == "-" and num_bytes:
        raise BudgetError(f"{text!r} is negative; a number of bytes is 0 or more, such as '12GiB'")
    if num_bytes > _MAX_BYTES:
        raise BudgetError(f"{text!r} is more than the largest number of bytes, {_MAX_BYTES}; check the unit")
    return num_bytes


def _unknown_unit(text: str, number: str, unit: str) -> str:
    if f"{unit.lower()}b" in _UNIT_BYTES:
        short = number + unit[0].upper()
        return f"{text!r} is ambiguous: write '{short}iB' (powers of 1024) or '{short}B' (powers of 1000)"
    units = "B, kB, MB, GB, TB, PB, KiB, MiB, GiB, TiB, PiB"
    return f"{text!r} has the unknown unit {unit!r}; allowed are {units}, such as '12GiB'"


def format_bytes(num_bytes: int) -> str:
    """Write a number of bytes with one decimal and a binary unit.

    Args:
        num_bytes: The number of bytes; may be negative, as differences are.

    Returns:
        Text that :func:`parse_bytes` reads back to within the rounding.

    >>> format_bytes(12 << 30)
    '12.0 GiB'
    >>> format_bytes(1023)
    '1023 B'
    """
    sign, magnitude = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    if magnitude < 1024:
        return f"{sign}{magnitude} B"
    power = min((magnitude.bit_length() - 1) // 10, len(_BINARY_UNITS) - 1)
    text = f"{magnitude / 1024**power:.1f}"
    if text == "1024.0" and power + 1 < len(_BINARY_UNITS):
        text, power = "1.0", power + 1
    return f"{sign}{text} {_BINARY_UNITS[power]}"


def format_budget(num_bytes: int, typed: int | float | str | None = None) -> str:
    """Write a budget as its user did, with the bytes as they were understood beside it where these read otherwise.

    Args:
        num_bytes: The budget in bytes.
        typed: What the user wrote; None where that is not known: then a round decimal number is taken for typed, as
            nobody arrives at one otherwise.

    Returns:
        Text for a person.

    >>> format_budget(6_000_000_000, "6GB"), format_budget(6_000_000_000), format_budget(6 << 30, "6GiB")
    ('6GB (5.6 GiB)', '6GB (5.6 GiB)', '6GiB')
    >>> format_budget(5 << 30, 0.5), format_budget(5 << 30)
    ('0.5 of the device (5.0 GiB)', '5.0 GiB')
    """
    understood = format_bytes(num_bytes)
    if typed is None:
        text = _round_decimal(num_bytes) or understood
    elif isinstance(typed, str) and not _PLAIN_NUMBER.fullmatch(typed.strip()):
        text = typed.strip()
    elif isinstance(typed, Integral) or (isinstance(typed, str) and typed.strip().lstrip("+").isdecimal()):
        text = f"{int(typed)} B"
    else:
        text = f"{float(typed):g} of the device"
    return text if _unit_of(text) == _unit_of(understood) else f"{text} ({understood})"


def format_budget_exactly(num_bytes: int) -> str:
    """Write a budget with its number of bytes, for errors: to give exactly this one, or another.

    >>> format_budget_exactly(6_000_000_000), format_budget_exactly(6 << 30)
    ('6GB (5.6 GiB, 6000000000 bytes)', '6.0 GiB (6442450944 bytes)')
    """
    text = format_budget(num_bytes)
    return f"{text[:-1]}, {num_bytes} bytes)" if text.endswith(")") else f"{text} ({num_bytes} bytes)"


def _round_decimal(num_bytes: int) -> str | None:
    """A number of bytes in a decimal unit, where it has at most two decimals there and is no round binary number."""
    for power, name in reversed(list(enumerate(("kB", "MB", "GB", "TB", "PB"), start=1))):
        if num_bytes >= 1000**power:
            hundredths, rest = divmod(100 * num_bytes, 1000**power)
            is_round = not rest and num_bytes % MIB
            return f"{hundredths / 100:g}{name}" if is_round else None
    return None


def _unit_of(text: str) -> str:
    match = _QUANTITY.fullmatch(text)
    return match[3].lower() if match is not None else ""


def format_rate(bytes_per_second: float) -> str:
    """Write a rate in GB/s, as datasheets do, or in the decimal unit that suits one that is slower.

    >>> format_rate(25.5e9), format_rate(3.35e12), format_rate(480e6)
    ('25.5 GB/s', '3350.0 GB/s', '480.0 MB/s')
    """
    size, name = next((pair for pair in _RATE_UNITS if bytes_per_second >= pair[0]), (1.0, "B/s"))
    return f"{bytes_per_second / size:.1f} {name}"


def format_seconds(seconds: float) -> str:
    """Write a duration with the unit that suits its size.

    Args:
        seconds: The duration in seconds; may be negative, as differences are.

    Returns:
        Text such as ``"2 min 5 s"``, ``"1.24 s"``, ``"3.1 ms"`` or ``"17.0 us"``.

    >>> format_seconds(1.24), format_seconds(0.0031), format_seconds(125)
    ('1.24 s', '3.1 ms', '2 min 5 s')
    """
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds >= 59.995:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    if seconds >= 0.99995 or seconds == 0:
        return f"{seconds:.2f} s"
    if seconds >= 0.99995e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} us"


def resolve_budget(budget: int | str | float | None, *, device_bytes: int | None) -> int | None:
    """Turn what a user wrote as a budget into bytes.

    Args:
        budget: An int of bytes, a text such as ``"12GiB"``, a float in (0, 1] as a fraction of the device's
            memory, or ``None`` for no budget given. A text without a unit is read as the number in it.
        device_bytes: The memory of the device in bytes, or ``None`` where it is not known.

    Returns:
        The budget in bytes, 1 or more, or ``None`` for ``None``.

    Raises:
        BudgetError: If the budget cannot be read, is ambiguous or not positive, or is a fraction while the
            device's memory is not known.

    >>> resolve_budget("12GiB", device_bytes=None)
    12884901888
    >>> resolve_budget(0.5, device_bytes=16 << 30)
    8589934592
    """
    if budget is None:
        return None
    if isinstance(budget, bool):
        raise BudgetError(f"budget {budget!r} is a truth value; {_ALLOWED}; enabled=False switches off")
    if isinstance(budget, str):
        return _from_text(budget, device_bytes)
    if isinstance(budget, Integral):
        return _from_int(int(budget))
    if isinstance(budget, Real):
        return _from_fraction(float(budget), device_bytes)
    raise BudgetError(f"budget {budget!r} is of type {type(budget).__name__}; {_ALLOWED}")


def resolve_host_budget(budget: int | str | float | None, name: str = "host_budget") -> int | None:
    """Turn what a user wrote as a limit of host memory into bytes, of which there are no fractions.

    Args:
        budget: An int of bytes, a text such as ``"12GiB"``, or ``None`` for none given.
        name: What the user calls it.

    Returns:
        The limit in bytes, or ``None`` for ``None``.

    Raises:
        BudgetError: If it cannot be read, is ambiguous or not positive, or is a fraction.
    """
    try:
        return resolve_budget(budget, device_bytes=None)
    except BudgetError:
        raise BudgetError(
            f"{name} {budget!r} is no size of host memory: give bytes, as an int of 1 MiB or more or as text such as "
            '"12GiB" or "4096B"; without it most of what is free is used'
        ) from None


def _from_text(text: str, device_bytes: int | None) -> int:
    stripped = text.strip()
    if re.fullmatch(r"[+-]?[0-9]{1,40}", stripped):
        return _from_int(int(stripped))
    if _PLAIN_NUMBER.fullmatch(stripped):
        return _from_fraction(float(stripped), device_bytes)
    try:
        num_bytes = parse_bytes(text)
    except BudgetError as error:
        raise BudgetError(f"budget {error}; {_ALLOWED}") from None
    if num_bytes == 0:
        raise BudgetError(f"budget {text!r} is less than one byte, a budget must be positive; {_ALLOWED}")
    return num_bytes


def _from_int(num_bytes: int) -> int:
    if num_bytes <= 0:
        raise BudgetError(f"budget {num_bytes} is not positive; {_ALLOWED}; for no budget pass None")
    if num_bytes < MIB:
        raise BudgetError(
            f"budget {num_bytes} is ambiguous: it may mean {num_bytes} bytes or a fraction of device memory; "
            f'an int below {MIB} (1 MiB) is refused: write "{num_bytes}B" for bytes, '
            f"or a float such as 1.0 for a fraction"
        )
    if num_bytes > _MAX_BYTES:
        raise BudgetError(f"budget {num_bytes} is more than the largest number, {_MAX_BYTES}; {_ALLOWED}")
    return num_bytes


def _from_fraction(fraction: float, device_bytes: int | None) -> int:
    if not 0 < fraction <= 1:  # also false for nan
        raise BudgetError(
            f"budget {fraction!r} is a float outside (0, 1], where a float is a fraction of device memory; "
            f'{_ALLOWED}; for bytes write an int or, say, "1.5GiB"'
        )
    if device_bytes is None:
        raise BudgetError(
            f"budget {fraction!r} is a fraction of device memory, which is not known for this device; "
            f'give bytes instead, as an int or as text such as "12GiB"'
        )
    return max(1, int(fraction * device_bytes))
