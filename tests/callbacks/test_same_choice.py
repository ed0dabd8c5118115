"""The callback and the decorator try the same job alike, and choose alike: one engine runs the trials of both."""

from __future__ import annotations

import pytest

import lightning_offload as lo
from lightning_offload.plugins.module_steps import ModuleMemoryPlugin
from tests.callbacks.same_job import FIRST, MOST, STEPS, Job, by_decorator
from tests.callbacks.training import Clock, finder_of
from tests.lightning_runs import MakeTrainer
from tests.shares import pairs

CURVES = {
    "constant": (lambda size: 1.0, 10**9),
    "saturating": (lambda size: 1.0 + size / 16, 10**9),
    "flat": (lambda size: max(16.0, size) / 16, 10**9),
    "edge": (lambda size: 1.0 + size / 100, 23),
}


@pytest.mark.parametrize(("curve", "policy"), pairs(list(CURVES), [None, "all-swap"], every=2))
def test_one_process(make_trainer: MakeTrainer, curve: str, policy: str | None) -> None:
    """The same sizes are tried, in the same order and with the same figures, and the same one is chosen."""
    seconds, capacity = CURVES[curve]
    finder = finder_of(clock := Clock(), init_val=FIRST, max_val=MOST, lr_arg_name=None, steps_per_trial=STEPS)
    strategy = {} if policy is None else {"strategy": lo.OffloadStrategy(budget="1GiB", policy=policy)}
    make_trainer(callbacks=[finder], max_epochs=1, **strategy).fit(Job(clock, seconds, capacity))
    memory = None if policy is None else ModuleMemoryPlugin("1GiB", policy=policy)
    decorated = by_decorator(Job(Clock(), seconds, capacity), memory=memory, warmup_steps=0 if memory is None else 3)
    assert finder.result.batch_size == decorated.batch_size
    rows = [
        [(trial.batch_size, trial.samples_per_second, trial.reason) for trial in trials]
        for trials in (finder.result.trials, decorated.trials)
    ]
    assert rows[0] == rows[1]
    for one, other in zip(finder.result.trials, decorated.trials, strict=True):
        assert one.peak_bytes == (None if other.peak_bytes is None else pytest.approx(other.peak_bytes, rel=0.03))
