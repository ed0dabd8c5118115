"""A step that does not run is recorded for a device that is not there."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from lightning_offload.planning.planner import plan
from lightning_offload.plugins.fake import Step, record_fake_step
from tests.capture.recording import record
from tests.graph.building import DEVICE
from tests.plugins.training import Net

CARD = dataclasses.replace(DEVICE, flops_per_second=1e12, memory_bytes_per_second=1e11)


def small() -> tuple[nn.Module, Step]:
    """A net and its step."""
    model = Net()
    return model, lambda: model(torch.zeros(64, 256)).square().mean().backward()


@pytest.mark.usefixtures("in_python")
def test_fake_step_is_the_real_one_with_modelled_times() -> None:
    """The digest is that of the real step; each op has a time that is not measured, so two recordings agree."""
    fake = record_fake_step(small, CARD)
    model, step = small()
    assert fake.digest() == record(step, model).digest()
    assert fake == record_fake_step(small, CARD)
    assert fake.seconds > 0


def test_terabytes_cost_no_memory() -> None:
    """A net whose results would fill terabytes is recorded in full and planned."""

    def huge() -> tuple[nn.Module, Step]:
        model = nn.Sequential(nn.Linear(1 << 20, 1 << 20), nn.Sigmoid())
        return model, lambda: model(torch.empty(1 << 18, 1 << 20)).sum().backward()

    graph = record_fake_step(huge, CARD)
    assert sum(storage.num_bytes for storage in graph.storages) > 1 << 42
    assert graph.persistent_bytes >= 4 * ((1 << 40) + (1 << 20))
    assert plan(graph, CARD, None, policy="all-swap").decisions
