"""Throughput and peak of any batch size under a budget, without running it."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from lightning_offload.errors import BudgetInfeasibleError, PolicyError, TuningError
from lightning_offload.graph import StepGraph
from lightning_offload.planning.planner import plan
from lightning_offload.planning.step_model import StepModel
from lightning_offload.plugins.report import Planned
from lightning_offload.tuning import predictions
from lightning_offload.tuning.predictions import Predictor, Recorded
from lightning_offload.tuning.trial import Prediction, Trial
from tests.graph.building import DEVICE, chain
from tests.tuning.steps import A100, recorded, recorded_family

FAST = dataclasses.replace(DEVICE, d2h_bytes_per_second=1e4, h2d_bytes_per_second=1e4)


def _sized(n: int) -> StepGraph:
    """Four results of ``100*n`` bytes, of which each op takes ``1 + n / 8`` seconds: 8 ops in all."""
    return chain(*[100 * n] * 4, seconds=1 + n / 8)


MODEL = StepModel.fit({2: _sized(2), 4: _sized(4)})


def predicted(predict: Predictor, size: int) -> Prediction:
    """What is predicted, of a size that the model reaches."""
    found = predict(size)
    assert found is not None
    return found


@functools.cache
def _model(name: str) -> StepModel:
    family = recorded_family(name)
    return StepModel.fit({n: family(n) for n in (2, 4, 8)})


def test_throughput_of_everything_kept_is_that_of_the_ops() -> None:
    """Without a limit: 8 ops of 3 seconds at size 16, so 16 samples in 24 seconds, and the true peak."""
    prediction = predicted(Predictor(MODEL, FAST, None), 16)
    true = plan(_sized(16), FAST, None)
    assert prediction == Prediction(
        batch_size=16,
        is_feasible=True,
        samples_per_second=16 / 24,
        peak_bytes=true.plain_peak_bytes,
        floor_bytes=true.floor_bytes,
    )


def test_ranks_and_fixed_costs_count() -> None:
    """Four ranks give four times the samples; an optimizer's seconds lie on top."""
    four = predicted(Predictor(MODEL, FAST, None, num_ranks=4, fixed_seconds=4.0), 16)
    assert four.samples_per_second == 4 * 16 / (24 + 4)


def test_a_budget_costs_throughput_and_bounds_the_peak() -> None:
    """Below the plain peak a plan is needed: the peak is within the budget, and the step takes longer."""
    free = predicted(Predictor(MODEL, DEVICE, None), 50)
    assert free.peak_bytes is not None
    assert free.samples_per_second is not None
    budget = free.peak_bytes - 5000
    tight = predicted(Predictor(MODEL, DEVICE, budget), 50)
    assert tight.is_feasible
    assert tight.peak_bytes is not None
    assert tight.samples_per_second is not None
    assert tight.peak_bytes <= budget
    assert tight.samples_per_second < free.samples_per_second


def test_an_infeasible_size_tells_what_it_needs() -> None:
    """No throughput, no peak; a budget of just the floor is feasible, one byte less is not."""
    floor = Predictor(MODEL, FAST, None).needed_bytes(50)
    assert predicted(Predictor(MODEL, FAST, floor), 50).is_feasible
    predict = Predictor(MODEL, FAST, floor - 1)
    assert predict(50) == Prediction(batch_size=50, is_feasible=False, floor_bytes=floor)


