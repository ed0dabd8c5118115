"""Which steps are counted, and which go without hooks."""

from __future__ import annotations

import itertools

import pytest

from lightning_offload.plugins.sampling_schedule import HookElision, SamplingSchedule, Varying


def _counted(num_steps: int, varying: Varying | None = None) -> list[int]:
    sampling_schedule, found = SamplingSchedule(), []
    for step in range(num_steps):
        is_counted = sampling_schedule.is_due(varying)
        sampling_schedule.begin_step(is_counted=is_counted)
        found += [step] * is_counted
    return found


def test_steps_of_one_structure_are_counted_seldom() -> None:
    """The first two, then one after 28 to 32, and ever more seldom, up to one in 512."""
    found = _counted(4000)
    assert found[:2] == [0, 1]
    gaps = [later - earlier for earlier, later in itertools.pairwise(found[1:])]
    most = [32, 64, 128, 256, 512, 512, 512, 512, 512, 512]
    assert all(longest - 4 <= gap <= longest for gap, longest in zip(gaps, most, strict=True))
    assert len({gap for gap in gaps if gap > 500}) > 1


def test_steps_of_varying_sizes_are_counted_as_often_for_good() -> None:
    """The first two, then one in 28 to 32: they are under several plans."""
    found = _counted(1200, "sizes")
    assert found[:2] == [0, 1]
    assert {later - earlier for earlier, later in itertools.pairwise(found[1:])} <= set(range(28, 33))


def test_a_new_plan_has_its_first_steps_counted() -> None:
    """However seldom those under the one before were."""
    schedule = SamplingSchedule()
    for _ in range(1000):
        schedule.begin_step(is_counted=schedule.is_due())
    schedule.begin_anew()
    due = []
    for step in range(40):
        is_counted = schedule.is_due()
        schedule.begin_step(is_counted=is_counted)
        due += [step] * is_counted
    assert due[:2] == [0, 1]
    assert 28 <= due[2] - 1 <= 32


def test_changing_steps_are_counted_more_often_at_first() -> None:
    """Twelve, then one in 9 to 13, then as seldom as others."""
    found = _counted(600, "structures")
    assert found[:12] == list(range(12))
    soon = [b - a for a, b in itertools.pairwise(found[11:]) if b < 96]
    late = [b - a for a, b in itertools.pairwise(found[11:]) if a > 96]
    assert set(soon) <= set(range(9, 14))
    assert set(late) <= set(range(28, 33))


@pytest.mark.parametrize("period", [2, 3, 5, 7])
def test_steps_in_turns_do_not_evade_it(period: int) -> None:
    """Each of the turns is met."""
    found = _counted(3000, "structures")
    assert {step % period for step in found if step > 100} == set(range(period))


def test_hooks_go_after_three_steps_alike_and_come_back_at_times() -> None:
    """One step in 32 has them."""
    hooks, elides = HookElision(), []
    for _ in range(3 + 64):
        elides.append(hooks.elides(has_ample_room=False))
        hooks.note(40)
    assert elides[:3] == [False] * 3
    assert elides[3:].count(False) == 2


def test_hooks_stay_where_steps_differ() -> None:
    """Until they are others from the beginning; what is not known says nothing."""
    hooks = HookElision()
    for num_nodes in (40, None, 40, 41, 40, 40, 40, 40):
        hooks.note(num_nodes)
    assert not hooks.elides(has_ample_room=False)
    assert hooks.elides(has_ample_room=True)
    alike = HookElision()
    for _ in range(3):
        alike.note(7)
    assert alike.elides(has_ample_room=False)
    alike.restart()
    assert not alike.elides(has_ample_room=False)
