"""Which shapes belong together, and which are served by which plan."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from torch.utils._pytree import register_pytree_node

from lightning_offload.errors import BudgetInfeasibleError
from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.plugins.infeasible import shapes_of, with_reasons
from lightning_offload.plugins.shape_families import MIN_SAMPLES, ShapeFamily, shape_of
from tests.graph.building import chain


def _x(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(*shape, **options)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_x(4, 6), _x(4, 9)),
        ({"ids": _x(4, 6), "labels": _x(4, 3)}, {"ids": _x(2, 7), "labels": _x(2, 7)}),
        (
            _x(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
            _x(2, 3, 9, 6).contiguous(memory_format=torch.channels_last),
        ),
    ],
    ids=["length", "two tensors", "channels last"],
)
def test_sizes_alone_make_no_other_family(one: Any, other: Any) -> None:
    """They are other kinds of step of one family."""
    first, second = shape_of(one), shape_of(other)
    assert first.family == second.family
    assert first.signature != second.signature
    assert first.sizes != second.sizes


def test_all_else_makes_another_family(subtests: pytest.Subtests) -> None:
    """Ranks, types, layouts and structure."""
    for other in [
        _x(4, 6, 1),
        _x(4, 6, dtype=torch.float64),
        _x(6, 4).t(),
        _x(4, 6, requires_grad=True),
        [_x(4, 6)],
        _x(4, 6)[:, ::2],
    ]:  # fmt: skip
        with subtests.test(other=other):
            assert shape_of(_x(4, 6)).family != shape_of(other).family


@pytest.mark.parametrize("other", [torch.eye(3).to_sparse(), torch.eye(4).half().to_sparse()])
def test_tensors_without_strides_are_of_one_size(other: torch.Tensor) -> None:
    """What a sparse one takes its shape does not tell: another is of another family."""
    one = torch.eye(4).to_sparse()
    assert shape_of(one) == shape_of(2 * one)
    assert shape_of(one).family != shape_of(other).family


class _Batch:
    """A node of a user's, with something beside its tensor."""

    def __init__(self, x: torch.Tensor, beside: Any) -> None:
        self.x, self.beside = x, beside


register_pytree_node(_Batch, lambda batch: ([batch.x], batch.beside), lambda parts, beside: _Batch(*parts, beside))


def test_nodes_of_the_users() -> None:
    """They tell steps apart by how what is beside their tensors is written, and nobody compares or keeps it."""
    held = _x(3)
    reference, x = weakref.ref(held), _x(4, 6)
    assert shape_of(_Batch(x, [held])) == shape_of(_Batch(x, [_x(3)]))
    assert shape_of(_Batch(x, {"mode": "a"})).family != shape_of(_Batch(x, {"mode": "b"})).family
    beside = {"mode": "a"}
    first = shape_of(_Batch(x, beside))
    beside["mode"] = "b"
    assert shape_of(_Batch(x, beside)) != first
    del held
    assert reference() is None


def _step(batch: int, length: int) -> StepGraph:
    return chain(64 * batch * length, 16 * batch * length * length, 64 * batch * length)


def _family(*shapes: tuple[int, int]) -> ShapeFamily:
    family = ShapeFamily("f")
    for batch, length in shapes:
        family.learn(f"{batch} {length}", (batch, length, batch, length), _step(batch, length))
    return family


def test_a_family_predicts_once_three_shapes_are_known() -> None:
    """Not before; and the step at other sizes is the one that would have been recorded."""
    shapes = [(4, 10), (4, 30), (4, 70)]
    assert MIN_SAMPLES == 3
    for count in (0, 1, 2):
        assert _family(*shapes[:count]).find((4, 20, 4, 20)) is None
    family = _family(*shapes)
    extrapolated = family.find((4, 50, 4, 50), is_exact=True)
    assert extrapolated is not None
    graph = family.planner.model.at(extrapolated.point)
    assert [s.num_bytes for s in graph.storages] == [s.num_bytes for s in _step(4, 50).storages]


def test_what_did_not_vary_must_not() -> None:
    """A smaller last batch, or two sizes that part, are not what the model knows; nor is a size of one."""
    family = _family((4, 10), (4, 30), (4, 70))
    assert family.find((3, 20, 3, 20)) is None
    assert family.find((4, 20, 4, 21)) is None
    assert family.find((4, 1, 4, 1)) is None
    wider = _family((4, 10), (4, 30), (4, 70), (3, 20), (2, 20))
    assert wider.find((3, 50, 3, 50)) is not None


