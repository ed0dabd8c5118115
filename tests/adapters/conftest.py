"""One thread is enough for small tensors, and the quickest; nothing of Accelerate outlives a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState

from tests.one_thread import one_thread as one_thread
from tests.short_searches import short_searches as short_searches


@pytest.fixture(autouse=True)
def no_accelerator_state() -> Iterator[None]:
    """Accelerate's states are shared by all accelerators of the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()
