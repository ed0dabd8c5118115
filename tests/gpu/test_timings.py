"""What a report says of times on a device that computes behind its host."""

from __future__ import annotations

import time
from unittest import mock

import torch
from torch import nn

from lightning_offload import MemoryPlugin
from lightning_offload.plugins import step as step_module
from tests.gpu.device import CUDA_MARKS, DEVICE, TOLERANT, warm_up

pytestmark = [*CUDA_MARKS, TOLERANT]

NUM_STEPS = 10


def test_a_plan_that_keeps_everything_is_told_by_its_first_steps() -> None:
    """The ops of a recorded step are launched slowly; a few events tell what steps take, and then none is recorded."""
    warm_up()
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())]).to(DEVICE)
    batch = torch.ones(512, 256, device=DEVICE)
    with (
        MemoryPlugin("1TiB", module=model) as memory,
        mock.patch.object(step_module, "record_event", wraps=step_module.record_event) as record_event,
    ):
        seconds, num_events, phases = [], [], []
        for _ in range(NUM_STEPS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            with memory.step(batch):
                model(batch).square().mean().backward()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            model.zero_grad()
            num_events.append(record_event.call_count)
            phases.append(memory.report().phase)
        report = memory.report()
    assert report.phase == "planned"
    assert report.kept_bytes > 0 == report.swapped_bytes == report.recomputed_bytes
    first = phases.index("planned")
    timed = slice(first, first + 3)
    assert report.predicted_step_seconds is not None
    assert 0 < report.predicted_step_seconds == report.plain_step_seconds <= sorted(seconds[timed])[1]
    assert num_events[-1] == num_events[timed.stop - 1] > num_events[first]
