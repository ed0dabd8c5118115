"""Over lanes of streams that dawdle, every bit is that of plain PyTorch: no memory is used before or after its time.

The tests of faults run over `tests.engine.streams` here; the cases of the zoo do in `tests.engine.test_cases`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_offload import MemoryPlugin
from lightning_offload.runtime.stream_lanes import StreamCopy
from tests.engine.faults import FAULTY_STEPS, without_gc
from tests.engine.harness import Outcome, Wrap, assert_same, differences, run
from tests.engine.live_tracker import LiveStorageTracker
from tests.engine.probing import plain_outcome
from tests.engine.streams import Delays, Poison, only_in, only_out, streaming
from tests.engine.test_faults import RAISING, WRAPS, check_exception
from tests.engine.test_faults import (
    test_a_graph_outlives_its_step_and_the_plugin as test_a_graph_outlives_its_step_and_the_plugin,
)
from tests.engine.test_faults import test_backward_from_another_thread as test_backward_from_another_thread
from tests.engine.test_faults import test_keyboard_interrupt_leaves_nothing as test_keyboard_interrupt_leaves_nothing
from tests.one_thread import one_thread as one_thread
from tests.runtime.fake_streams import FakeStreamLanes
from tests.shares import is_all
from tests.zoo.case import Case
from tests.zoo.cases import BY_NAME
from tests.zoo.models.sandwich import Sandwich, body_case, rows, square_loss

TYPICAL = ("resnet-basic", "gpt2-sdpa", "views-of-one-storage")


@pytest.fixture(autouse=True)
def poison() -> Iterator[Poison]:
    """Lanes of streams for every test here."""
    with streaming() as poison:
        yield poison


def all_swapped(case: Case, *, wrap: Wrap = Wrap.WHOLE, **keywords: object) -> Outcome:
    """Train with everything swapped."""
    memory = MemoryPlugin(budget=None, policy="all-swap", **keywords)  # type: ignore[arg-type]
    return run(case, memory=memory, wrap=wrap)


@pytest.mark.parametrize("delays", [only_out, only_in])
@pytest.mark.parametrize("wrap", [Wrap.FORWARD, Wrap.BARE], ids=lambda wrap: wrap.value)
@pytest.mark.parametrize("name", TYPICAL)
def test_same_bits_with_one_slow_stream(name: str, wrap: Wrap, delays: Delays) -> None:
    """Whichever direction is late, and wherever the step's scope ends, bits are the same."""
    with streaming(delays):
        assert_same(plain_outcome(name), all_swapped(BY_NAME[name], wrap=wrap))


@WRAPS
@RAISING
@pytest.mark.parametrize("step", FAULTY_STEPS if is_all() else FAULTY_STEPS[-1:])
@pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
def test_exception_leaves_nothing(policy: str, step: int, raising: Any, wrap: Wrap) -> None:
    """After an exception under the final plan no hook, mode or memory is left, and the following steps are exact."""
    check_exception(policy, step, raising, wrap)


@pytest.mark.parametrize("name", TYPICAL)
def test_same_bits_on_disk(name: str, tmp_path: Path) -> None:
    """On the way to a disk, bytes pass the device's streams and the workers' threads."""
    assert_same(plain_outcome(name), all_swapped(BY_NAME[name], tier="disk", spill_dir=tmp_path))


@pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
def test_outputs_never_backpropagated_leave_nothing(policy: str) -> None:
    """What a forward saved is freed with its outputs and the copies under way, without the garbage collector."""
    memory = MemoryPlugin(budget=None, policy=policy)
    model = Sandwich(torch.sin)
    tracker = LiveStorageTracker()
    tracker.register(model)
    persistent = tracker.live_bytes
    with without_gc(), tracker, memory:
        for step in range(12):
            batch = rows(step)
            with memory.step(batch):
                loss = square_loss(model, batch)
                if step % 3 == 0:
                    loss.backward()
                    model.zero_grad()
            del loss, batch
            assert memory._steps.hardware is not None
            memory._steps.hardware.tiers.drain()
            assert tracker.live_bytes == persistent, step


def test_a_missing_wait_would_be_seen() -> None:
    """Where compute does not wait for copies, bits are wrong: these tests can fail."""
    case = body_case("waits", torch.sin)
    assert_same(run(case), all_swapped(case))
    wait = StreamCopy.wait

    def careless(self: StreamCopy) -> float:
        """Copies in are not waited for; their memory is held all the same, so that nothing is corrupted."""
        return 0.0 if self in self._lanes._in.under_way else wait(self)

    with streaming(late), mock.patch.object(StreamCopy, "wait", careless):
        assert differences(run(case), all_swapped(case))


def late(mover: FakeStreamLanes) -> None:
    """Delay every copy for longer than a small op takes, however busy the machine is."""
    mover.out_stream.delay = mover.in_stream.delay = lambda: 0.01
