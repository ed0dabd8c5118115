"""Copies of buffers are exact, cost a call for each type, and stay in memory that is known of."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_offload import MemoryPlugin
from lightning_offload.plugins.buffer_copies import BufferCopies
from tests.plugins.training import MIB, attached, rows


class _Ops(TorchDispatchMode):
    """Notes the ops inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def norms(number: int, width: int = 16) -> nn.Sequential:
    """Batch norms: three buffers each, of two types."""
    return nn.Sequential(*[nn.BatchNorm1d(width) for _ in range(number)])


def bits(tensors: Any) -> list[bytes]:
    """Contents."""
    return [t.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def test_one_call_for_each_type() -> None:
    """However many buffers there are, a step given as a function begins with two, in memory of the one before."""
    model = norms(20)
    with attached(model, policy="keep-all") as memory:
        memory.run(lambda: None)
        addresses = [copy.data_ptr() for copy in memory._steps.state.copies]
        with _Ops() as ops:
            memory.run(lambda: None)
        assert [copy.data_ptr() for copy in memory._steps.state.copies] == addresses
    assert [name for name in ops.names if name in ("_foreach_copy_", "copy_", "clone", "empty_like")] == [
        "_foreach_copy_"
    ] * 2


def test_copies_are_those_of_this_time() -> None:
    """What buffers hold when they are copied, not what they held before."""
    copies, buffers = BufferCopies(), list(norms(2).buffers())
    for _ in range(3):
        with copies.of(buffers) as copied:
            assert bits(copied) == bits(buffers)
        for buffer in buffers:
            buffer.add_(1)
    assert copies.num_bytes == sum(buffer.nbytes for buffer in buffers)


def test_any_buffer() -> None:
    """Each type, layout and size; NaNs with their payloads; one that is there twice."""
    odd = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    plain = torch.arange(6.0).reshape(2, 3)
    buffers = [
        odd, plain, plain.t(), plain[:, 1], torch.tensor(3), torch.empty(0), plain.half(), plain.bfloat16(), plain > 2,
        torch.randn(3, dtype=torch.complex64), torch.randn(3, dtype=torch.complex64).conj(), plain,
        odd.to(torch.float8_e4m3fn),
    ]  # fmt: skip
    copies = BufferCopies()
    for _ in range(2):
        with copies.of(buffers) as copied:
            assert [copy.size() for copy in copied] == [buffer.size() for buffer in buffers]
            assert bits(copied) == bits(buffers)
            assert not {copy.data_ptr() for copy in copied if copy.numel()} & {b.data_ptr() for b in buffers}
    with copies.of([torch.ones(2).to_sparse()]) as copied:
        assert copied[0].to_dense().tolist() == [1, 1]


def test_a_loan_inside_a_loan_has_memory_of_its_own() -> None:
    """The outer one's copies stay as they are."""
    copies, buffer = BufferCopies(), torch.zeros(4)
    with copies.of([buffer]) as outer:
        buffer.fill_(1)
        with copies.of([buffer]) as inner:
            assert inner[0].tolist() == [1] * 4
        with copies.of([buffer]):
            assert outer[0].tolist() == [0] * 4
    assert copies.num_bytes == buffer.nbytes


def test_other_buffers_take_the_place_of_those_before() -> None:
    """No more memory is kept than the last copies need, and none after clearing; buffers are not held."""
    copies = BufferCopies()
    with copies.of([torch.zeros(100), torch.zeros(100, dtype=torch.int64)]):
        pass
    assert (copies.num_bytes, copies.version) == (1200, 1)
    buffers = [torch.zeros(100)]
    alive = weakref.ref(buffers[0])
    with copies.of(buffers):
        buffers.clear()
        assert alive() is None
    assert (copies.num_bytes, copies.version) == (400, 2)
    copies.clear()
    assert (copies.num_bytes, copies.version, list(copies)) == (0, 3, [])


def test_inference_mode_does_not_spoil_the_memory() -> None:
    """What is made there cannot be written outside."""
    copies, buffer = BufferCopies(), torch.zeros(4)
    for _ in range(2):
        with torch.inference_mode(), copies.of([buffer]) as copied:
            assert bits(copied) == bits([buffer])
        with copies.of([buffer]) as copied:
            assert bits(copied) == bits([buffer])


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(256, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Linear(64, 8))
        self.register_buffer("bank", torch.zeros(MIB // 4))

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + self.bank[:8]
        return out


@pytest.mark.parametrize("late", [0, 6])
def test_a_budget_knows_of_the_copies(late: int) -> None:
    """From the first step that makes them on, be it one after the plan was final; they go with the plugin."""
    model, batch = _Model(), rows(256)
    with attached(model, policy="all-swap", budget="64MiB") as memory:

        def step() -> None:
            model(batch).square().mean().backward()

        predicted = []
        for index in range(12):
            if index < late:
                with memory.step(batch):
                    step()
            else:
                memory.run(step, batch)
            model.zero_grad()
            predicted.append(memory.report().predicted_peak_bytes or 0)
        copies = memory._steps.state.copies
        assert copies.num_bytes == sum(buffer.nbytes for buffer in model.buffers())
        if late:
            assert 0 <= predicted[late] - predicted[late - 1] - copies.num_bytes < MIB // 16
        assert (memory.report().measured_peak_bytes or 0) <= predicted[-1]
    assert copies.num_bytes == 0
    assert predicted[-1] > 2 * MIB


def test_a_plugin_that_serves_nobody_keeps_nothing() -> None:
    """Steps given as functions run all the same."""
    model = _Model()
    memory = MemoryPlugin(module=model, enabled=False)
    assert memory.run(lambda: 3) == 3
    assert memory._steps.state.copies.num_bytes == 0
