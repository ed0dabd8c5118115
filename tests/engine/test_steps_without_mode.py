"""Steps whose plan only keeps and swaps see no ops, those that keep all no tensors; what happens changes no bit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin
from lightning_offload.planning import planner
from lightning_offload.plugins import sampling_schedule
from lightning_offload.runtime.executor import StepExecutor
from tests.engine.probing import levels, train
from tests.fuzz.running import random_planner
from tests.shares import pairs
from tests.zoo.case import Case
from tests.zoo.cases import CASES

SIDE = 48
NUM_STEPS = 14
LATE = 9
"""A step long after the last one that is observed."""

Events = dict[str, Callable[["Net", Tensor], Tensor]]


class Net(nn.Module):
    """A chain of activations, one of which something happens to."""

    def __init__(self, happens: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(SIDE, SIDE) for _ in range(5)])
        self.lstm, self.gru = nn.LSTMCell(SIDE, SIDE), nn.GRUCell(SIDE, SIDE)
        self.scale = nn.Parameter(torch.ones(SIDE))
        self.place = 2
        self.happens = happens
        self.index = 0
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x).sigmoid()
            if place == self.place:
                x = self.happens(self, x)
        return x.square().mean()


def _written_by_data(net: Net, x: Tensor) -> Tensor:
    if net.index >= LATE and net.index % 2:
        x.data.mul_(1.5)
    return x


def _written_through_a_view(net: Net, x: Tensor) -> Tensor:
    if net.index >= LATE:
        x.t()[:4].data.zero_()
    return x


def _written_after_the_next_save(net: Net, x: Tensor) -> Tensor:
    y = x.exp()
    if net.index >= LATE:
        x.data.add_(0.25)
    return y * x


def _read_by_data(net: Net, x: Tensor) -> Tensor:
    net.seen.append(x.data.mean())
    return x


def _kept_by_the_program(net: Net, x: Tensor) -> Tensor:
    net.seen = [x.detach()]
    return x


def _written_in_a_hook(net: Net, x: Tensor) -> Tensor:
    def hook(gradient: Tensor) -> Tensor:
        if net.index >= LATE:
            x.data.mul_(0.5)
        return gradient * 2

    x.register_hook(hook)
    return x * 1.0


def _saved_twice(net: Net, x: Tensor) -> Tensor:
    return x.sin() * x + x.cos()


def _other_sizes(net: Net, x: Tensor) -> Tensor:
    if net.index == LATE:
        return (torch.cat([x, x]).tanh() * 2)[: len(x)]
    return x


def _more_saves(net: Net, x: Tensor) -> Tensor:
    for _ in range(max(0, net.index - LATE)):
        x = x.sin()
    return x


def _fewer_saves(net: Net, x: Tensor) -> Tensor:
    for _ in range(LATE - min(net.index, LATE) if net.index >= LATE - 2 else 2):
        x = x.sin()
    return x


def _in_a_backward_of_its_own(net: Net, x: Tensor) -> Tensor:
    inner = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad((inner.sin() * inner).sum(), inner)
    return x + gradient


def _more_cells(net: Net, x: Tensor) -> Tensor:
    """Gates of a cell are parts of one storage with version counters of their own, written and saved in turn."""
    state = net.lstm(x)
    for _ in range(2 if net.index >= LATE else 0):
        state = net.lstm(x, state)
    hidden: Tensor = net.gru(state[0], state[1]) if net.index > LATE else state[0]
    return hidden


def _longer(net: Net, x: Tensor) -> Tensor:
    """Saves what was not planned, late: the step leaves its plan there."""
    return torch.cat([x, x]).tanh()[: len(x)] if net.index >= LATE else x


def _given_up_between_writes_of_parts(net: Net, x: Tensor) -> Tensor:
    one, other = (x * 2.0).unsafe_chunk(2, 1)
    one.sigmoid_()
    x = _longer(net, x)
    return x * torch.cat([one, other.sigmoid_()], 1)


def _given_up_after_a_write(net: Net, x: Tensor) -> Tensor:
    y = x * 2.0
    _ = y.sin()
    if net.index >= LATE:
        y.mul_(2.0)
    return y.cos() * _longer(net, x)


def _taken_before_the_save(net: Net, x: Tensor) -> Tensor:
    y = x + 1.0
    data = y.data if net.index >= LATE else None
    y = y * net.scale
    if data is not None:
        data.mul_(1.5)
    return y


def _taken_between_saves(net: Net, x: Tensor) -> Tensor:
    y = x.sin()
    if net.index >= LATE:
        data = x.data
        y = y + torch.cat([x, x]).cos()[: len(x)] + x.exp() * x
        data.mul_(1.5)
    return y


def _written_behind_another_counter(net: Net, x: Tensor) -> Tensor:
    y = x.exp() * x
    if net.index >= LATE:
        torch.empty(0).set_(x.detach()).mul_(1.5)
        torch.empty(0).set_(source=y.untyped_storage()).add_(0.5)  # type: ignore[call-overload]
    return y.sin()


def _written_and_the_version_taken_back(net: Net, x: Tensor) -> Tensor:
    y = x.exp() * x
    if net.index >= LATE:
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(x):
            x.mul_(1.5)
    return y


def _taken_in_a_transform(net: Net, x: Tensor) -> Tensor:
    if net.index >= LATE:
        return x + torch.func.grad(lambda t: (t.data * t).sum())(x.detach())
    return x


EVENTS: Events = {
    "more-cells": _more_cells,
    "given-up-between-writes-of-parts": _given_up_between_writes_of_parts,
    "given-up-after-a-write": _given_up_after_a_write,
    "taken-before-the-save": _taken_before_the_save,
    "taken-between-saves": _taken_between_saves,
    "written-behind-another-counter": _written_behind_another_counter,
    "written-and-the-version-taken-back": _written_and_the_version_taken_back,
    "taken-in-a-transform": _taken_in_a_transform,
    "written-by-data": _written_by_data,
    "written-through-a-view": _written_through_a_view,
    "written-after-the-next-save": _written_after_the_next_save,
    "read-by-data": _read_by_data,
    "kept-by-the-program": _kept_by_the_program,
    "written-in-a-hook": _written_in_a_hook,
    "saved-twice": _saved_twice,
    "other-sizes": _other_sizes,
    "more-saves": _more_saves,
    "fewer-saves": _fewer_saves,
    "in-a-backward-of-its-own": _in_a_backward_of_its_own,
}


@dataclasses.dataclass
class Log:
    """What executors were made for, but for those of steps that keep everything."""

    sees_ops: list[bool] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def logged() -> Iterator[Log]:
    """Note which steps have their ops seen."""
    log, made = Log(), StepExecutor.__init__

    def note(self: StepExecutor, **how: object) -> None:
        if not how.get("keeps_all"):
            log.sees_ops.append(bool(how["sees_ops"]))
        made(self, **how)  # type: ignore[arg-type]

    with mock.patch.object(StepExecutor, "__init__", note):
        yield log


def bits(event: str, memory: MemoryPlugin | None, place: int = 2) -> list[bytes]:
    """Train for a few steps; the loss and all gradients of each."""
    torch.manual_seed(3)
    net, found = Net(EVENTS[event]), []
    net.place = place
    with memory or contextlib.nullcontext():
        for net.index in range(NUM_STEPS):
            x = torch.randn(32, SIDE)
            with memory.step() if memory is not None else contextlib.nullcontext():
                loss = net(x)
                loss.backward()
            found += [
                loss.detach().numpy().tobytes(),
                *(p.grad.numpy().tobytes() for p in net.parameters() if p.grad is not None),
            ]
            net.zero_grad()
    return found


@functools.cache
def plain_bits(event: str, place: int = 2) -> list[bytes]:
    """What plain PyTorch gives."""
    return bits(event, None, place)


@pytest.mark.parametrize(("event", "place"), pairs(list(EVENTS), [0, 2, 4], every=2))
def test_bits_are_those_of_plain_pytorch(event: str, place: int) -> None:
    """Whatever happens to an activation that has left the device, backward reads what plain PyTorch's would."""
    with logged() as log:
        assert bits(event, MemoryPlugin(policy="all-swap"), place) == plain_bits(event, place)
    if event not in ("read-by-data", "written-in-a-hook", "more-saves", "fewer-saves", "other-sizes"):
        assert not log.sees_ops[LATE - 1], "the step before it was none without a mode, and shows nothing"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("event", ["more-cells", "given-up-between-writes-of-parts", "given-up-after-a-write"])