def test_one_plan_serves_sizes_up_to_an_eighth_of_a_power_of_two_apart() -> None:
    """Sizes are rounded up, never down; few buckets serve all lengths."""
    family = _family((4, 10), (4, 30), (4, 512))
    buckets = {}
    for length in range(2, 513):
        extrapolated = family.find((4, length, 4, length))
        assert extrapolated is not None
        assert length <= extrapolated.point[0] <= length * 9 // 8 + 1
        buckets[extrapolated.key] = extrapolated.point
    assert len(set(buckets.values())) == len(buckets) < 64


def test_another_structure_is_left_out_of_the_model() -> None:
    """The one that most shapes have is predicted; one alone is no model."""
    family = _family((4, 10), (4, 30), (4, 70))
    family.learn("other", (4, 40, 4, 40), chain(1, 2, 3, 4, 5))
    extrapolated = family.find((4, 50, 4, 50), is_exact=True)
    assert extrapolated is not None
    assert len(family.planner.model.structure.storages) == len(_step(4, 50).storages)
    mixed = _family((4, 10), (4, 30))
    mixed.learn("other", (4, 40, 4, 40), chain(1, 2, 3, 4, 5))
    assert mixed.find((4, 50, 4, 50)) is None


def test_shapes_whose_steps_leave_their_plan_again_and_again_are_recorded() -> None:
    """Twice, each shape by itself, whatever others do that are served by the same plan."""
    family = _family((4, 10), (4, 30), (4, 70))
    first, other = family.find((4, 49, 4, 49)), family.find((4, 50, 4, 50))
    assert first is not None
    assert other is not None
    assert first.key == other.key
    family.step_left_its_plan("first")
    assert family.find((4, 49, 4, 49), signature="first") == first
    family.step_left_its_plan("first")
    assert family.find((4, 49, 4, 49), signature="first") is None
    assert family.find((4, 50, 4, 50), signature="other") == other


def test_what_is_known_of_one_structure_is_not_of_another() -> None:
    """Where a refit changes the structure, verified replays are forgotten; only samples that have it count."""
    family = _family((4, 10), (4, 30), (4, 70))
    assert family.find((4, 50, 4, 50)) is not None
    known = family.verified
    known.add(3)
    family.learn("4 20", (4, 20, 4, 20), _step(4, 20))
    assert family.find((4, 50, 4, 50)) is not None
    assert family.verified is known
    for length in range(80, 86):
        sizes = (16 * length, 8, 4 * length, 4, 2)
        family.learn(f"4 {length}", (4, length, 4, length), chain(*sizes))
    assert family.find((4, 50, 4, 50)) is not None
    assert family.verified == set()
    assert known == {3}
    assert all(int(signature.split()[1]) >= 80 for signature in family.alike)


def test_samples_are_few_and_can_be_forgotten() -> None:
    """However many shapes there are."""
    family = ShapeFamily("f")
    for length in range(10, 60):
        family.learn(str(length), (4, length), _step(4, length))
    assert len(family.samples) == 8
    for signature in list(family.samples)[2:]:
        family.forget(signature)
    assert family.find((4, 30)) is None


def test_planners_that_keep_something_are_of_the_same_steps() -> None:
    """They are made once for each choice, and the first is left as it is."""
    family = _family((4, 10), (4, 30), (4, 70))
    assert family.find((4, 50, 4, 50)) is not None
    planner = family.planner
    keeping = planner.keeping(frozenset({0, 1}))
    assert keeping.model is planner.model
    assert keeping is planner.keeping(frozenset({0, 1}))
    assert planner.keeping(frozenset()) is planner
    assert not {0, 1} & set(keeping._problem.candidates)
    assert {0, 1} & set(planner._problem.candidates)


def test_errors_name_the_shapes() -> None:
    """And keep their figures."""
    error = BudgetInfeasibleError("no plan", budget_bytes=5, floor_bytes=7, op="aten.mm")
    told = with_reasons(error, shapes_of(shape_of((_x(4, 6), {"labels": _x(4)}))))
    assert str(told) == "no plan; this step is given tensors of the shapes (4, 6), (4,)"
    assert (told.budget_bytes, told.floor_bytes, told.op) == (5, 7, "aten.mm")
    assert with_reasons(error, shapes_of(shape_of(()))) is error


