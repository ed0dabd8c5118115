"""Learning rates inside optimizers and schedulers, multiplied in place."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, RMSprop
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
    is_adam_like,
    learning_rates,
    scale_optimizer,
    scale_scheduler,
    unwrapped,
)


def _sgd(*rates: float | torch.Tensor) -> SGD:
    return SGD([{"params": [nn.Parameter(torch.zeros(2))], "lr": rate} for rate in rates], lr=0.0)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=4), st.floats(0.01, 100))
def test_every_group_is_multiplied(rates: list[float], factor: float) -> None:
    """Each group's rate is what plain multiplication gives, and is returned; other settings stay."""
    optimizer = _sgd(*rates)
    assert scale_optimizer(optimizer, factor) == tuple(rate * factor for rate in rates)
    assert [group["lr"] for group in optimizer.param_groups] == [rate * factor for rate in rates]
    assert all(group["momentum"] == 0 for group in optimizer.param_groups)


def test_what_schedulers_keep_in_groups_goes_along() -> None:
    """The initial rate, and the bounds of a one-cycle schedule; a lone ``min_lr`` is the user's own."""
    optimizer = _sgd(0.1, 0.2)
    OneCycleLR(optimizer, max_lr=[0.5, 0.6], total_steps=10)
    before = [dict(group) for group in optimizer.param_groups]
    scale_optimizer(optimizer, 4.0)
    for group, old in zip(optimizer.param_groups, before, strict=True):
        assert all(group[key] == 4 * old[key] for key in ("lr", "initial_lr", "max_lr", "min_lr"))
        assert group["max_momentum"] == old["max_momentum"]
    lone = _sgd(0.1)
    lone.param_groups[0]["min_lr"] = 1e-4
    scale_optimizer(lone, 4.0)
    assert lone.param_groups[0]["min_lr"] == 1e-4


def test_tensor_rates_stay_the_same_objects() -> None:
    """Captured optimizers hold on to the tensor; one that groups share is multiplied once."""
    shared, own = torch.tensor(0.5), torch.tensor(0.25)
    optimizer = _sgd(shared, shared, own)
    assert scale_optimizer(optimizer, 2.0) == (1.0, 1.0, 0.5)
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
    plain, scaled = _sgd(0.5, 0.25), _sgd(0.5, 0.25)
    plain_schedule, schedule = _schedules()[name](plain), _schedules()[name](scaled)
    for step in range(10):
        if step == 5:
            scale_optimizer(scaled, 4.0)
            scale_scheduler(schedule, 4.0)
            assert schedule.get_last_lr() == [4 * rate for rate in plain_schedule.get_last_lr()]
        factor = 4.0 if step >= 5 else 1.0
        assert learning_rates(scaled) == pytest.approx([factor * rate for rate in learning_rates(plain)], rel=1e-12)
        for optimizer, its in ((plain, plain_schedule), (scaled, schedule)):
            optimizer.step()
            its.step()


def test_wrappers_are_seen_through() -> None:
    """Lightning's and Accelerate's optimizers, and nothing that is no optimizer."""
    inner = AdamW([nn.Parameter(torch.zeros(2))], lr=0.1)
    accelerator = Accelerator(cpu=True)
    try:
        for outer in (LightningOptimizer(inner), accelerator.prepare_optimizer(inner)):
            assert outer is not inner
            assert unwrapped(outer) is inner
            assert is_adam_like(outer)
            assert scale_optimizer(outer, 2.0) == learning_rates(inner)
    finally:
        AcceleratorState._reset_state()
        PartialState._reset_state()
    assert learning_rates(inner) == (0.4,)
    for wrong in (None, nn.Linear(1, 1), object()):
        with pytest.raises(TuningError, match=f"{type(wrong).__name__} is no optimizer"):
            unwrapped(wrong)


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


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_impossible_factors_change_nothing(factor: float) -> None:
    """The rates are as before."""
    optimizer = _sgd(0.1, 0.2)
    with pytest.raises(TuningError, match="cannot be scaled by"):
        scale_optimizer(optimizer, factor)
    with pytest.raises(TuningError, match="cannot be scaled by"):
        scale_scheduler(StepLR(optimizer, 1), factor)
    assert learning_rates(optimizer) == (0.1, 0.2)


@pytest.mark.parametrize("rate", [math.nan, math.inf, 1e300], ids=str)
def test_impossible_rates_change_nothing(rate: float) -> None:
    """Neither the group that cannot be scaled nor those before it."""
    optimizer = _sgd(0.1, rate)
    with pytest.raises(TuningError, match="cannot be scaled: it must be finite"):
        scale_optimizer(optimizer, 1e10)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_group_without_a_rate_is_named() -> None:
    """Optimizers without learning rates cannot be scaled."""
    optimizer = _sgd(0.1, 0.2)
    del optimizer.param_groups[1]["lr"]
    with pytest.raises(TuningError, match="parameter group 1 of SGD has no 'lr' to scale"):
        scale_optimizer(optimizer, 2.0)


def test_the_tuner_imports_no_torch() -> None:
    """Rates and the performance model are plain Python until they meet an optimizer."""
    code = (
        "import sys, lightning_offload.tuning.learning_rate, lightning_offload.tuning.predictor\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
