"""What cuDNN keeps for backward."""

from __future__ import annotations

import pytest

from lightning_offload.capture.cuda.recurrent import GRU, LSTM, Shape, reserve_bytes


@pytest.mark.parametrize(("mode", "num_bytes"), [(LSTM, 736_000_000), (GRU, 864_000_000)])
def test_reserve_is_the_measured_one(mode: int, num_bytes: int) -> None:
    """That which four layers of width 320 printed, on what must have been 25,000 steps of sequences."""
    shape = Shape(steps=1000, batch=25, num_layers=4, num_directions=1, hidden=320)
    assert reserve_bytes(mode, shape, 4) == num_bytes + 256