def test_measured_steps_replace_recorded_ones() -> None:
    """What is learned later of the same shape counts."""
    family = _family((4, 10), (4, 30), (4, 70))
    longer = [dataclasses.replace(op, seconds=5.0) for op in _step(4, 70).ops]
    family.learn("4 70", (4, 70, 4, 70), dataclasses.replace(_step(4, 70), ops=tuple(longer)))
    extrapolated = family.find((4, 70, 4, 70), is_exact=True)
    assert extrapolated is not None
    assert family.planner.model.at(extrapolated.point).ops[0].seconds > 2.0


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("odd", [(1, 33), (4, 1), (3, 33)])
def test_an_odd_batch_among_the_recorded_ones_is_left_out(odd: tuple[int, int], place: int) -> None:
    """The last, smaller batch; a batch or a length of one."""
    shapes = [(4, 10), (4, 30), (4, 70)]
    shapes.insert(place, odd)
    extrapolated = _family(*shapes).find((4, 50, 4, 50), is_exact=True)
    if extrapolated is not None:
        assert extrapolated.actual in ((50,), (4, 50))


def test_far_beyond_what_was_recorded_nothing_is_predicted() -> None:
    """A model may cut off what is long, or do something else with it; and the largest is remembered.

    Up to a quarter beyond is not far, until a step shows that laws may not hold. Up to the next bucket is not beyond:
    that is what the largest one is planned for.
    """
    family = _family((4, 10), (4, 70), (4, 30))
    assert family.find((4, 88, 4, 88)) is not None
    assert family.find((4, 89, 4, 89)) is None
    family.changes.deviated()
    assert family.find((4, 72, 4, 72)) is not None
    assert family.find((4, 73, 4, 73)) is None
    for length in range(11, 25):
        family.learn(f"4 {length}", (4, length, 4, length), _step(4, length))
    assert len(family.samples) == 8
    assert "4 70" in family.samples
    assert family.find((4, 70, 4, 70)) is not None


def test_between_sizes_that_follow_no_law_the_larger_one_counts() -> None:
    """A model that pads to a power of two needs at 40 what it does at 64."""

    def step(length: int) -> StepGraph:
        padded = 1 << (length - 1).bit_length()
        return chain(64 * length, 16 * padded * padded, 64 * length)

    family = ShapeFamily("f")
    for length in (9, 33, 64, 100, 128):
        family.learn(str(length), (4, length), step(length))
    extrapolated = family.find((4, 40))
    assert extrapolated is not None
    assert extrapolated.point == (64,)
    assert extrapolated.actual == (40,)


def test_a_shape_that_was_above_the_budget_is_recorded() -> None:
    """At once; others go on being predicted, and once it was recorded it is a sample."""
    family = _family((4, 10), (4, 30), (4, 70))
    family.step_was_over("4 50")
    assert family.find((4, 50, 4, 50), signature="4 50") is None
    assert family.find((4, 51, 4, 51), signature="4 51") is not None
    family.learn("4 50", (4, 50, 4, 50), _step(4, 50))
    assert family.find((4, 50, 4, 50), signature="4 50") is not None


def test_planned_steps_teach_only_a_family_of_their_structure() -> None:
    """What is verified is known by a storage's place in the structure; what a refit replaces starts anew."""
    family = _family((4, 10), (4, 30), (4, 70))
    family.find((4, 50, 4, 50))
    family.take_over("4 30", {1}, {2}, 5)
    assert (family.verified, family.mismatched, family.shortfall_bytes) == ({1}, {2}, 5)
    family.learn("4 30", (4, 30, 4, 30), chain(5, 6, 7, 8, 9))
    family.take_over("4 30", {3}, {4}, 50)
    family.learn("4 60", (4, 60, 4, 60), _step(4, 60))
    family.find((4, 50, 4, 50))
    family.take_over("4 30", {3}, {4}, 50)
    assert (family.verified, family.mismatched, family.shortfall_bytes) == ({1}, {2}, 0)
    assert family.alike == {"4 10", "4 60", "4 70"}


def test_samples_from_elsewhere_are_dropped() -> None:
    """A checkpoint may tell of shapes with other numbers of sizes."""
    family = _family((4, 10), (4, 30), (4, 70))
    family.learn("9", (9,), _step(1, 9))
    assert list(family.samples) == ["9"]
    assert family.find((8,)) is None


def test_slices_of_any_length_are_one_family() -> None:
    """How far apart their rows lie is one more size, which need not vary."""
    rows = torch.zeros(4, 64, dtype=torch.long)
    first, second = shape_of(rows[:, :10]), shape_of(rows[:, :20])
    assert first.family == second.family
    assert first.sizes == (4, 10, 64, 1)
    assert first.shapes == ((4, 10),)
    assert shape_of(rows[:, :10].contiguous()).family != first.family
