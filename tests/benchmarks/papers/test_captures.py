"""A step that was interpolated between two recordings is the step as recorded."""

from __future__ import annotations

import functools

import pytest

from benchmarks.papers import captures, searches
from benchmarks.papers.captures import Family
from examples.models import resnet
from examples.models.registry import Example, image_example


@pytest.fixture(scope="module")
def example() -> Example:
    """A residual network of 14 layers on small images."""
    return image_example(functools.partial(resnet, 1, 1, 1, 1, num_classes=10), 4, side=64, num_classes=10)


@pytest.fixture(scope="module")
def family(example: Example) -> Family:
    """Recordings at two batch sizes."""
    return Family(example, captures.device("k40c"), (8, 16))


@pytest.mark.parametrize("batch_size", [4, 11, 64])
def test_sizes_between_and_beyond_are_exact(family: Family, batch_size: int) -> None:
    """Each storage has the bytes it has when that batch size is recorded."""
    made, recorded = family.at(batch_size), family.recorded_at(batch_size)
    assert [s.num_bytes for s in made.storages] == [s.num_bytes for s in recorded.storages]
    found, expected = searches.peaks(made, family.spec), searches.peaks(recorded, family.spec)
    assert (found.plain_bytes, found.floor_bytes) == (expected.plain_bytes, expected.floor_bytes)
    assert found.floor_op == expected.floor_op


def test_momentum_counts(example: Example, family: Family) -> None:
    """The state that is there before a step holds the parameters and as many bytes of momentum."""
    recorded = captures.record(example, 8, family.spec)
    model = example.build()
    assert recorded.parameter_bytes == sum(4 * p.numel() for p in model.parameters())
    assert recorded.graph.extra_bytes >= recorded.parameter_bytes
    assert recorded.graph.persistent_bytes >= 2 * recorded.parameter_bytes


def test_largest_batch_fits_and_the_next_does_not(family: Family) -> None:
    """The floor of the batch that is found is within the budget, that of one more is not."""
    budget = searches.peaks(family.at(40), family.spec).floor_bytes
    found = searches.largest_batch(family, budget)
    assert searches.peaks(family.recorded_at(found), family.spec).floor_bytes <= budget
    assert searches.peaks(family.recorded_at(found + 1), family.spec).floor_bytes > budget
    assert searches.largest_plain_batch(family, budget) < found


@pytest.mark.parametrize("name", ["k40c", "p100", "3090"])
def test_tensors_and_the_process_around_them(name: str) -> None:
    """What tensors may take of a GPU is what makes a process that fills it, and a gibibyte less at least."""
    spec = captures.device(name)
    room = captures.room_bytes(spec)
    assert captures.process_bytes(room) == pytest.approx(captures.memory_bytes(spec), rel=1e-6)
    assert room < captures.memory_bytes(spec) - captures.GIB
    assert captures.tensor_bytes(captures.GIB // 2) == 0


def test_steps_that_differ_are_refused() -> None:
    """Two batch sizes whose steps are not alike cannot be interpolated."""
    odd = Example(
        build=functools.partial(resnet, 1, 1, 1, 1, num_classes=10),
        inputs=image_example(resnet, 4, side=64, num_classes=10).inputs,
        loss=lambda model, inputs: model(inputs[0]).sum() if len(inputs[0]) > 8 else model(inputs[0]).square().sum(),
        batch_size=4,
    )
    with pytest.raises(ValueError, match=r"at batch sizes 8, 16 are alike"):
        Family(odd, captures.device("k40c"), (8, 16))
