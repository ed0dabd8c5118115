"""Most tests of the engine count tensors from outside, and have the plugin count these alone.

What ops allocate within is no tensor; `test_workspaces` counts all that the allocator gives.
"""

from __future__ import annotations

import pytest

from lightning_offload.capture import workspace
from tests.short_searches import short_searches as short_searches


@pytest.fixture(autouse=True)
def tensors_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing measure what ops allocate within, but where that is what is tested."""
    if request.node.get_closest_marker("workspaces") is None:
        monkeypatch.setattr(workspace, "_profiler", lambda: None)
