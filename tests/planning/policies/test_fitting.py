"""A policy is fitted to a budget in the best way that its order allows: the fastest of all prefixes that fit."""

from __future__ import annotations

import pytest

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph.memory_plan import Action
from lightning_offload.planning.policies.fitting import Fitting, Tried, spaced
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest
from lightning_offload.planning.simulator import ON_DEMAND, Timeline, simulate
from tests.graph.building import DEVICE, chain

NET = chain(*[100] * 12)


def _setting(budget: int | None) -> PlanRequest:
    return PlanRequest(Problem(NET), DEVICE, budget)


ORDER: list[tuple[int, Action]] = [(s, "swap") for s in range(1, 13)]


def fits(request: PlanRequest, timeline: Timeline) -> bool:
    """Whether a step is within the budget."""
    return request.budget_bytes is None or timeline.peak_bytes <= request.budget_bytes


def test_no_other_prefix_is_faster() -> None:
    """Every prefix within the budget, simulated by itself, takes at least as long."""
    plain = _setting(None).plain.peak_bytes
    for budget in range(plain - 600, plain, 100):
        request = _setting(budget)
        tried, timeline = Fitting(request, "test").prefixes(ORDER).found()
        assert fits(request, timeline)
        assert tried.actions == dict(ORDER[: len(tried.actions)])
        all_prefixes = [
            simulate(request.problem, dict(ORDER[:num]), DEVICE, limit_bytes=budget) for num in range(len(ORDER) + 1)
        ]
        assert timeline.step_seconds == min(t.step_seconds for t in all_prefixes if fits(request, t))


def test_some_prefixes_and_then_those_around_the_best_one() -> None:
    """Of a long order some prefixes are tried, then those beside the fastest, so that no neighbour of it is faster."""
    plain = _setting(None).plain.peak_bytes
    request = _setting(plain - 300).trying(4)
    tried, timeline = Fitting(request, "test").prefixes(ORDER).found()
    for num in (len(tried.actions) - 1, len(tried.actions) + 1):
        if num <= len(ORDER):
            other = simulate(request.problem, dict(ORDER[:num]), DEVICE, limit_bytes=request.budget_bytes)
            assert not fits(request, other) or other.step_seconds >= timeline.step_seconds


def test_spaced() -> None:
    """Both ends are there, and no more numbers than asked for."""
    for high in range(1, 40):
        for most in range(2, 12):
            found = spaced(0, high, most)
            assert (found[0], found[-1]) == (0, high)
            assert len(found) == min(most, high + 1)


def test_what_is_always_done_is_done() -> None:
    """Also where nothing more is needed."""
    always: dict[int, Action] = {3: "recompute"}
    assert Fitting(_setting(None), "test").prefixes(ORDER, always).found()[0].actions == always


def test_an_order_may_take_more_as_a_whole_than_in_part() -> None:
    """Recomputing everything replays the whole chain at once; the error's floor is that of the best prefix."""
    order: list[tuple[int, Action]] = [(s, "recompute") for s in (6, 3, 9, *(s for s in range(1, 13) if s % 3))]
    with pytest.raises(BudgetInfeasibleError) as caught:
        Fitting(_setting(1), "test").prefixes(order).plan()
    floor = caught.value.floor_bytes
    whole = simulate(Problem(NET), dict(order), DEVICE, schedule=ON_DEMAND).peak_bytes
    assert floor <= whole
    assert Fitting(_setting(floor), "test").prefixes(order).plan().predicted_peak_bytes <= floor
    with pytest.raises(BudgetInfeasibleError):
        Fitting(_setting(floor - 1), "test").prefixes(order).plan()


def test_a_discipline_of_its_own_is_kept() -> None:
    """A choice with a schedule is simulated under it and nothing else, and does not fit where that does not."""
    actions = dict(ORDER)
    waited = simulate(Problem(NET), actions, DEVICE, schedule=ON_DEMAND)
    found = Fitting(_setting(None), "test").one(Tried(actions=actions, schedule=ON_DEMAND)).plan()
    assert found.predicted_step_seconds == waited.step_seconds
    with pytest.raises(BudgetInfeasibleError, match=str(waited.peak_bytes)):
        Fitting(_setting(waited.peak_bytes - 1), "test").one(Tried(actions=actions, schedule=ON_DEMAND)).plan()


def test_without_a_budget_a_policy_does_all_that_its_paper_does() -> None:
    """What is fitted to a budget by its length is as long as it can be where there is none."""
    found, _ = Fitting(_setting(None), "test").up_to(5, lambda num: Tried(actions=dict(ORDER[:num]))).found()
    assert found.actions == dict(ORDER[:5])


def test_one_choice_waits_for_each_copy_where_it_must() -> None:
    """Between the peaks with copies overlapped and waited for, the plan stalls more and fits."""
    loose = Fitting(_setting(None), "test").one(Tried(actions=dict(ORDER))).plan()
    tight = simulate(Problem(NET), dict(ORDER), DEVICE, schedule=ON_DEMAND)
    assert tight.peak_bytes < loose.predicted_peak_bytes
    found = Fitting(_setting(tight.peak_bytes), "test").one(Tried(actions=dict(ORDER))).plan()
    assert found.predicted_peak_bytes <= tight.peak_bytes
    assert found.predicted_stall_seconds >= loose.predicted_stall_seconds
    with pytest.raises(BudgetInfeasibleError, match=str(tight.peak_bytes)):
        Fitting(_setting(tight.peak_bytes - 1), "test").one(Tried(actions=dict(ORDER))).plan()
