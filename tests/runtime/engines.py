"""Steps in both engines, the native core and Python: what runs them, and what there is to run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_offload.runtime.cpu_lanes import CpuLanes
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.hooks import executing
from lightning_offload.runtime.host_pool import HostPool
from lightning_offload.runtime.lanes import Block, Copy, CopyLanes, LaneTimes
from lightning_offload.runtime.native_executor import NativeExecutor, core_for
from lightning_offload.runtime.native_lanes import NativeLanes
from lightning_offload.runtime.program import Program
from lightning_offload.runtime.tiers import Tiers
from tests.runtime.executing import CPU, Step, gradients
from tests.runtime.inline import inline_lanes


class Log(CopyLanes):
    """Lanes that note what they copy."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self._lanes = inline_lanes()

    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        self.events.append(("out", storage.nbytes()))
        return self._lanes.swap_out(storage, block)

    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        self.events.append(("in", storage.nbytes()))
        return self._lanes.swap_in(block, storage)


class _LateCopy(Copy):
    def __init__(self, make: Callable[[], Copy]) -> None:
        self._make: Callable[[], Copy] | None = make

    @property
    def is_done(self) -> bool:
        return self._make is None

    def wait(self) -> float:
        make, self._make = self._make, None
        return make().wait() if make is not None else 0.0

    def synchronize(self) -> None:
        self.wait()


class LateLanes(Log):
    """Lanes that copy when they are waited for: a wait that is missing gives other bytes."""

    def swap_out(self, storage: torch.UntypedStorage, block: Block) -> Copy:
        out = super().swap_out
        return _LateCopy(lambda: out(storage, block))

    def swap_in(self, block: Block, storage: torch.UntypedStorage) -> Copy:
        copy_in = super().swap_in
        return _LateCopy(lambda: copy_in(block, storage))


Ran = tuple[list[bytes], StepExecutor, list[tuple[str, int]]]


@contextlib.contextmanager
def under(program: Program, engine: str, lanes: CopyLanes, *, sees_ops: bool | None = None) -> Iterator[StepExecutor]:
    """Run what is inside as a step in one of the engines."""
    tiers = Tiers(lanes, HostPool())
    is_seen = program.needs_ops if sees_ops is None else sees_ops
    executor: StepExecutor
    if engine == "native":
        found = core_for(program, CPU)
        assert found is not None
        executor = NativeExecutor(found, device=CPU, tiers=tiers, program=program, sees_ops=is_seen)
    else:
        executor = StepExecutor(
            device=CPU, tiers=tiers, program=program, observer=None, verifier=None, sees_ops=is_seen
        )  # fmt: skip
    with executing(executor):
        yield executor


def ran(step: Step, leaves: tuple[Tensor, ...], program: Program, engine: str, **how: Any) -> Ran:
    """Gradients and the generator's state after a step in an engine; its executor, and what was copied."""
    lanes = Log()
    bits, executor = _ran(step, leaves, program, engine, lanes, **how)
    return bits, executor, lanes.events


def ran_in_core(step: Step, leaves: tuple[Tensor, ...], program: Program, **how: Any) -> tuple[list[bytes], LaneTimes]:
    """The same in the native core, which makes the copies itself; what they were."""
    bits, executor = _ran(step, leaves, program, "native", CpuLanes(), **how)
    assert isinstance(executor, NativeExecutor)
    lanes = executor._tiers.lanes
    assert isinstance(lanes, NativeLanes)
    times = lanes.take_times()
    lanes.close()
    return bits, times


def _ran(
    step: Step, leaves: tuple[Tensor, ...], program: Program, engine: str, lanes: CopyLanes, **how: Any
) -> tuple[list[bytes], StepExecutor]:
    torch.manual_seed(3)
    with under(program, engine, lanes, **how) as executor:
        step().backward()
    return [*gradients(leaves), bytes(torch.get_rng_state().numpy().tobytes())], executor


def plainly(step: Step, leaves: tuple[Tensor, ...]) -> list[bytes]:
    """The same of a plain step."""
    torch.manual_seed(3)
    step().backward()
    return [*gradients(leaves), bytes(torch.get_rng_state().numpy().tobytes())]


