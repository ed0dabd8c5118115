"""Replays give the same bits: in-place writes, slices, foreach, generators, autocast, several results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_offload.errors import ReplayError
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.hooks import executing
from lightning_offload.runtime.replay import Replay
from tests.runtime.executing import compiled, executor_for, gradients, plain, planned, under

NORM = nn.BatchNorm1d(16)
CONV = nn.Conv1d(4, 4, 3, padding=1)


def _in_place(x: Tensor) -> Tensor:
    y = x * 2.0
    y.add_(1.0)
    y.mul_(0.5)
    return y.sin()


def _written_slice(x: Tensor) -> Tensor:
    y = x.exp()
    z = y * 1.5
    z[2:5, ::2].mul_(0.5)
    z.t()[1].fill_(0.25)
    return z.cos() * z


def _written_copy(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:4] = x[:4] * 2.0
    y[4:].copy_(x[4:].sigmoid())
    return y.tanh().sin()


def _foreach(x: Tensor) -> Tensor:
    parts = [x[:8] * 1.0, x[8:] * 1.0]
    torch._foreach_add_(parts, 0.5)
    torch._foreach_mul_(parts, [0.9, 1.1])
    return torch.cat([part.sin() for part in parts]).cos()


def _dropout(x: Tensor) -> Tensor:
    return F.dropout(F.dropout(x.sin(), 0.3).cos(), 0.5) * x


def _masks(x: Tensor) -> Tensor:
    mask = torch.empty_like(x.t()).bernoulli_(0.7).div_(0.7)
    return (x.sin() * mask.t()).exp() * torch.empty(16, 16).copy_(x.cos())


def _half_drawn(x: Tensor) -> Tensor:
    noise = torch.zeros(16, 16) + 1.0
    noise[:8].uniform_()
    return (x * noise.sin()).exp()


def _random_like(x: Tensor) -> Tensor:
    noise = torch.rand_like(x)
    noise.bernoulli_(0.4)
    return (x * noise + torch.randn(x.shape)).sin().exp()


def _generator(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    noise = torch.empty_like(x).normal_(generator=generator)
    mask = torch.bernoulli(torch.full_like(x, 0.5), generator=generator)
    return (x.sin() * noise * mask).exp()


def _several_results(x: Tensor) -> Tensor:
    values, indices = x.sin().topk(5)
    low, _ = x.cos().min(1)
    mean, deviation = torch.var_mean(x.exp(), 1)
    return (values.exp().sum(1) * low * mean * deviation + indices.sum(1)).sin()


def _views(x: Tensor) -> Tensor:
    y = x.exp()
    return (y.t()[3:].unsqueeze(0).expand(2, -1, -1) * y.view(-1)[:4].sum()).sin()


def _complex(x: Tensor) -> Tensor:
    z = torch.complex(x.sin(), x.cos())
    return (z.conj() * z.exp()).imag.neg().sin() * z.conj().imag


def _batch_norm(x: Tensor) -> Tensor:
    return F.relu(NORM(x), inplace=True).sin()


def _batch_norm_in_eval(x: Tensor) -> Tensor:
    return F.batch_norm(x.sin(), NORM.running_mean, NORM.running_var, training=False).exp()


def _low_precision(x: Tensor) -> Tensor:
    y = x.bfloat16().exp()
    return (y * y.sigmoid()).float().sin()


def _conv(x: Tensor) -> Tensor:
    out: Tensor = CONV(x.view(4, 4, 16)).relu_().sin()
    return out


def _index_put(x: Tensor) -> Tensor:
    y = x * 1.0
    y[torch.tensor([0, 3, 3]), 2] = 7.0
    y.index_add_(0, torch.tensor([1, 1]), x[:2])
    return y.sin()


def _attention(x: Tensor) -> Tensor:
    q = x.view(1, 2, 8, 16)
    return F.scaled_dot_product_attention(q.sin(), q.cos(), q.exp(), dropout_p=0.2).sin()


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    name.removeprefix("_"): item
    for name, item in list(globals().items())
    if name.startswith("_") and callable(item) and getattr(item, "__annotations__", {}).get("x") == "Tensor"
}


def leaf() -> Tensor:
    """A trainable 16 x 16 matrix."""
    return torch.linspace(-2.0, 2.0, 256).view(16, 16).clone().requires_grad_()


@pytest.mark.parametrize("action", ["recompute", "swap"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_replayed_step_is_exact(name: str, action: str) -> None:
    """Gradients and the generator's state are those of the plain step, and every replay is verified."""
    x = leaf()

    def step() -> Tensor:
        return PROGRAMS[name](x).square().sum()

    program = compiled(step, action)  # type: ignore[arg-type]
    x.grad = None
    statistics = [buffer.clone() for buffer in NORM.buffers()]
    expected = plain(step, x)
    for buffer, before in zip(NORM.buffers(), statistics, strict=True):
        buffer.copy_(before)
    found, ran = planned(step, x, program=program, verify=True)
    assert found == expected
    assert not ran.executor.has_deviated
    assert ran.verifier is not None
    assert not ran.verifier.mismatched


