"""What is on the device beside steps: listed seldom, followed in between."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from lightning_offload.plugins.baseline import Baseline
from lightning_offload.plugins.persistent import PersistentState
from tests.plugins.training import MIB, attached, net, rows, train_step

CPU = torch.device("cpu")


def _scanned() -> Baseline:
    baseline = Baseline(PersistentState(lambda parameters: None))
    baseline.look(CPU, (), is_recorded=True)
    return baseline


def test_what_was_given_is_followed_as_long_as_it_lives() -> None:
    """Its storage, that is: a view that was given is not what holds it."""
    baseline = _scanned()
    one, other = torch.ones(100), torch.ones(30)
    baseline.note_inputs(CPU, [one[:50], other, "text", None], "like")
    baseline.look(CPU, (), is_recorded=False)
    before = baseline.look(CPU, (), is_recorded=False)
    assert {one.untyped_storage()._cdata, other.untyped_storage()._cdata} <= before.storages.keys()
    key = one.untyped_storage()._cdata
    del one, before
    after = baseline.look(CPU, (), is_recorded=False)
    assert key not in after.storages
    assert other.untyped_storage()._cdata in after.storages
    assert not after.replaced


def test_what_comes_takes_the_place_of_what_went() -> None:
    """A batch that lay ready, and is given now: the next one lies in its place until that is given in turn."""
    baseline = _scanned()
    batches = [torch.ones(70)]
    baseline.look(CPU, (), is_recorded=False)
    for _ in range(3):
        baseline.note_inputs(CPU, batches, "like")
        baseline.note_inputs(CPU, [torch.ones(70)], "other")  # of another kind of step
        assert not baseline.look(CPU, (), is_recorded=False).replaced
        batches.clear()
        assert list(baseline.look(CPU, (), is_recorded=False).replaced) == [280]
        batches.append(torch.ones(70))


def test_what_unwatched_steps_leave_takes_the_place_of_what_watched_ones_left() -> None:
    """Where it was there until then: what the program drops between steps of a kind leaves nothing behind."""
    baseline = _scanned()
    baseline.look(CPU, (), is_recorded=False)
    output, dropped = torch.ones(60), torch.ones(50)
    baseline.note_left([output.untyped_storage()], like="held")
    baseline.note_left([dropped.untyped_storage()], like="dropped")
    del dropped
    assert not baseline.look(CPU, (), is_recorded=False).replaced
    del output
    baseline.note_unwatched("held")
    baseline.note_unwatched("dropped")
    assert list(baseline.look(CPU, (), is_recorded=False).replaced) == [240]
    output = torch.ones(60)
    baseline.note_left([output.untyped_storage()], like="held")
    assert not baseline.look(CPU, (), is_recorded=False).replaced
    del output
    assert not baseline.look(CPU, (), is_recorded=False).replaced


def test_a_scan_finds_what_unwatched_steps_left() -> None:
    """It counts once, and no more once a watched step has left another one."""
    baseline = _scanned()
    baseline.look(CPU, (), is_recorded=False)
    output = torch.ones(60)
    baseline.note_left([output.untyped_storage()], like="held")
    del output
    baseline.note_unwatched("held")
    output = torch.ones(60)
    baseline.doubt()
    assert not baseline.look(CPU, (), is_recorded=False).replaced
    new = torch.ones(60)
    baseline.note_left([new.untyped_storage()], like="held")
    del output
    assert not baseline.look(CPU, (), is_recorded=False).replaced


def test_storages_die_in_any_thread() -> None:
    """While others are followed."""
    baseline, held = _scanned(), [torch.ones(50) for _ in range(2000)]
    baseline.look(CPU, (), is_recorded=False)
    thread = threading.Thread(target=held.clear)
    thread.start()
    for _ in range(200):
        baseline.note_inputs(CPU, [torch.ones(3)], "like")
    thread.join()
    assert list(baseline.look(CPU, (), is_recorded=False).replaced) == 2000 * [200]


class Secretive(Tensor):
    """Tells nobody where it lies."""

    def untyped_storage(self) -> Any:
        """Refuse."""
        raise NotImplementedError("this one has no storage to show")


def test_inputs_that_do_not_tell_where_they_lie_end_no_training() -> None:
    """Subclasses; wrappers of transforms, in which no step begins."""
    model = nn.Linear(4, 4)
    with attached(model, budget="1GiB") as memory:

        def one(x: Tensor) -> Any:
            with memory.step(x):
                return model(x).sum()

        with pytest.warns(UserWarning, match="within a transform"):
            torch.vmap(one)(torch.randn(3, 4)).sum().backward()
        assert memory.report().phase == "idle"
        for _ in range(4):
            with memory.step(torch.ones(2, 4).as_subclass(Secretive), torch.ones(2, 4)):
                model(torch.ones(2, 4)).sum().backward()
        assert memory.report().phase == "planned"


def test_no_budget_is_refused_for_what_a_scan_would_not_find() -> None:
    """Something large that was there at the second scan alone, as a validation's results are, and then a new shape."""
    model = net()
    train_step(model, rows(64))
    with MemoryPlugin("1GiB", module=model, policy="all-swap") as memory:
        for _ in range(3):
            train_step(model, rows(2048), memory)
        floor = memory.report().floor_bytes
    assert floor is not None
    with MemoryPlugin(floor + MIB, module=model) as memory:
        train_step(model, rows(64), memory)
        results = torch.zeros(8 * MIB // 4)
        train_step(model, rows(64), memory)
        del results
        phases = []
        for _ in range(4):
            train_step(model, rows(2048), memory)
            phases.append(memory.phase)
    assert phases == ["recording", "verifying", "measuring", "planned"]