def test_bits_under_plans_that_keep_some(event: str, seed: int) -> None:
    """What a plan kept leaves the device once the step has left the plan, and is what it was when it was saved."""
    with mock.patch.object(planner, "plan", random_planner(seed, is_quiet=True)), logged() as log:
        assert bits(event, MemoryPlugin("1GiB")) == plain_bits(event)
    assert not log.sees_ops[LATE - 1]


def test_steps_that_take_data_are_seen_from_then_on() -> None:
    """An activation's ``data`` might be written: later steps of the kind have their ops seen, others do not."""
    with logged() as log:
        bits("written-by-data", MemoryPlugin(policy="all-swap"))
    assert not any(log.sees_ops[LATE - 2 : LATE + 1])
    assert all(log.sees_ops[LATE + 1 :])
    with logged() as log:
        bits("read-by-data", MemoryPlugin(policy="all-swap"))
    assert all(log.sees_ops)
    with logged() as log:
        bits("saved-twice", MemoryPlugin(policy="all-swap"))
    assert not any(log.sees_ops[LATE:])


def test_attributes_of_tensor_change_with_the_plugin_not_with_each_step() -> None:
    """What Python caches of a type's attributes starts afresh whenever one changes."""
    net, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    plain = torch.Tensor.data
    with MemoryPlugin(policy="all-swap", module=net) as memory:
        heard = torch.Tensor.data
        assert heard is not plain
        with MemoryPlugin(policy="all-swap", module=torch.nn.Linear(2, 2)):
            for _ in range(LATE):
                with memory.step(x):
                    assert torch.Tensor.data is heard
                    net(x).sum().backward()
                assert torch.Tensor.data is heard
        assert torch.Tensor.data is heard
        assert x.data.data_ptr() == x.data_ptr()
    assert torch.Tensor.data is plain
    assert not {"data", "set_"} & vars(torch.Tensor).keys()


