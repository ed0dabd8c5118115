"""Replays that lie are found out, and the original is used instead."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_offload.runtime.host_pool import HostPool
from lightning_offload.runtime.values import LiveValue
from lightning_offload.runtime.verifier import Verifier
from lightning_offload.tensors import op_facts
from lightning_offload.tensors.geometry import Geometry
from tests.runtime.executing import compiled, plain, planned
from tests.runtime.inline import inline_tiers


def verified(original: Tensor, replayed: Tensor, view: Tensor) -> tuple[Verifier, torch.UntypedStorage]:
    """Compare a replay with its original over a view of the original."""
    verifier = Verifier(inline_tiers())
    value = LiveValue(5, original.nbytes)
    value.original = verifier.remember(original.untyped_storage())
    return verifier, verifier.verify(value, replayed.untyped_storage(), Geometry.of(view))


def test_equal_replay_is_used() -> None:
    """The same bits are accepted, NaNs among them, and counted."""
    original = torch.tensor([1.0, float("nan"), -0.0])
    replayed = original.clone()
    verifier, storage = verified(original, replayed, original)
    assert storage is replayed.untyped_storage()
    assert (verifier.num_verified, verifier.mismatched) == (1, set())


def test_other_bits_are_replaced_by_the_original(caplog: pytest.LogCaptureFixture) -> None:
    """A zero of another sign is a mismatch: it is logged, reported, and the memory holds the original again."""
    original, replayed = torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0])
    with caplog.at_level(logging.DEBUG):
        verifier, storage = verified(original, replayed, original)
    assert verifier.mismatched == {5}
    assert storage is replayed.untyped_storage()
    assert replayed.signbit().tolist() == [False, True]
    assert "storage 5" in caplog.text


def test_only_the_bytes_of_the_view_count() -> None:
    """What no saved tensor covers may differ, as in the padding of a result."""
    original, replayed = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 9.0])
    assert verified(original, replayed, original[:2])[0].mismatched == set()
    assert verified(original, replayed.clone(), original[1:])[0].mismatched == {5}


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize(("room", "is_beside"), [(1 << 30, True), (1 << 20, False), (0, False)])
def test_originals_come_to_the_device_where_there_is_room(
    room: int, is_beside: bool, is_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compared there, and nothing of them stays; where there is less room they are compared on the host."""
    tiers = inline_tiers()
    verifier = Verifier(tiers, room=lambda: room)
    original, value = torch.tensor([[1.0, float("nan")], [-0.0, 2.0]]), LiveValue(5, 16)
    replayed = original.clone() if is_same else torch.zeros(2, 2)
    value.original = verifier.remember(original.untyped_storage())
    brought: list[weakref.ref[torch.UntypedStorage]] = []
    swap_in = tiers.swap_in

    def bring(block: Any, storage: torch.UntypedStorage) -> Any:
        brought.append(weakref.ref(storage))
        return swap_in(block, storage)

    monkeypatch.setattr(tiers, "swap_in", bring)
    found = verifier.verify(value, replayed.untyped_storage(), Geometry.of(original.t()))
    assert found is replayed.untyped_storage()
    assert replayed.view(torch.int32).tolist() == original.view(torch.int32).tolist()
    assert (verifier.num_verified, verifier.mismatched) == (1, set() if is_same else {5})
    assert len(brought) == is_beside + (not is_same)
    assert [storage() for storage in brought if storage() is not found] == [None] * is_beside


def test_mismatch_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Several saved tensors on one storage give one message."""
    original = torch.tensor([1.0, 2.0])
    verifier = Verifier(inline_tiers())
    value = LiveValue(5, 8)
    value.original = verifier.remember(original.untyped_storage())
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            verifier.verify(value, torch.zeros(2).untyped_storage(), Geometry.of(original))
    assert len(caplog.records) == 1
    assert verifier.num_verified == 3


def test_without_host_memory_nothing_is_remembered() -> None:
    """Where the host has no room, the value goes unverified."""
    verifier = Verifier(inline_tiers(HostPool(budget_bytes=64)))
    assert verifier.remember(torch.zeros(1000).untyped_storage()) is None


@pytest.fixture
def lying_op(monkeypatch: pytest.MonkeyPatch) -> object:
    """An op with a hidden counter, which is taken for replayable."""
    calls = [0]

    def lie(x: Tensor) -> Tensor:
        calls[0] += 1
        return x * float(calls[0])

    with torch.library._scoped_library("offload_lies", "FRAGMENT") as library:
        library.define("counted(Tensor x) -> Tensor")
        library.impl("counted", lie, "CompositeExplicitAutograd")

        class Counted(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, x: Tensor) -> Tensor:
                return torch.ops.offload_lies.counted(x)

            @staticmethod
            def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
                return grad

        monkeypatch.setattr(op_facts, "_NAMESPACES", op_facts._NAMESPACES | {"offload_lies"})
        monkeypatch.setattr(op_facts, "_CACHE", {})
        yield lambda x: (Counted.apply(x), calls)


def test_op_with_hidden_state_is_found_out(lying_op: object) -> None:
    """An op that gives other results on replay is reported, and the gradient of that step is exact still."""
    x = torch.linspace(-1, 1, 500).requires_grad_()
    counter: list[int] = []

    def step() -> Tensor:
        y, calls = lying_op(x)  # type: ignore[operator]
        counter[:] = [0]
        calls_seen.append(calls)
        return y.sin().sum()

    calls_seen: list[list[int]] = []
    program = compiled(step, "recompute")
    assert program.is_recomputing
    x.grad = None
    calls_seen[0][0] = 0
    expected = plain(step, x)
    calls_seen[0][0] = 0
    found, ran = planned(step, x, program=program, verify=True)
    assert found == expected
    assert ran.verifier is not None
    assert ran.verifier.mismatched == set(program.decisions)
    calls_seen[0][0] = 0
    assert planned(step, x, program=program)[0] != expected  # unverified, the lie would have shown


def test_trusted_storages_are_not_doubted() -> None:
    """What was verified in an earlier step leaves its room to what was not."""
    verifier = Verifier(inline_tiers(HostPool()), trusted={1})
    assert not verifier.doubts(LiveValue(1, 40))
    assert verifier.doubts(LiveValue(2, 40))