def shown(executor: StepExecutor) -> tuple[object, ...]:
    """What is told of a step."""
    return (
        executor.deviation, executor.num_packs, executor.num_unpacks, executor.swapped_bytes, executor.stayed_bytes,
        executor.took_data, executor.unforeseen_bytes, executor.has_materialized, executor.is_spent,
    )  # fmt: skip


def weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)


def _chain(activation: Callable[[Tensor], Tensor]) -> Callable[[], tuple[Step, tuple[Tensor, ...]]]:
    def make() -> tuple[Step, tuple[Tensor, ...]]:
        (w,), x = weights((8, 8)), torch.randn(4, 8)

        def step() -> Tensor:
            h = x
            for _ in range(4):
                h = activation(h @ w)
            return h.square().sum()

        return step, (w,)

    return make


def _module(
    build: Callable[[], nn.Module], *shape: int, ints: bool = False
) -> Callable[[], tuple[Step, tuple[Tensor, ...]]]:
    def make() -> tuple[Step, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        module = build()
        x = torch.randint(0, 7, shape) if ints else torch.randn(shape)
        before = {name: tensor.clone() for name, tensor in module.named_buffers()}

        def step() -> Tensor:
            for name, tensor in module.named_buffers():
                tensor.data.copy_(before[name])
            out = module(x)
            return (out[0] if isinstance(out, tuple) else out).float().square().mean()

        return step, tuple(module.parameters())

    return make


def _lists() -> tuple[Step, tuple[Tensor, ...]]:
    (w, v), rows = weights((6, 5), (6, 5)), torch.tensor([0, 2, 2, 5])

    def step() -> Tensor:
        a, b = (w * v).tanh(), (w + v).sigmoid()
        joined = torch.cat([a, b, a.exp()], dim=1)
        picked = joined[rows, :].tanh()
        first, second = torch.stack([picked, picked.sin()]).unbind(0)
        return (first * second).relu().sum()

    return step, (w, v)


def _complex() -> tuple[Step, tuple[Tensor, ...]]:
    (w,) = weights((5, 5), dtype=torch.complex64)

    def step() -> Tensor:
        h = (w.mH @ w).conj().sin() * w.imag.exp()
        return torch.view_as_real(h @ w.conj()).square().sum()

    return step, (w,)


def _autocast() -> tuple[Step, tuple[Tensor, ...]]:
    (w,), x = weights((8, 8)), torch.randn(4, 8)

    def step() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = torch.tanh(x @ w) @ w
        return torch.nn.functional.layer_norm(h.float(), (8,)).exp().sum()

    return step, (w,)


def _writes() -> tuple[Step, tuple[Tensor, ...]]:
    (w,), x = weights((8, 8)), torch.randn(4, 8)

    def step() -> Tensor:
        state = x.clone()
        kept = []
        for i in range(4):
            h = (state.clone() @ w).sin_()
            kept.append(h.mul(2.0).add_(float(i)))
            state.copy_(h.detach())
        torch._foreach_mul_([k.detach() for k in kept[:1]], 1.0)
        return torch.stack([k.exp() for k in kept]).sum()

    return step, (w,)


def _cross_entropy() -> tuple[Step, tuple[Tensor, ...]]:
    (w,), x, target = weights((8, 5)), torch.randn(6, 8), torch.tensor([0, 1, -100, 3, 4, -100])
    weight = torch.rand(5)

    def step() -> Tensor:
        return torch.nn.functional.cross_entropy((x @ w).tanh(), target, weight=weight, label_smoothing=0.1)

    return step, (w,)


def _formulas() -> tuple[Step, tuple[Tensor, ...]]:
    (w, v), x = weights((6, 6), (1,)), torch.randn(6, 6)

    def step() -> Tensor:
        h = (x @ w).sin()
        filled = h.masked_fill(x > 0, v.sum()).exp()
        return h.exp().prod(dim=1).sum() + filled.max() + (h * h).cumprod(0).sum() + torch.linalg.det(h)

    return step, (w, v)


def _parts() -> tuple[Step, tuple[Tensor, ...]]:
    (w,), x = weights((4, 6)), torch.randn(4, 6)

    def step() -> Tensor:
        h, other = x.mul(2.0), x.mul(3.0)
        h[:, 1:3].zero_()
        other[2].fill_(0.5)
        first, second = other.mul(2.0).unsafe_chunk(2)
        first.add_(1.0)
        return (h * w).sin().exp().sum() + (other * w).exp().sum() + (second * w[2:]).sum() + (first * w[:2]).sum()

    return step, (w,)


def _drawn() -> tuple[Step, tuple[Tensor, ...]]:
    (w,), own = weights((3,)), torch.Generator()

    def step() -> Tensor:
        own.manual_seed(5)
        noise = [torch.randn(3, generator=own), torch.normal(0.0, 1.0, (3,), generator=own), torch.randn(3)]
        noise += [torch.randn(3, dtype=torch.float64).float(), torch.rand(3, device="cpu")]
        return torch.stack([(w * each.mul(2.0)).sin().exp() for each in noise]).sum()

    return step, (w,)


def _statistics() -> tuple[Step, tuple[Tensor, ...]]:
    (w,), x = weights((4,)), torch.randn(6, 4)

    def step() -> Tensor:
        mean, var = torch.zeros(4), torch.ones(4)
        h = torch.nn.functional.batch_norm(x * w, mean, var, training=True)
        return (h * mean.exp() * w).sum() + (var.sin() * w).exp().sum()

    return step, (w,)


def _numbers() -> tuple[Step, tuple[Tensor, ...]]:
    (w,) = weights((4,))

    def step() -> Tensor:
        total = (w.detach() * w.detach()).sum()
        return ((total * 0.1).sin() * w).exp().sum() + ((total + 1) * w).sin().sum()

    return step, (w,)


def _overwritten() -> tuple[Step, tuple[Tensor, ...]]:
    (w,), x = weights((4, 6)), torch.randn(4, 6)

    def step() -> Tensor:
        h = x.mul(2.0)
        before = h.exp()
        h.sin_()
        both = h.add(before)
        other = both.mul(2.0)
        return (both * w).sin().sum() + (other.add_(h).add_(before) * w).exp().sum() + (h * w).sum()

    return step, (w,)


def _read_and_written() -> tuple[Step, tuple[Tensor, ...]]:
    """One replay in which a value is written in place before another call reads it."""
    (w,), x = weights((4, 4)), torch.randn(4, 4)

    def step() -> Tensor:
        h = x * 1.5
        before = h.sin()
        h.mul_(3.0)
        return ((h.cos() + before) * w).sum()

    return step, (w,)


def _counters() -> tuple[Step, tuple[Tensor, ...]]:
    (w,) = weights((4, 6))

    def step() -> Tensor:
        first, second = (w * 2.0).unsafe_chunk(2)  # of one storage, with a counter each
        out = first.sin().sum()
        second.mul_(3.0)
        return out + second.sin().sum()

    return step, (w,)


CASES: dict[str, Callable[[], tuple[Step, tuple[Tensor, ...]]]] = {
    "tanh": _chain(torch.tanh),
    "dropout": _chain(lambda h: torch.dropout(h, 0.3, True)),
    "relu in place": _chain(lambda h: torch.relu_(h + 1)),
    "normal": _chain(lambda h: h * torch.randn(8) + torch.normal(0.0, 1.0, (8,))),
    "batch norm": _module(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True)), 2, 3, 8, 8),
    "batch norm, eval": _module(lambda: nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh()).eval(), 6, 5),
    "lstm cells": _module(lambda: nn.LSTM(4, 5, 2), 7, 2, 4),
    "transformer": _module(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, 5, 8),
    "embedding": _module(lambda: nn.Sequential(nn.Embedding(7, 4), nn.GELU(), nn.Linear(4, 3)), 2, 6, ints=True),
    "lists": _lists,
    "complex": _complex,
    "autocast": _autocast,
    "writes": _writes,
    "written in part": _parts,
    "counters": _counters,
    "overwritten": _overwritten,
    "drawn": _drawn,
    "statistics of the step's own": _statistics,
    "read and written": _read_and_written,
    "numbers": _numbers,
    "cross entropy": _cross_entropy,  # which a mode would change in forward
    "formulas": _formulas,  # which one would change in backward
}  # fmt: skip