def test_data_is_torch_s_own_afterwards() -> None:
    """Afterwards ``Tensor.data`` is torch's own again, and it works all the while."""
    own = torch.Tensor.data, torch.Tensor.set_, torch._C._autograd._unsafe_set_version_counter
    bits("written-by-data", MemoryPlugin(policy="all-swap"))
    bits("written-behind-another-counter", MemoryPlugin(policy="all-swap"))
    assert own == (torch.Tensor.data, torch.Tensor.set_, torch._C._autograd._unsafe_set_version_counter)
    assert not {"data", "set_"} & vars(torch.Tensor).keys()


def test_write_that_a_version_counter_counts_raises_as_in_plain_pytorch() -> None:
    """A saved tensor that was written in place is refused."""

    def written(net: Net, x: Tensor) -> Tensor:
        if net.index >= LATE:
            with torch.no_grad():
                x.mul_(2.0)
        return x

    with (
        mock.patch.dict(EVENTS, {"written": written}),
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        bits("written", MemoryPlugin(policy="all-swap"))


def _packs(memory: MemoryPlugin, event: str) -> list[int]:
    """How many saved tensors came by, by step."""
    found: list[int] = []
    pack, made = StepExecutor.pack, StepExecutor.__init__

    def begin(self: StepExecutor, **how: Any) -> None:
        if how.get("keeps_all"):
            found.append(0)
        made(self, **how)

    def count(self: StepExecutor, tensor: Tensor) -> Any:
        if self.keeps_all:
            found[-1] += 1
        return pack(self, tensor)

    with (
        mock.patch.object(StepExecutor, "__init__", begin),
        mock.patch.object(StepExecutor, "pack", count),
    ):
        assert bits(event, memory) == bits(event, None)
    return found


def test_steps_that_keep_everything_elide_their_hooks() -> None:
    """Once a few steps were alike, nothing of the next ones comes by; they are counted all the same."""
    memory = MemoryPlugin("64MiB", policy="keep-all")
    packs = _packs(memory, "saved-twice")
    assert packs[0] > 0
    assert not any(packs[4:])
    assert len(packs) >= LATE
    assert memory.report().num_steps == NUM_STEPS


SOME_ROOM = "600000B"
"""More than any of the steps needs, and no ample room, where they would need not be alike."""


@pytest.mark.parametrize("event", ["more-saves", "other-sizes"])
def test_steps_that_turn_out_otherwise_get_their_hooks_back(event: str) -> None:
    """A step that made more autograd nodes than those before it ends that: hooks find what the kind has become."""
    memory = MemoryPlugin(SOME_ROOM, policy="keep-all")
    packs = _packs(memory, event)
    assert not packs[LATE - 4], "the step before was hooked"
    assert any(packs[LATE - 3 :])


def _more_rows(net: Net, x: Tensor) -> Tensor:
    rows = 4 if net.index < LATE else 31
    return x + (x[:rows] * net.scale).exp().mean()


def _trained_from_now_on(net: Net, x: Tensor) -> Tensor:
    net.scale.requires_grad_(net.index >= LATE)
    return (x * net.scale).cos()


@pytest.mark.parametrize("happens", [_more_rows, _trained_from_now_on])
def test_steps_of_as_many_nodes_that_save_more_get_their_hooks_back(happens: Callable[[Net, Tensor], Tensor]) -> None:
    """What the number of autograd nodes does not tell is found by a step that has hooks, once in a while."""
    memory = MemoryPlugin("64MiB", policy="keep-all")
    with (
        mock.patch.dict(EVENTS, {"happens": happens}),
        mock.patch.object(sampling_schedule, "_SELDOM", 6),
        logged() as log,
    ):
        packs = _packs(memory, "happens")
    assert not any(packs[3:8]), "the step in which it changed was hooked"
    assert packs[8]
    assert len(log.sees_ops) > 3, "no step was recorded anew"


STATIC = [case for case in CASES if case.static and not case.grows and case.budgeted]


@pytest.mark.parametrize(("case", "policy"), pairs(STATIC[::6], ["all-swap", "auto"], every=2), ids=str)
def test_peaks_are_those_with_a_mode(case: Case, policy: str) -> None:
    """A step that sees no ops takes no more memory at its peak than those before it, which did under the same plan."""
    spared = mock.patch.object(planner, "_mode_seconds", return_value=1e9)
    budget = levels(case.name).budget(0.5) if policy == "auto" else None
    with logged() as log, spared:
        memory = MemoryPlugin(f"{budget}B" if budget is not None else None, policy=policy)
        steps = train(case, memory, steps=NUM_STEPS).steps
    seen = [i for i, sees_ops in enumerate(log.sees_ops) if sees_ops]
    if len(log.sees_ops) != NUM_STEPS or seen[-1] >= NUM_STEPS - 2:
        pytest.skip("its plan needs a mode, or keeps everything")
    with_mode = steps[seen[-1]].peak_bytes
    assert {step.peak_bytes for step in steps[seen[-1] + 1 :]} == {with_mode}
    if budget is not None:
        assert with_mode <= budget
