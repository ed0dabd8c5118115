"""What pytest needs to know of the emulated device: `-p tests.emulated_cuda.plugin`, where EMULATED_CUDA=1 is set.

A test fails that left races behind: accesses of two streams to the same bytes that nothing orders. One that breaks the
runtime on purpose takes its races itself, cf. `tests.gpu.device.take_races`. Tests that mean nothing there are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import emulated_cuda
import pytest
import torch

_NUM_SHOWN = 5

_MEANINGLESS = {
    "test_cudnn_benchmark": "there is no cuDNN",
    "sparse-": "there are no sparse tensors",
    "test_cuda_graph_captured_in_a_step": "there are no graphs",
}
"""Part of a test's id, and why it cannot mean anything here."""


def pytest_report_header() -> str:
    """Say where the tests run."""
    return f"emulated CUDA: {emulated_cuda.__file__}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot mean anything here, with the reason."""
    for item in items:
        for part, reason in _MEANINGLESS.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=f"on the emulated device: {reason}"))


@pytest.fixture(autouse=True)
def no_races() -> Iterator[None]:
    """Fail a test after which there are races that it did not take."""
    emulated_cuda.take_races()
    yield
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)  # what follows uses this test's memory again
    races = emulated_cuda.take_races()
    shown = "\n  ".join([*races[:_NUM_SHOWN], *(["..."] if len(races) > _NUM_SHOWN else [])])
    assert not races, f"the test left {len(races)} races:\n  {shown}"