@pytest.mark.parametrize(
    "name", ["in_place", "foreach", "random_like", "several_results", "batch_norm", "written_slice", "masks", "dropout"]
)
def test_these_are_in_fact_replayed(name: str) -> None:
    """The programs of this file are not exact merely because nothing was replayed."""
    x = leaf()

    def step() -> Tensor:
        return PROGRAMS[name](x).square().sum()

    program = compiled(step, "recompute")
    assert program.is_recomputing
    x.grad = None
    _, ran = planned(step, x, program=program, verify=True)
    assert ran.verifier is not None
    assert ran.verifier.num_verified > 0


def test_a_mask_is_drawn_again_on_memory_of_its_own() -> None:
    """A dropout mask, drawn on fresh memory, is a result of nothing but the generator: no input is held for it."""
    x = leaf()

    def step() -> Tensor:
        return F.dropout(x.sin(), 0.3).square().sum()

    graph = compiled(step, "recompute").plan
    mask = [d for d in graph.decisions if d.action == "recompute"]
    assert len(mask) >= 2  # the mask, and what it was multiplied with


def test_batch_norm_updates_its_statistics_once() -> None:
    """A replay leaves running statistics and the count of batches alone."""
    norm, x = nn.BatchNorm1d(16), leaf()

    def step() -> Tensor:
        return norm(x.exp()).sin().sum()

    program = compiled(step, "recompute")
    norm.reset_running_stats()
    plain(step, x, norm.weight, norm.bias)
    expected = [buffer.clone() for buffer in norm.buffers()]
    norm.reset_running_stats()
    planned(step, x, norm.weight, norm.bias, program=program)
    assert all(torch.equal(a, b) for a, b in zip(norm.buffers(), expected, strict=True))


def test_autocast_in_backward_does_not_leak_into_replays() -> None:
    """A replay runs with autocast off, though backward may run under it."""
    x, w = leaf(), leaf()

    def step() -> Tensor:
        return (x @ w).sin().sum()

    program = compiled(step, "recompute")
    x.grad = w.grad = None
    loss = step()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    expected = gradients((x, w))
    with under(program, verify=True) as ran:
        loss = step()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
            assert torch.is_autocast_enabled("cpu")
    assert gradients((x, w)) == expected
    assert ran.verifier is not None
    assert ran.verifier.num_verified == 1
    assert not ran.verifier.mismatched
    assert not ran.executor.has_deviated


def test_scalars_are_those_of_this_step() -> None:
    """A number that changes from step to step is replayed with its present value, not the recorded one."""
    x, scale = leaf(), [1.0]

    def step() -> Tensor:
        return (x * scale[0]).sin().cos().sum()

    program = compiled(step, "recompute")
    scale[0] = 3.0
    x.grad = None
    expected = plain(step, x)
    assert planned(step, x, program=program)[0] == expected


def test_chains_are_replayed_once_where_they_are_memoised() -> None:
    """Of a chain of saved results the first unpack replays all, the others find theirs."""
    x = leaf()

    def step() -> Tensor:
        y = x
        for _ in range(6):
            y = y.sin()
        return y.sum()

    program = compiled(step, "recompute")
    x.grad = None
    calls: list[str] = []
    with under(program) as ran:
        ran.live.on_allocation = lambda storage: calls.append("made")  # type: ignore[method-assign]
        step().backward()
    assert len(calls) == 5  # x itself is a leaf, and the last result is not saved


def test_replay_of_another_size_raises() -> None:
    """A producer that gives another size the second time is an error, never a wrong gradient."""
    x = leaf()

    def step() -> Tensor:
        return (x + 1.0).sin().sum()

    program = compiled(step, "recompute")
    executor = executor_for(program)
    original = Replay._run

    def lying(self: Replay, call: Any, *args: Any) -> None:
        call.args = (call.args[0], torch.zeros(3, 16, 16))
        original(self, call, *args)

    with mock.patch.object(Replay, "_run", lying), executing(executor):
        loss = step()
        with pytest.raises(ReplayError, match="bytes on replay"):
            loss.backward()


@pytest.mark.parametrize("action", ["recompute", "swap"])
def test_memory_is_given_up_between_forward_and_backward(action: str) -> None:
    """After forward nothing of the saved results is left on the device but what the program holds."""
    x = leaf()

    def step() -> Tensor:
        y = x
        for _ in range(8):
            y = (y * 1.5).sin()
        return y.sum()

    program = compiled(step, action)  # type: ignore[arg-type]
    x.grad = None
    with under(program) as ran:
        loss = step()
        ran.live.on_allocation(torch.zeros(1, dtype=torch.uint8).untyped_storage())
        assert ran.live._live_bytes - ran.live._older_bytes <= 8
        loss.backward()


def test_many_steps_share_nothing() -> None:
    """Executors of different steps that are alive together keep their own calls and values."""
    x = leaf()

    def step() -> Tensor:
        return x.sin().exp().sum() * scale[0]

    scale = [1.0]
    program = compiled(step, "recompute")
    x.grad = None
    losses: list[Tensor] = []
    expected: list[list[bytes]] = []
    executors: list[StepExecutor] = []
    for factor in (1.0, 2.0, 3.0):
        scale[0] = factor
        expected.append(plain(step, x)[:1])
        executors.append(executor_for(program))
        with executing(executors[-1]):
            losses.append(step())
    for loss, wanted in zip(losses, expected, strict=True):
        loss.backward()
        assert gradients((x,)) == wanted
