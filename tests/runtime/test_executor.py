"""One step under a program: deviations, version checks, ownership, prefetches, host memory that runs out."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_offload.errors import StaleInputError
from lightning_offload.graph import Decision
from lightning_offload.runtime.cpu_lanes import CpuLanes
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.hooks import executing
from lightning_offload.runtime.host_pool import HostPool
from lightning_offload.runtime.program import RECORD, Program, compile_plan
from lightning_offload.runtime.tiers import Tiers
from lightning_offload.tensors.observer import StepObserver
from lightning_offload.tensors.op_facts import OpFacts
from tests.capture.recording import record
from tests.runtime.executing import (
    CPU,
    compiled,
    executor_for,
    gradients,
    plain,
    plan_of,
    planned,
    saved_storages,
    under,
)
from tests.runtime.inline import inline_lanes


def leaf() -> Tensor:
    """A trainable vector."""
    return torch.linspace(-1.0, 1.0, 1000).requires_grad_()


def chain_of(x: Tensor, length: int = 4) -> Tensor:
    """A chain of saved results."""
    for _ in range(length):
        x = (x * 1.25).sin()
    return x.sum()


@pytest.mark.parametrize("action", ["swap", "recompute", None])
def test_step_is_exact_and_leaves_nothing(action: str | None) -> None:
    """Under any program and under the offload-all fallback: same gradients, no host memory in use afterwards."""
    x = leaf()
    program = compiled(lambda: chain_of(x), action) if action else None  # type: ignore[arg-type]
    x.grad = None
    found, ran = planned(lambda: chain_of(x), x, program=program)
    assert found == plain(lambda: chain_of(x), x)
    ran.pool.collect()
    assert ran.pool.used_bytes == 0
    assert ran.executor.has_deviated is False
    assert (ran.pool.peak_bytes > 0) == (action != "recompute")


class _OwnMode(TorchDispatchMode):
    """A mode of the program's own."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("action", ["swap", "recompute"])
def test_mode_of_the_program_makes_no_other_step(action: str) -> None:
    """Under one of its own within the step, what is done to keep a tensor is no op of the step."""
    x = leaf()

    def step() -> Tensor:
        with _OwnMode():
            return chain_of(x, 60) + chain_of(x * 0.5, 60)

    program = compiled(step, action, only=lambda place: place < 2)  # type: ignore[arg-type]
    assert program.noop_packs.count(0) < len(program.noop_packs)
    x.grad = None
    executor = executor_for(program)
    torch.manual_seed(3)
    with executing(executor):
        step().backward()
    assert not executor.has_deviated
    assert gradients((x,)) == plain(step, x)[:1]


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "a little longer": lambda x: chain_of(x, 6),
    "much longer": lambda x: chain_of(x, 60),
    "shorter": lambda x: chain_of(x.cos(), 2),
    "one other op": lambda x: chain_of((x * 1.25).cos(), 3),
    "quite another": lambda x: torch.stack([(x.cos() * x.exp() - k).sigmoid() for k in range(30)]).sum(),
    "an op in between": lambda x: chain_of((x * 1.25).abs().sin(), 3),
    "other size": lambda x: chain_of(x[:700]),
    "in place": lambda x: chain_of((x * 1.25).sin_(), 3),
}
NOTICED = ("much longer", "quite another", "other size")


@pytest.mark.parametrize("action", ["swap", "recompute"])
@pytest.mark.parametrize("change", CHANGES)
def test_step_of_another_structure_is_exact(action: str, change: str) -> None:
    """A step that is not the one that was planned is exact; one that differs by more than a few ops is noticed."""
    x = leaf()
    program = compiled(lambda: chain_of(x), action)  # type: ignore[arg-type]
    x.grad = None
    found, ran = planned(lambda: CHANGES[change](x), x, program=program)
    assert found == plain(lambda: CHANGES[change](x), x)
    assert ran.executor.has_deviated or change not in NOTICED
    ran.pool.collect()
    assert ran.pool.used_bytes == 0


