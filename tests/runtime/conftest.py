"""One thread is enough for small tensors, and the quickest; the native core, if any."""

from __future__ import annotations

from types import ModuleType

import pytest

from lightning_offload.runtime import native
from lightning_offload.runtime.sight import core_on
from tests.one_thread import one_thread as one_thread
from tests.runtime.executing import CPU


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The native core; without a compiler there is nothing to test."""
    monkeypatch.delenv("LIGHTNING_OFFLOAD_ENGINE", raising=False)
    found = core_on(CPU)
    if found is None:
        pytest.skip(native.why_python())
    return found