def test_each_size_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction is kept; a size that does not fit is not planned at all."""
    calls = []

    def counted(graph: StepGraph, *args: object, **kwargs: object) -> object:
        calls.append(graph.storages[1].num_bytes // 100)
        return plan(graph, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(predictions, "plan", counted)
    predict = Predictor(MODEL, FAST, Predictor(MODEL, FAST, None).plain().needed_bytes(20))
    assert predict(10) is predict(10)
    assert not predicted(predict, 10_000).is_feasible
    assert predict.largest_feasible(1, 4096) is not None
    assert calls == [10]


def test_more_effort_where_a_little_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far from the bound the size is planned again in full; the faster plan counts."""
    efforts: list[bool] = []

    def noted(*args: object, is_provisional: bool = False, **kwargs: object) -> object:
        efforts.append(is_provisional)
        return plan(*args, is_provisional=is_provisional, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(predictions, "plan", noted)
    model = _model("lstm")
    budget = Predictor(model, A100, None).needed_bytes(64)
    full = predicted(Predictor(model, A100, budget), 64)
    assert efforts == [True, False]
    assert full.samples_per_second is not None
    assert full.samples_per_second >= 64 / plan(model.at(64), A100, budget, is_provisional=True).predicted_step_seconds
    Predictor(model, A100, None)(64)
    assert efforts == [True, False, True]


@pytest.mark.parametrize("policy", ["auto", "keep-all", "all-swap"])
def test_the_largest_feasible_size_is_the_edge(policy: str) -> None:
    """It fits and the next one does not, by the prediction itself; exactly, within any range."""
    predict = Predictor(MODEL, FAST, 50_000, policy)
    largest = predict.largest_feasible(1, 4096)
    assert largest is not None
    assert predicted(predict, largest).is_feasible
    assert not predicted(predict, largest + 1).is_feasible
    assert predict.largest_feasible(1, largest) == largest
    assert predict.largest_feasible(1, largest - 3) == largest - 3
    assert predict.largest_feasible(largest, largest + 1) == largest
    assert predict.largest_feasible(largest + 1, 4096) is None


def test_plain_is_training_without_a_plan() -> None:
    """Everything kept: the largest size is smaller, and below it both predict the same."""
    predict = Predictor(MODEL, FAST, 50_000, num_ranks=2, fixed_seconds=1.0)
    plain = predict.plain()
    edge, with_plan = plain.largest_feasible(1, 4096), predict.largest_feasible(1, 4096)
    assert edge is not None
    assert with_plan is not None
    assert edge < with_plan
    assert predicted(plain, edge).samples_per_second == predicted(predict, edge).samples_per_second
    assert predicted(plain, edge).peak_bytes == predicted(predict, edge).peak_bytes == plain.needed_bytes(edge)
    assert not predicted(plain, edge + 1).is_feasible


def test_throughput_is_that_of_the_trials_which_were_recorded() -> None:
    """Their median by what is predicted of them is the scale of all; too few steps, or unlike ones, predict nothing."""
    recorded_steps = {
        size: Recorded(
            planned=Planned(graph=_sized(size), device=FAST, plan=plan(_sized(size), FAST, None)), fixed_seconds=1.0,
            policy="auto", budget_bytes=None,
        )
        for size in (2, 4)
    }  # fmt: skip
    plain = Predictor(MODEL, FAST, None, num_ranks=2, fixed_seconds=1.0)
    ran = {size: 3 * (predicted(plain, size).samples_per_second or 0.0) for size in (2, 4)}
    trials = [Trial(batch_size=size, is_ok=True, samples_per_second=speed) for size, speed in ran.items()]
    found = Predictor.fit(recorded_steps, trials, num_ranks=2)
    assert found is not None
    speeds = {each.batch_size: each.samples_per_second for each in found.made}
    assert speeds == pytest.approx(ran)
    assert predicted(found, 16).samples_per_second == pytest.approx(
        3 * (predicted(plain, 16).samples_per_second or 0.0)
    )
    assert Predictor.fit({2: recorded_steps[2]}, trials, num_ranks=2) is None


def test_no_limit_means_any_size() -> None:
    """Without a budget the largest size is the largest that was asked for."""
    assert Predictor(MODEL, FAST, None).largest_feasible(1, 4096) == 4096


@pytest.mark.parametrize("name", ["vgg16-bn", "lstm"])
@pytest.mark.parametrize("height", [0.5, 0.2])
def test_plans_for_predicted_steps_are_plans_for_recorded_ones(name: str, height: float) -> None:
    """At size 64 the plan checks against the recorded step, keeps the budget there, and predicts its step time."""
    true = recorded(name, 64).on(A100)
    model = _model(name)
    floor, plain = Predictor(model, A100, None).needed_bytes(64), Predictor(model, A100, None).plain().needed_bytes(64)
    budget = int(floor + height * (plain - floor))
    made = plan(model.at(64), A100, budget, is_provisional=True)
    own = plan(true, A100, budget, is_provisional=True)
    made.check(true)
    assert (made.plain_peak_bytes, made.floor_bytes) == (own.plain_peak_bytes, own.floor_bytes)
    assert made.predicted_peak_bytes <= budget
    assert made.predicted_step_seconds == pytest.approx(own.predicted_step_seconds, rel=0.05)


def test_the_edge_of_a_model_is_that_of_its_recordings() -> None:
    """The largest size that fits with a plan, found by prediction, is the one that recorded steps give."""
    budget = 1 << 20
    predict = Predictor(_model("lstm"), A100, budget)
    largest = predict.largest_feasible(2, 4096)
    assert largest is not None
    assert plan(recorded("lstm", largest).on(A100), A100, budget, is_provisional=True).predicted_peak_bytes <= budget
    with pytest.raises(BudgetInfeasibleError):
        plan(recorded("lstm", largest + 1).on(A100), A100, budget, is_provisional=True)


def test_sizes_must_be_positive_integers(subtests: pytest.Subtests) -> None:
    """One clear error, in a prediction and in a range."""
    for size in [0, -1, 2.5, True, "8"]:
        with subtests.test(size=size):
            predict = Predictor(MODEL, FAST, None)
            with pytest.raises(TuningError, match="is not a positive integer"):
                predict(size)  # type: ignore[arg-type]
            with pytest.raises(TuningError, match="is not a positive integer"):
                predict.largest_feasible(size, 8)  # type: ignore[arg-type]
    with pytest.raises(TuningError, match="there is no batch size from 9 to 8"):
        Predictor(MODEL, FAST, None).largest_feasible(9, 8)
    with pytest.raises(PolicyError, match="unknown policy 'magic'"):
        Predictor(MODEL, FAST, None, "magic")