class Watching(StepObserver):
    """Notes before which op a storage had gone, and at which unpack memory was allocated for it."""

    def __init__(self) -> None:
        self.num_ops = self.num_unpacks = 0
        self.memory: weakref.ref[torch.UntypedStorage] | None = None
        self.gone_at: int | None = None
        self.allocated_at: list[int] = []

    @override
    def before_op(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.memory is not None and self.memory() is None and self.gone_at is None:
            self.gone_at = self.num_ops
        self.num_ops += 1

    @override
    def on_pack(self, index: int, tensor: Tensor, is_plain: bool) -> None:
        if index == 0:
            self.memory = weakref.ref(tensor.untyped_storage())

    @override
    def on_unpack(self, index: int) -> None:
        self.num_unpacks += 1

    @override
    def on_allocation(self, storage: torch.UntypedStorage) -> None:
        self.allocated_at.append(self.num_unpacks - 1)


@pytest.mark.parametrize("release_op", [2, 4, 6])
@pytest.mark.parametrize("prefetch_unpack", [0, 1, -1])
def test_release_and_prefetch_follow_the_program(release_op: int, prefetch_unpack: int) -> None:
    """The device copy goes before the op that the plan says, the copy back comes at the unpack it says."""
    x = leaf()

    def step() -> Tensor:
        y = (x * 1.25).sin()
        return y.cos().exp().abs().sigmoid().sum()

    graph = record(lambda: step().backward())
    first = saved_storages(graph)[0]
    decision = Decision(storage=first, action="swap", release_op=release_op, prefetch_unpack=prefetch_unpack)
    x.grad = None
    watching = Watching()
    with executing(executor_for(compile_plan(graph, plan_of(graph, decision)), observer=watching)):
        step().backward()
    needed_at = sum(len(save.unpack_ticks) for save in graph.saves) - 1  # the first saved is read last
    assert watching.gone_at == release_op
    assert watching.allocated_at == [prefetch_unpack if prefetch_unpack >= 0 else needed_at]
    assert gradients((x,)) == plain(step, x)[:1]


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda y: y.add_(1.0),
    "slice": lambda y: y[3:5].zero_(),
    "copy": lambda y: y.copy_(torch.ones(1000)),
    "foreach": lambda y: torch._foreach_mul_([y[:10], y[10:]], 0.5),
    "out": lambda y: torch.add(torch.ones(1000), 1.0, out=y.detach()),
}


@pytest.mark.parametrize("action", ["swap", "recompute", "keep", None])
@pytest.mark.parametrize("write", WRITES)
def test_saved_tensor_that_was_modified_raises_as_in_plain(write: str, action: str | None) -> None:
    """The version check, which hooks switch off, is made up for, whichever op wrote."""
    x = leaf()

    def step(is_written: bool) -> Tensor:
        y = x * 2.0
        out = y.sin()
        if is_written:
            WRITES[write](y)
        return out.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(True).backward()
    program = compiled(lambda: step(False), action) if action else None  # type: ignore[arg-type]
    with under(program):
        loss = step(True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_input_of_a_replay_that_was_modified_is_never_used() -> None:
    """A bias updated between forward and backward gives the old gradient or raises, never another gradient."""
    x, bias = leaf(), torch.ones(1000, requires_grad=True)

    def step() -> Tensor:
        return (x + bias).sin().sum()

    program = compiled(step, "recompute")
    x.grad = bias.grad = None
    step().backward()
    expected = gradients((x, bias))
    for inside in (True, False):
        with under(program):
            loss = step()
            if inside:
                with torch.no_grad():
                    bias.add_(0.5)
        if not inside:
            with torch.no_grad():
                bias.add_(0.5)
        is_stale = False
        try:
            loss.backward()
        except StaleInputError:
            is_stale = True
        assert not (is_stale and inside)
        assert is_stale or gradients((x, bias)) == expected
        x.grad = bias.grad = None
        with torch.no_grad():
            bias.fill_(1.0)


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda kept: kept,
    "a temporary view": lambda kept: kept.view(10, 100),
    "a temporary slice": lambda kept: kept[10:],
    "a piece with a version counter of its own": lambda kept: kept.unsafe_chunk(2)[0],  # type: ignore[attr-defined]
    "its data": lambda kept: kept.data,
}
"""How a recorded call reads what its step keeps: at an op, not each of these shows a write to the tensor itself."""


