"""Learning rates: the rules, rates inside optimizers and schedulers multiplied in place, and the warm-up."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from lightning_offload.errors import TuningError
from lightning_offload.tuning.learning_rate import (
    RULES,
    Warmup,
    default_warmup_steps,
    is_adam_like,
    resolved_rule,
    scale_groups,
)


def test_rules_as_published() -> None:
    """Goyal et al.: 0.1 at 256 samples is 3.2 at 8192; the square root of the same is 0.1 x sqrt(32)."""
    assert [rule(8192 / 256) for rule in RULES.values()] == [32, math.sqrt(32), 1]


def _sgd(*rates: float | torch.Tensor) -> SGD:
    return SGD([{"params": [nn.Parameter(torch.zeros(2))], "lr": rate} for rate in rates], lr=0.0)


def scaled(optimizer: Any, factor: float, *schedulers: Any) -> list[Any]:
    """All its groups, and the schedulers; the rates that they have then."""
    places = [(0, index) for index in range(len(optimizer.param_groups))]
    scale_groups([optimizer], schedulers, places, factor)
    return rates(optimizer)


def rates(optimizer: Any) -> list[Any]:
    return [group["lr"] for group in optimizer.param_groups]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=4), st.floats(0.01, 100))
def test_every_group_is_multiplied(before: list[float], factor: float) -> None:
    """Each group's rate is what plain multiplication gives; other settings stay."""
    optimizer = _sgd(*before)
    assert scaled(optimizer, factor) == [rate * factor for rate in before]
    assert all(group["momentum"] == 0 for group in optimizer.param_groups)


def test_what_schedulers_keep_in_groups_goes_along() -> None:
    """The initial rate, and the bounds of a one-cycle schedule; a lone ``min_lr`` is the user's own."""
    optimizer = _sgd(0.1, 0.2)
    OneCycleLR(optimizer, max_lr=[0.5, 0.6], total_steps=10)
    before = [dict(group) for group in optimizer.param_groups]
    scaled(optimizer, 4.0)
    for group, old in zip(optimizer.param_groups, before, strict=True):
        assert all(group[key] == 4 * old[key] for key in ("lr", "initial_lr", "max_lr", "min_lr"))
        assert group["max_momentum"] == old["max_momentum"]
    lone = _sgd(0.1)
    lone.param_groups[0]["min_lr"] = 1e-4
    scaled(lone, 4.0)
    assert lone.param_groups[0]["min_lr"] == 1e-4


def test_tensor_rates_stay_the_same_objects() -> None:
    """Captured optimizers hold on to the tensor; one that groups share is multiplied once."""
    shared, own = torch.tensor(0.5), torch.tensor(0.25)
    optimizer = _sgd(shared, shared, own)
    scaled(optimizer, 2.0)
    assert [group["lr"] is rate for group, rate in zip(optimizer.param_groups, (shared, shared, own), strict=True)]
    assert (shared.item(), own.item()) == (1.0, 0.5)


def _schedules() -> dict[str, Callable[[SGD], LRScheduler]]:
    return {
        "step": lambda o: StepLR(o, step_size=3, gamma=0.5),
        "cosine": lambda o: CosineAnnealingLR(o, T_max=12),
        "lambda": lambda o: LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
        "one cycle": lambda o: OneCycleLR(o, max_lr=[0.5, 0.25], total_steps=20),
        "chained": lambda o: ChainedScheduler([StepLR(o, 3), LinearLR(o, 0.5, total_iters=4)]),
        "sequential": lambda o: SequentialLR(o, [LinearLR(o, 0.5, total_iters=4), LambdaLR(o, lambda e: 0.9**e)], [4]),
    }


@pytest.mark.parametrize("name", list(_schedules()))
def test_a_scaled_schedule_is_the_schedule_scaled(name: str) -> None:
    """Optimizer and scheduler scaled in the middle of training go on at the factor times the plain rates."""
    plain, tuned = _sgd(0.5, 0.25), _sgd(0.5, 0.25)
    plain_schedule, schedule = _schedules()[name](plain), _schedules()[name](tuned)
    for step in range(10):
        if step == 5:
            scaled(tuned, 4.0, schedule)
            assert schedule.get_last_lr() == [4 * rate for rate in plain_schedule.get_last_lr()]
        factor = 4.0 if step >= 5 else 1.0
        assert rates(tuned) == pytest.approx([factor * rate for rate in rates(plain)], rel=1e-12)
        for optimizer, its in ((plain, plain_schedule), (tuned, schedule)):
            optimizer.step()
            its.step()


