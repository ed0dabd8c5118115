"""Text from the sources of Python's standard library."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from benchmarks.tuner.text import MODULES, NUM_BYTES, sequences


def test_tokens_are_the_bytes_of_the_sources() -> None:
    """Read again as bytes they are the file, but for a rest shorter than a sequence."""
    tokens = sequences(32, ("textwrap",))
    text = Path(textwrap.__file__).read_bytes()
    assert tokens.dtype == torch.int64
    assert tokens.shape == (len(text) // 32, 32)
    assert bytes(tokens.flatten().tolist()) == text[: tokens.numel()]


def test_every_module_is_there() -> None:
    """There is more than a megabyte of text, and no token beyond a byte."""
    assert len(set(MODULES)) == len(MODULES)
    tokens = sequences(64)
    assert tokens.numel() > 1_000_000
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < NUM_BYTES
    assert sum(len(sequences(1, (module,))) for module in MODULES) // 64 == len(tokens)


def test_without_sources_the_error_says_so() -> None:
    """Modules that are built in, or missing, have no file to read."""
    with pytest.raises(FileNotFoundError, match="no sources of its standard library"):
        sequences(8, ("sys", "no_such_module_anywhere"))