@pytest.mark.parametrize("how", READERS)
def test_what_stays_and_is_written_after_the_step_is_not_replayed_from(how: str) -> None:
    """Whatever is recomputed: the gradient is plain's, or there is an error, since its value is not there any more."""
    x = leaf()

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        kept = (x * 1.25).sin()
        made = READERS[how](kept).exp()
        return kept, (made if made.requires_grad else made * x).sum(), kept.cos().sum()

    def gradient(program: Program | None) -> list[bytes]:
        with under(program) if program is not None else contextlib.nullcontext():
            kept, loss, _ = forward()
        with torch.no_grad():
            kept.mul_(2)
        loss.backward()
        return gradients((x,))

    expected, num_recording = gradient(None), 0
    for place in range(3):
        program = compiled(lambda: sum(forward()[1:], torch.zeros(())), "recompute", only=lambda p, at=place: p == at)  # type: ignore[misc]
        x.grad = None
        num_recording += any(flags & RECORD for flags in program.op_flags)
        with contextlib.suppress(StaleInputError):
            assert gradient(program) == expected
        x.grad = None
    assert num_recording


class _Dirty(torch.autograd.Function):
    """Writes its first argument, which needs no gradient, and gives it back with one."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, x: Tensor) -> Tensor:
        given.mul_(2)
        ctx.mark_dirty(given)
        ctx.save_for_backward(given.exp())
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (saved,) = ctx.saved_tensors
        return None, gradients[0] * saved


class _Late(torch.autograd.Function):
    """Saves what is made of its result, which has no graph before it is returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        made = x.sin()
        ctx.save_for_backward(made.cos())
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (saved,) = ctx.saved_tensors
        return gradients[0] * saved


def _dirty(x: Tensor) -> Tensor:
    return _Dirty.apply(x.detach() * 1.5, x)  # type: ignore[no-any-return, no-untyped-call]


def _late(x: Tensor) -> Tensor:
    return _Late.apply(x * 1.5)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("function", [_dirty, _late])
def test_what_has_a_graph_only_later_was_made_in_the_step(function: Callable[[Tensor], Tensor]) -> None:
    """It is no tensor from before: a counted version does not spoil it, and without a backward nothing stays."""
    x = leaf()

    def step() -> Tensor:
        out = function(x)
        storages.append(weakref.ref(out.untyped_storage()))
        return out.exp().sum() + out.sin().sum()

    storages: list[weakref.ref[Any]] = []
    expected, num_recording = plain(step, x), 0
    for place in range(3):
        program = compiled(step, "recompute", only=lambda p, at=place: p == at)  # type: ignore[misc]
        x.grad = None
        num_recording += any(flags & RECORD for flags in program.op_flags)
        assert planned(step, x, program=program)[0] == expected
        with under(program):
            step()
        gc.collect()
        assert not any(storage() for storage in storages)
    assert num_recording


def test_retained_graph_and_backward_after_the_step() -> None:
    """Saved tensors may be read twice, and after the step was closed."""
    x = leaf()
    for action in ("swap", "recompute"):
        program = compiled(lambda: chain_of(x), action)  # type: ignore[arg-type]
        x.grad = None
        expected = plain(lambda: chain_of(x), x)[:1]
        with under(program):
            loss = chain_of(x)
        loss.backward(retain_graph=True)
        assert gradients((x,)) == expected
        loss.backward()
        assert gradients((x,)) == expected


@pytest.mark.parametrize("action", ["swap", "recompute", "keep", None])
def test_dropped_graph_frees_everything_without_backward(action: str | None) -> None:
    """Without a garbage collector: dropping the loss frees device memory, host blocks and handles."""
    x = leaf()
    program = compiled(lambda: chain_of(x), action) if action else None  # type: ignore[arg-type]
    gc.collect()
    gc.disable()
    try:
        with under(program) as ran:
            y = x.sin() if program is None else (x * 1.25)
            kept = weakref.ref(y.untyped_storage())
            loss = chain_of(y) if program is None else y.sin().sum()
            del y
        executor = weakref.ref(ran.executor)
        pool = ran.pool
        del loss, ran
        assert kept() is None
        assert executor() is None
        pool.collect()
        assert pool.used_bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("is_written", [False, True])
