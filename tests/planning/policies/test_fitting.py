"""The shortest prefix of a policy's order that fits."""

from __future__ import annotations

import pytest

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph.memory_plan import Action
from lightning_offload.planning.policies.fitting import fits, fixed_plan, shortest_prefix
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest
from lightning_offload.planning.simulator import simulate
from tests.graph.building import DEVICE, chain

NET = chain(*[100] * 12)


def _setting(budget: int | None) -> PlanRequest:
    return PlanRequest(Problem(NET), DEVICE, budget)


ORDER: list[tuple[int, Action]] = [(s, "swap") for s in range(1, 13)]


def test_no_shorter_prefix_fits() -> None:
    """One action less exceeds the budget, whichever way its copies are scheduled."""
    plain = _setting(None).plain.peak_bytes
    for budget in range(plain - 600, plain, 100):
        request = _setting(budget)
        choice = shortest_prefix(request, "test", ORDER)
        assert fits(request, choice.timeline)
        shorter = dict(ORDER[: len(choice.actions) - 1])
        assert simulate(request.problem, shorter, DEVICE, overlap=False).peak_bytes > budget


def test_what_is_always_done_is_done() -> None:
    """Also where nothing more is needed."""
    always: dict[int, Action] = {3: "recompute"}
    assert shortest_prefix(_setting(None), "test", ORDER, always).actions == always


def test_a_shorter_prefix_is_found_where_the_whole_order_takes_more() -> None:
    """Recomputing everything replays the whole chain at once; the error's floor is that of the best prefix."""
    order: list[tuple[int, Action]] = [(s, "recompute") for s in (6, 3, 9, *(s for s in range(1, 13) if s % 3))]
    with pytest.raises(BudgetInfeasibleError) as caught:
        shortest_prefix(_setting(1), "test", order)
    floor = caught.value.floor_bytes
    whole = simulate(Problem(NET), dict(order), DEVICE, overlap=False).peak_bytes
    assert floor <= whole
    assert fits(_setting(floor), shortest_prefix(_setting(floor), "test", order).timeline)
    with pytest.raises(BudgetInfeasibleError):
        shortest_prefix(_setting(floor - 1), "test", order)


def test_fixed_plan_waits_for_each_copy_where_it_must() -> None:
    """Between the peaks with copies overlapped and waited for, the plan stalls more and fits."""
    loose = fixed_plan(_setting(None), "test", dict(ORDER))
    tight = simulate(Problem(NET), dict(ORDER), DEVICE, overlap=False)
    assert tight.peak_bytes < loose.predicted_peak_bytes
    found = fixed_plan(_setting(tight.peak_bytes), "test", dict(ORDER))
    assert found.predicted_peak_bytes <= tight.peak_bytes
    assert found.predicted_stall_seconds >= loose.predicted_stall_seconds
    with pytest.raises(BudgetInfeasibleError, match=str(tight.peak_bytes)):
        fixed_plan(_setting(tight.peak_bytes - 1), "test", dict(ORDER))
