"""Units of axes, and texts."""

from __future__ import annotations

import pytest

from lightning_offload.report.scale import bytes_unit, escape, format_share, or_dash, seconds_unit, shorten


def test_bytes_have_the_largest_unit_that_is_not_too_large(subtests: pytest.Subtests) -> None:
    """So that the axis ends at one or more."""
    for largest, name in [(0, "B"), (1023, "B"), (1024, "KiB"), (5 << 20, "MiB"), (1 << 30, "GiB"), (1 << 60, "TiB")]:
        with subtests.test(largest=largest):
            assert bytes_unit(largest).name == name


def test_seconds_have_a_unit_of_two_or_more(subtests: pytest.Subtests) -> None:
    """A step of 1.2 s is read better in milliseconds."""
    for largest, name in [(3.0, "s"), (1.2, "ms"), (0.003, "ms"), (0.0003, "us"), (0.0, "us")]:
        with subtests.test(largest=largest):
            assert seconds_unit(largest).name == name


def test_names_are_safe_and_short() -> None:
    """Markup is text, what cannot be printed is a blank, and a long name keeps its end."""
    assert escape("<b a='1' c=\"2\">&\x00\n") == "&lt;b a=&#x27;1&#x27; c=&quot;2&quot;&gt;&amp;  "
    assert shorten("a.b", 3) == "a.b"
    assert shorten("layer.conv", 5) == "…conv"


def test_what_is_not_known_is_said_so() -> None:
    """And a share that rounds to nothing has no sign."""
    assert (or_dash(None, "bytes"), or_dash(2048, "bytes"), or_dash(0.5, "seconds")) == ("n/a", "2.0 KiB", "500.0 ms")
    assert (format_share(None), format_share(-0.00001), format_share(-0.5)) == ("n/a", "0.0%", "-50.0%")