def test_what_belongs_to_no_graph_leaves_at_an_op_of_another_step(is_written: bool) -> None:
    """The program's own tensor stays as it is, and a write to it is noticed as in plain PyTorch."""
    x = leaf()

    def step(is_other: bool = True) -> Tensor:
        mask = (x.detach() > 0).float()
        mask.add_(1.0)
        y = (x * mask).sin()
        z = (y * 2.0).exp()
        if is_other:
            for _ in range(80):
                z = z + 0.01
        if is_written and is_other:
            mask.mul_(2.0)
        seen.append(mask.sum().item())
        return z.sum()

    seen: list[float] = []
    program = compiled(lambda: step(is_other=False), "recompute", only=lambda place: place > 1)
    assert program.noop_packs
    x.grad = None
    seen.clear()
    executor = executor_for(program, pool=(pool := HostPool()))
    outcomes = []
    for context in (executing(executor), contextlib.nullcontext()):
        with context:
            loss = step()
            try:
                loss.backward()
                outcomes.append(gradients((x,)))
            except RuntimeError as error:
                outcomes.append(str(error).split(":")[0])
        x.grad = None
    assert executor.has_deviated
    assert pool.peak_bytes >= x.nbytes
    assert outcomes[0] == outcomes[1]
    assert ("modified" in str(outcomes[0])) == is_written
    assert seen[0] == seen[1]


def test_host_memory_that_runs_out_keeps_tensors() -> None:
    """What finds no room in host memory stays on the device; the step is exact and the budget holds."""
    x = leaf()
    program = compiled(lambda: chain_of(x), "swap")
    x.grad = None
    pool = HostPool(budget_bytes=3 * 4096)
    executor = executor_for(program, pool=pool)
    with executing(executor):
        chain_of(x).backward()
    assert gradients((x,)) == plain(lambda: chain_of(x), x)[:1]
    assert 0 < pool.peak_bytes <= 3 * 4096
    assert not executor.has_deviated


def test_one_copy_for_all_views_of_a_storage() -> None:
    """A tensor, its transpose and its slice are swapped once and come back once."""
    x = torch.linspace(-1, 1, 1600).view(40, 40).clone().requires_grad_()

    def step() -> Tensor:
        y = x.exp()
        return (y.sin().sum() + y.t().cos().sum()) * y[3:7].sigmoid().sum()

    program = compiled(step, "swap", only=lambda place: place == 0)
    x.grad = None
    found, ran = planned(step, x, program=program)
    assert found == plain(step, x)
    assert ran.pool.peak_bytes == 6400


def test_worker_threads_give_the_same() -> None:
    """Copies in worker threads, with releases and prefetches, change nothing but time."""
    x = leaf()
    graph = record(lambda: chain_of(x, 8).backward())
    decisions = [
        Decision(storage=s, action="swap", release_op=min(i * 2 + 4, len(graph.ops)), prefetch_unpack=i)
        for i, s in enumerate(saved_storages(graph))
    ]
    program: Program = compile_plan(graph, plan_of(graph, *decisions))
    x.grad = None
    lanes = CpuLanes()
    try:
        found, ran = planned(lambda: chain_of(x, 8), x, program=program, lanes=lanes)
    finally:
        lanes.close()
    assert found == plain(lambda: chain_of(x, 8), x)
    assert not ran.executor.has_deviated


def test_backward_may_run_in_another_thread() -> None:
    """Unpacks come from whichever thread autograd uses."""
    x = leaf()
    program = compiled(lambda: chain_of(x), "recompute")
    x.grad = None
    expected = plain(lambda: chain_of(x), x)[:1]
    with under(program):
        loss = chain_of(x)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert gradients((x,)) == expected


def test_optimizer_step_between_forward_and_backward() -> None:
    """A parameter that backward itself reads and that was updated meanwhile raises, as in plain PyTorch."""
    x = leaf()
    weight = torch.full((1000,), 0.5, requires_grad=True)

    def step() -> Tensor:
        return (x * weight).sin().cos().sum()

    program = compiled(step, "recompute")
    x.grad = weight.grad = None
    with under(program) as ran:
        loss = step()
    ran.executor.materialize_readers_of([weight])
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # mul saves its factors: plain PyTorch raises too


