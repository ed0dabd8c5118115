"""A device is told from others of its type."""

from __future__ import annotations

import pytest
import torch

from lightning_offload.capture import placement
from lightning_offload.capture.placement import indexed


def test_cpu_has_no_index() -> None:
    """However a CPU is named, it is the device that tensors on it name."""
    for name in ("cpu", "cpu:0"):
        assert indexed(torch.device(name)) == torch.ones(1).device == torch.device("cpu")


def test_an_index_stays() -> None:
    """A device that is given with its index is that one; no accelerator is asked."""
    assert indexed(torch.device("cuda", 1)) == torch.device("cuda", 1)


def test_an_accelerator_without_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an index the current one of several devices is meant; other types than the machine's are left alone."""

    class Fake:
        @staticmethod
        def current_accelerator(*, check_available: bool) -> torch.device:
            assert check_available
            return torch.device("cuda")

        @staticmethod
        def current_device_index() -> int:
            return 3

    monkeypatch.setattr(placement.torch, "accelerator", Fake)
    assert indexed(torch.device("cuda")) == torch.device("cuda", 3)
    assert indexed(torch.device("xpu")) == torch.device("xpu")
    assert indexed(torch.device("cuda", 1)) == torch.device("cuda", 1)
