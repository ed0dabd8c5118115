"""What becomes of a kind of step whose ops are not always the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning_offload.plugins.planned_baseline import ExternalStorages
from lightning_offload.plugins.step_variants import Variant
from lightning_offload.plugins.structure_changes import StructureChanges
from tests.graph.building import chain

SAVED_BYTES = 1000


def _changes(num_structures: int = 1) -> StructureChanges:
    changes = StructureChanges()
    for index in range(num_structures):
        graph = chain(*range(100, 102 + index))
        changes.variants.learn(Variant(graph, (), frozenset(), ExternalStorages(), 0))
    return changes


def _step(fingerprint: int, astray_bytes: int = 0) -> Any:
    return SimpleNamespace(fingerprint=fingerprint, astray_bytes=astray_bytes)


def _aligning() -> StructureChanges:
    changes = _changes()
    assert changes.deviated() == "record"
    assert changes.deviated() == "align"
    return changes


def test_the_second_deviation_shows_that_structures_change() -> None:
    """The first may have been a change for good."""
    changes = _changes()
    assert changes.deviated() == "record"
    assert not changes.aligns
    assert changes.deviated() == "align"
    assert changes.aligns


def test_steps_that_follow_their_plan_make_up_for_others() -> None:
    """Thirty-two for each that did not: one in a long while changes nothing."""
    changes = _changes()
    for _ in range(10):
        assert changes.deviated() == "record"
        for _ in range(31):
            changes.followed()
        assert changes.num_deviations == 1
        changes.followed()
        assert changes.num_deviations == 0


def test_a_structure_that_has_come_to_rest_is_recorded_ever_more_seldom() -> None:
    """After 32 steps in a row that are alike, then after 64, up to 1,024; one deviation leads back."""
    changes, waits = _aligning(), []
    for fingerprint in range(1, 9):
        num = 0
        while changes.aligned(_step(fingerprint), SAVED_BYTES) is None:
            num += 1
        waits.append(num - 1)
        assert not changes.aligns
        assert changes.deviated() == "align"
    assert waits == [32, 64, 128, 256, 512, 1024, 1024, 1024]


def test_steps_that_differ_go_on_aligning() -> None:
    """However many there are."""
    changes = _aligning()
    assert all(changes.aligned(_step(number % 2), SAVED_BYTES) is None for number in range(2000))
    assert changes.aligns


def test_what_has_much_more_is_recorded_soon_and_then_more_seldom() -> None:
    """The step after the first one, after two more, after four more; little more is no reason."""
    changes, looks = _aligning(), []
    changes.begins(is_planned=True)
    for number in range(40):
        changes.aligned(_step(number, astray_bytes=21 if number % 7 in (1, 3) else 20), SAVED_BYTES)
        if changes.begins(is_planned=True) == "record":
            looks.append(number)
    assert looks == [1, 8, 22]


def test_of_steps_that_come_in_turns_the_next_one_is_recorded() -> None:
    """Every fifth has more: it is one of those that is recorded."""
    changes, looks = _changes(), []
    for number in range(40):
        if changes.begins(is_planned=True) == "record":
            looks.append(number)
        if number in (4, 9):
            changes.deviated()
        elif changes.aligns:
            changes.aligned(_step(number, astray_bytes=500 * (number % 5 == 4)), SAVED_BYTES)
    assert looks[0] == 19
    assert all(look % 5 == 4 for look in looks)


def test_unplanned_steps_are_planned_again_ever_more_seldom() -> None:
    """After 32, 64, ... and at last 1024 of them."""
    changes, waits = _changes(), []
    for _ in range(8):
        num = 0
        while changes.begins(is_planned=False) is None:
            num += 1
        waits.append(num)
        assert changes.is_retried
        assert changes.gives_up() == "unplan"
    assert waits == [32, 64, 128, 256, 512, 1024, 1024, 1024]


def test_a_structure_that_does_not_fit_gives_way_to_a_narrower_one() -> None:
    """Where none fits there is no plan; where nothing was planned yet, that is an error."""
    assert _changes().gives_up() is None
    changes = _changes(3)
    changes.deviated()
    changes.deviated()
    sizes = [changes.variants.widest().saved_bytes]
    while changes.gives_up() == "align":
        sizes.append(changes.variants.widest().saved_bytes)
    assert len(sizes) == 3
    assert sizes == sorted(sizes, reverse=True)
    assert not changes.aligns


def test_recordings_that_come_to_nothing_end() -> None:
    """After the third there is no plan."""
    changes = _changes()
    assert [changes.failed() for _ in range(3)] == ["record", "record", "unplan"]