def test_replay_runs_before_an_update_of_what_it_reads() -> None:
    """Where backward itself needs no old parameter, the gradient is exact although a replay reads one."""
    x, bias = leaf(), torch.ones(1000, requires_grad=True)

    def step() -> Tensor:
        return (x + bias).sin().cos().sum()

    program = compiled(step, "recompute")
    x.grad = bias.grad = None
    step().backward()
    expected = gradients((x, bias))
    with under(program) as ran:
        loss = step()
    ran.executor.materialize_readers_of([bias])
    with torch.no_grad():
        bias.mul_(2.0)
    loss.backward()
    assert gradients((x, bias)) == expected


def test_replay_runs_before_an_update_of_what_a_wrapper_holds() -> None:
    """An optimizer is given a DTensor, say, whose shard the step has read."""
    x, shard = leaf(), torch.ones(1000)
    parameter = nn.Parameter(TwoTensor(shard, torch.ones(1000)))

    def step() -> Tensor:
        return (x + shard).sin().cos().sum()

    program = compiled(step, "recompute")
    x.grad = None
    step().backward()
    expected = gradients((x,))
    with under(program) as ran:
        loss = step()
    ran.executor.materialize_readers_of([parameter])
    with torch.no_grad():
        shard.mul_(2.0)
    loss.backward()
    assert gradients((x,)) == expected


def short_vector() -> Tensor:
    """A trainable vector."""
    return torch.linspace(-1.0, 1.0, 300).requires_grad_()


def step(x: Tensor) -> Tensor:
    """A small step."""
    return (x * 2.0).sin().exp().sum()


def keeping(x: Tensor) -> StepExecutor:
    """An executor for the small step."""
    program = compiled(lambda: step(x), "keep")
    x.grad = None
    return StepExecutor(
        device=CPU, tiers=Tiers(inline_lanes(), HostPool()), program=program, observer=None, verifier=None,
        sees_ops=False, keeps_all=True,
    )  # fmt: skip


def test_step_is_exact_without_a_mode() -> None:
    """Only the hooks are in force, and the step is the one that was planned."""
    x = short_vector()
    executor = keeping(x)
    with executing(executor):
        assert torch._C._len_torch_dispatch_stack() == 0
        step(x).backward()
    assert gradients((x,)) == plain(lambda: step(x), x)[:1]
    assert not executor.has_deviated
    assert executor.num_unpacks > 0


@pytest.mark.parametrize("change", ["longer", "other size"])
def test_another_structure_is_noticed(change: str) -> None:
    """More saved tensors, or others, than were planned: noticed, and exact all the same."""
    x = short_vector()
    executor = keeping(x)

    def other() -> Tensor:
        return step(x.sin()) if change == "longer" else step(x[:200])

    with executing(executor):
        other().backward()
    assert executor.has_deviated
    assert gradients((x,)) == plain(other, x)[:1]


@pytest.mark.parametrize("is_exposed", [False, True])
def test_what_another_structure_saves_leaves_the_device(is_exposed: bool) -> None:
    """From where it left its plan on, but what may be written unseen; and is exact."""
    x = short_vector()

    def other() -> Tensor:
        y = step(x)
        z = (x * 3.0).cos()
        if is_exposed:
            data = z.data
            w = z.exp() + z.sin()
            data.mul_(0.5)
        else:
            w = z.exp() + z.sin()
        return y + w.sum()

    expected = plain(other, x)[:1]
    pool, program = HostPool(), compiled(lambda: step(x), "keep")
    x.grad = None
    executor = StepExecutor(
        device=CPU, tiers=Tiers(inline_lanes(), pool), program=program, observer=None, verifier=None,
        sees_ops=False, keeps_all=True,
    )  # fmt: skip
    with executing(executor):
        loss = other()
        assert executor.has_deviated
        assert pool.used_bytes >= 2 * x.nbytes
        loss.backward()
    assert gradients((x,)) == expected
    assert executor.is_spent
    pool.collect()
    assert pool.used_bytes == 0


