"""Gradual warm-up, on top of whatever schedule runs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from lightning_offload.errors import TuningError
from lightning_offload.tuning.learning_rate import Warmup, warmup_factor


@pytest.fixture
def warmup() -> Iterator[Warmup]:
    """A warm-up of 4 steps to 4 times the base rate, taken off at the end."""
    made = Warmup(4, 4.0)
    yield made
    made.remove()


def test_from_the_base_rate_to_the_scaled_one() -> None:
    """By equal amounts: 1/4 at first, then up to 1 at the fourth step, and 1 ever after."""
    assert [warmup_factor(step, 4, 4.0) for step in range(6)] == [0.25, 0.4375, 0.625, 0.8125, 1.0, 1.0]


@given(st.integers(1, 10_000), st.floats(1, 1e6), st.data())
def test_the_factor_rises_within_its_bounds(num_steps: int, scale: float, data: st.DataObject) -> None:
    """It never leaves [1/scale, 1] and never falls."""
    step = data.draw(st.integers(0, num_steps))
    now, then = warmup_factor(step, num_steps, scale), warmup_factor(step + 1, num_steps, scale)
    assert 1 / scale <= now <= then <= 1.0
    assert warmup_factor(0, num_steps, scale) == 1 / scale
    assert warmup_factor(num_steps, num_steps, scale) == 1.0


@pytest.mark.parametrize(("num_steps", "scale"), [(0, 8.0), (10, 1.0), (10, 0.5)])
def test_nothing_to_warm_up(num_steps: int, scale: float) -> None:
    """No steps, or a rate that is not larger than the base: 1 from the start."""
    assert warmup_factor(0, num_steps, scale) == 1.0


@pytest.mark.parametrize(
    ("step", "num_steps", "scale"), [(-1, 4, 2.0), (0, -4, 2.0), (0, 4, 0.0), (0, 4, -2.0), (0, 4, math.nan)]
)
def test_bad_arguments_are_refused(step: int, num_steps: int, scale: float) -> None:
    """With the value in the error."""
    with pytest.raises(TuningError):
        warmup_factor(step, num_steps, scale)
    if step == 0:
        with pytest.raises(TuningError):
            Warmup(num_steps, scale)


def _parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, dtype=torch.float64))


def _train(optimizer: Optimizer, num_steps: int) -> list[float]:
    """Steps against a gradient of 1: with SGD, how far each moved is the rate it used."""
    moved = []
    for _ in range(num_steps):
        (weight,) = optimizer.param_groups[0]["params"]
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        moved.append((before - weight.detach())[0].item())
    return moved


def test_steps_use_the_warm_rate_and_leave_none_behind(warmup: Warmup) -> None:
    """Each step moves by its part of the rate; between steps the group holds the very rate it had."""
    optimizer = SGD([_parameter()], lr=0.8)
    warmup.attach([optimizer])
    moved = []
    for _ in range(6):
        assert optimizer.param_groups[0]["lr"] == 0.8
        moved += _train(optimizer, 1)
    assert moved == pytest.approx([0.2, 0.35, 0.5, 0.65, 0.8, 0.8])
    assert warmup.is_over


def test_every_group_and_the_schedule_count(warmup: Warmup) -> None:
    """The schedule sees its own rates: after the warm-up all is as without one."""
    optimizer = SGD([{"params": [_parameter()], "lr": 0.8}, {"params": [_parameter()], "lr": 0.1}])
    plain = SGD([{"params": [_parameter()], "lr": 0.8}, {"params": [_parameter()], "lr": 0.1}])
    schedules = StepLR(optimizer, 2, gamma=0.3), StepLR(plain, 2, gamma=0.3)
    warmup.attach([optimizer])
    for _ in range(7):
        optimizer.step()
        plain.step()
        for schedule in schedules:
            schedule.step()
        assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in plain.param_groups]
        assert schedules[0].state_dict() == schedules[1].state_dict()


def test_a_rate_in_a_tensor_is_restored_in_place(warmup: Warmup) -> None:
    """The same object, bit for bit, though a third of it is no float; inside the step it is warm."""
    rate = torch.tensor(0.1)
    optimizer = Adam([_parameter()], lr=rate, foreach=False)
    warmup.attach([optimizer])
    seen: list[Tensor] = []
    handle = optimizer.register_step_pre_hook(lambda *_: seen.append(rate.clone()))
    _train(optimizer, 2)
    handle.remove()
    assert optimizer.param_groups[0]["lr"] is rate
    assert torch.equal(rate, torch.tensor(0.1))
    assert [s.item() for s in seen] == pytest.approx([0.025, 0.04375])


def test_resuming_goes_on_bit_for_bit() -> None:
    """State after 3 steps, loaded before or after attaching, gives the steps of a run that was not interrupted."""
    whole = Warmup(7, 3.0)
    optimizer = SGD([_parameter()], lr=0.7, momentum=0.9)
    whole.attach([optimizer])
    _train(optimizer, 3)
    state, weight, slots = (
        whole.state_dict(),
        copy.deepcopy(optimizer.param_groups[0]["params"][0]),
        copy.deepcopy(optimizer.state_dict()),
    )
    rest = _train(optimizer, 6)
    whole.remove()
    for load_first in (True, False):
        resumed, again = Warmup(1, 2.0), SGD([copy.deepcopy(weight)], lr=0.7, momentum=0.9)
        again.load_state_dict(copy.deepcopy(slots))
        if load_first:
            resumed.load_state_dict(state)
        resumed.attach([again])
        if not load_first:
            resumed.load_state_dict(state)
        assert _train(again, 6) == rest
        resumed.remove()
    assert state == {"num_steps": 7, "scale": 3.0, "steps": [3]}


def test_optimizers_count_for_themselves(warmup: Warmup) -> None:
    """One that steps twice as often is warm twice as soon."""
    first, second = SGD([_parameter()], lr=1.0), SGD([_parameter()], lr=1.0)
    warmup.attach([first, second])
    _train(first, 4)
    _train(second, 2)
    assert (warmup.factor(0), warmup.factor(1)) == (1.0, 0.625)
    assert not warmup.is_over
    assert warmup.state_dict()["steps"] == [4, 2]


def test_a_failed_step_neither_counts_nor_keeps_its_rate(warmup: Warmup) -> None:
    """The closure raises: the next step has the same factor of the same rate."""
    optimizer = SGD([_parameter()], lr=0.8)
    warmup.attach([optimizer])

    def fail() -> float:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        optimizer.step(fail)
    assert _train(optimizer, 2) == pytest.approx([0.2, 0.35])
    with pytest.raises(RuntimeError, match="out of luck"):
        optimizer.step(fail)
    warmup.remove()
    assert optimizer.param_groups[0]["lr"] == 0.8


def test_a_rate_set_during_a_step_stays(warmup: Warmup) -> None:
    """A closure that sets the rate means it."""
    optimizer = SGD([_parameter()], lr=0.8)
    warmup.attach([optimizer])

    def closure() -> float:
        optimizer.param_groups[0]["lr"] = 0.5
        return 0.0

    optimizer.step(closure)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_skipped_steps_of_a_scaler_do_not_count(warmup: Warmup) -> None:
    """A gradient that overflowed makes GradScaler skip the step, and the warm-up waits."""
    optimizer = SGD([_parameter()], lr=0.8)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    warmup.attach([optimizer])
    (weight,) = optimizer.param_groups[0]["params"]
    for value, count in ((math.inf, 0), (1.0, 1)):
        weight.grad = None
        scaler.scale((weight * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert warmup.state_dict()["steps"] == [count]


def test_attaching_again_leaves_one_pair_of_hooks(warmup: Warmup) -> None:
    """And removing leaves none."""
    optimizer = SGD([_parameter()], lr=0.8)
    warmup.attach([optimizer])
    warmup.attach([optimizer])
    assert _train(optimizer, 1) == pytest.approx([0.2])
    assert (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)) == (1, 1)
    warmup.remove()
    assert (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)) == (0, 0)
    assert _train(optimizer, 1) == pytest.approx([0.8])


def test_only_torch_optimizers_can_be_warmed_up(warmup: Warmup) -> None:
    """What has groups but no hooks is refused."""

    class Groups:
        param_groups: tuple[object, ...] = ()

    with pytest.raises(TuningError, match="Groups has no hooks around its step"):
        warmup.attach([Groups()])