@pytest.mark.parametrize("name", list(_schedules()))
def test_one_group_is_scaled_alone(name: str) -> None:
    """The finder scales the groups that do not follow the model's rate: once, also where schedulers share a list."""
    plain, tuned = _sgd(0.5, 0.25), _sgd(0.5, 0.25)
    plain_schedule, schedule = _schedules()[name](plain), _schedules()[name](tuned)
    scale_groups([tuned], [schedule], [(0, 1)], 4.0)
    assert schedule.get_last_lr() == [
        factor * rate for factor, rate in zip((1, 4), plain_schedule.get_last_lr(), strict=True)
    ]
    for _ in range(10):
        first, second = rates(plain)
        assert rates(tuned) == pytest.approx([first, 4 * second], rel=1e-12)
        for optimizer, its in ((plain, plain_schedule), (tuned, schedule)):
            optimizer.step()
            its.step()


def test_adam_likeness() -> None:
    """By betas or by name, subclasses and strangers included."""

    class Strange(SGD):
        """An optimizer with betas under any name."""

    class MyLamb(SGD):
        """One without betas, named after its kind."""

    def made(kind: Any) -> Any:
        return kind([nn.Parameter(torch.zeros(2))], lr=0.1)

    assert all(is_adam_like(made(kind)) for kind in (Adam, AdamW, NAdam, RMSprop, MyLamb))
    assert not is_adam_like(made(SGD))
    strange = made(Strange)
    assert not is_adam_like(strange)
    strange.defaults["betas"] = (0.9, 0.99)
    assert is_adam_like(strange)


def test_the_tuner_imports_no_torch() -> None:
    """Rates and the performance model are plain Python until they meet an optimizer."""
    code = (
        "import sys, lightning_offload.tuning.learning_rate, lightning_offload.tuning.predictions\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


@pytest.fixture
def warmup() -> Iterator[Warmup]:
    """A warm-up of 4 steps to 4 times the base rate, taken off at the end."""
    made = Warmup(4, 4.0)
    yield made
    made.remove()


def warmup_factor(step: int, num_steps: int, scale: float) -> float:
    made = Warmup(num_steps, scale)
    made.load_state_dict({"num_steps": num_steps, "scale": scale, "steps": [step]})
    return made.factor()


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


def test_bad_arguments_are_refused(subtests: pytest.Subtests) -> None:
    """With the value in the error."""
    for num_steps, scale in [(-4, 2.0), (4, 0.0), (4, -2.0), (4, math.nan)]:
        with subtests.test(num_steps=num_steps, scale=scale), pytest.raises(TuningError, match=r"-4|0.0|-2.0|nan"):
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


class LARS(SGD):
    """By its name."""


def test_auto_is_the_rule_of_the_optimizers(subtests: pytest.Subtests) -> None:
    """Linear where a step is proportional to gradients, for all optimizers; the square root is the careful one."""
    for kinds, rule in [
        ((SGD,), "linear"),
        ((LARS,), "linear"),
        ((SGD, SGD), "linear"),
        ((Adam,), "sqrt"),
        ((RMSprop,), "sqrt"),
        ((torch.optim.Adagrad,), "sqrt"),
        ((SGD, AdamW), "sqrt"),
        ((), "sqrt"),
    ]:
        with subtests.test(kinds=kinds):
            optimizers = [kind([nn.Parameter(torch.zeros(1))], lr=0.1) for kind in kinds]
            assert resolved_rule("auto", optimizers) == rule
            assert [resolved_rule(each, optimizers) for each in RULES] == list(RULES)


def test_the_usual_warm_up(subtests: pytest.Subtests) -> None:
    """50 steps, but no more than a tenth of the run."""
    for num_steps, expected in [(1, 1), (60, 6), (400, 40), (10**6, 50), (math.inf, 50)]:
        with subtests.test(num_steps=num_steps):
            assert default_warmup_steps(num_steps) == expected