@pytest.mark.parametrize("name", ["rrelu", "rrelu_"])
@pytest.mark.parametrize("owner", [F, torch, torch._C._nn, nn])
def test_noise_that_is_written_once_it_was_saved_stays(owner: Any, name: str) -> None:
    """Where it is saved in place of what was to leave the device, in a step that sees no ops."""
    x = short_vector()
    constant = torch.linspace(0.0, 1.0, 300)

    def planned_step() -> Tensor:
        return ((constant * 1.0) * (x * 2.0)).exp().sum()

    def other() -> Tensor:
        y = x * 2.0
        if owner is nn:
            return nn.RReLU(inplace=name == "rrelu_")(y).sum()
        if owner is torch._C._nn:
            with_noise: Tensor = getattr(owner, name.replace("lu", "lu_with_noise"))(
                y, torch.empty_like(y), 0.1, 0.3, True
            )
            return with_noise.sum()
        found: Tensor = getattr(owner, name)(y, training=True)
        return found.sum()

    expected = plain(other, x)[:1]
    program = compiled(planned_step, "swap")
    x.grad = None
    executor = StepExecutor(
        device=CPU, tiers=Tiers(inline_lanes(), HostPool()), program=program, observer=None, verifier=None,
        sees_ops=False,
    )  # fmt: skip
    torch.manual_seed(3)
    with executing(executor):
        other().backward()
    assert gradients((x,)) == expected
    assert not any(hasattr(function, "__wrapped__") for function in (torch.rrelu, torch.rrelu_, F.rrelu_))


def test_backward_is_announced_once() -> None:
    """The first unpack of the step tells that backward has begun."""
    x = short_vector()
    executor, heard = keeping(x), []
    executor.on_backward = lambda: heard.append(1)
    with executing(executor):
        loss = step(x)
        assert heard == []
        loss.backward(retain_graph=True)
        loss.backward()
    assert heard == [1]


def test_modified_tensor_raises() -> None:
    """The version check that hooks switch off is made up for."""
    x = short_vector()
    executor = keeping(x)
    with executing(executor):
        y = x * 2.0
        out = y.sin().sum()
        y.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


def test_nothing_leaks_without_backward() -> None:
    """A result that saved itself is freed by reference counts alone when it is dropped."""
    x = short_vector()
    executor = keeping(x)
    gc.collect()
    gc.disable()
    try:
        with executing(executor):
            y = (x * 2.0).exp()
            memory = weakref.ref(y.untyped_storage())
            del y
        assert memory() is None
    finally:
        gc.enable()


def check_left(begins: str, x: Tensor, other: Callable[[], Tensor]) -> None:
    """A step leaves the plan that kept or swapped all, and has the gradients of plain training."""
    expected = plain(other, x)[:1]
    program = compiled(lambda: step(x), "keep" if begins == "kept" else "swap")
    x.grad = None
    executor = StepExecutor(
        device=CPU, tiers=Tiers(inline_lanes(), HostPool()), program=program, observer=None,
        verifier=None, sees_ops=False, keeps_all=begins == "kept",
    )  # fmt: skip
    with executing(executor):
        other().backward()
    assert executor.has_deviated
    assert gradients((x,)) == expected


@pytest.mark.parametrize("begins", ["kept", "swapped"])
def test_what_was_handed_out_is_not_emptied(begins: str) -> None:
    """A step leaves its plan: what somebody has read of what was saved stays as it is, whatever is saved later."""
    x, mask = short_vector(), torch.linspace(0.0, 2.0, 300)

    def other() -> Tensor:
        y = step(x)
        z = (x * 3.0) * (mask * 1.0)
        node = z.grad_fn
        assert node is not None
        seen: Tensor = node._saved_other  # type: ignore[attr-defined]
        w = z.sin() + z.exp()
        return y + w.sum() * seen.sum()

    check_left(begins, x, other)


@pytest.mark.parametrize("begins", ["kept", "swapped"])
def test_double_backward_of_a_step_that_left_its_plan(begins: str) -> None:
    """Backward saves what it reads: that is not emptied under its hands."""
    x, target = short_vector(), torch.arange(30) % 10

    def other() -> Tensor:
        y = (x * 2.0).sin()
        loss = F.cross_entropy(y.view(30, 10), target.clone()) + y.exp().sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + grad.square().sum()

    check_left(begins, x, other)
