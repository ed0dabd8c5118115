"""A step at a batch size that was not recorded is the one that would have been."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_offload.errors import TuningError
from lightning_offload.graph import StepGraph
from lightning_offload.graph.step_graph import check
from lightning_offload.planning.problem import Problem
from lightning_offload.planning.request import PlanRequest
from lightning_offload.planning.step_model import StepModel, difference, same_structure
from tests.capture.recording import record
from tests.graph.building import chain
from tests.planning.step_strategies import SEEDS, odd_step
from tests.plugins.training import Net
from tests.shares import pairs
from tests.tuning.steps import A100, linear_family, recorded_family, untimed

SIZES = st.lists(st.integers(1, 32), min_size=2, max_size=4, unique=True)


def _seconds(graph: StepGraph) -> list[float]:
    return [op.seconds for op in graph.ops]


@given(SEEDS, SIZES, st.integers(1, 5000))
def test_steps_on_lines_are_predicted_exactly(seed: int, sizes: list[int], n: int) -> None:
    """Any structure whose figures are ``a + b*n``: equal graphs, but for the rounding of seconds."""
    rng = random.Random(seed)
    family = linear_family(odd_step(rng), rng)
    model = StepModel.fit({size: family(size) for size in sizes})
    predicted = model.at(n)
    check(predicted)
    assert untimed(predicted) == untimed(family(n))
    assert _seconds(predicted) == pytest.approx(_seconds(family(n)), rel=1e-6, abs=1e-9)
    assert (model.num_inexact, model.sizes) == (0, tuple(sorted(sizes)))


@given(SEEDS, st.integers(1, 300))
def test_fractions_of_bytes_are_rounded_as_they_are_made(seed: int, n: int) -> None:
    """Storages with thirds of a byte for each sample, rounded up, are predicted to the byte."""
    rng = random.Random(seed)
    family = linear_family(odd_step(rng), rng, num_parts=3)
    predicted = StepModel.fit({size: family(size) for size in (3, 6, 12)}).at(n)
    pairs = zip(predicted.storages, family(n).storages, strict=True)
    assert all(p.num_bytes == t.num_bytes for p, t in pairs)


MODELS = ("resnet50", "gpt2-sdpa", "lstm", "vgg16-bn", "simclr")


@pytest.mark.parametrize(("name", "sizes"), pairs(MODELS, [(2, 4), (2, 4, 8)], every=2), ids=str)
def test_recorded_models_are_predicted_to_the_byte(name: str, sizes: tuple[int, ...]) -> None:
    """All of a step but its seconds equals a recording at that size: structure, bytes, lifetimes, digest."""
    family = recorded_family(name)
    model = StepModel.fit({n: family(n) for n in sizes})
    assert (model.sizes, model.num_inexact) == (sizes, 0)
    for n in (3, 16, 64):
        predicted, true = model.at(n), family(n)
        assert untimed(predicted) == untimed(true)
        assert predicted.digest() == true.digest()
        mine, others = (PlanRequest(Problem(graph), A100, None) for graph in (predicted, true))
        assert mine.plain.peak_bytes == others.plain.peak_bytes
        assert mine.floor.peak_bytes == others.floor.peak_bytes


# The roofline is a maximum, of which the parts have different slopes: no line is exact on both sides of a bend. The
# two small models have matrices that mostly read their weights at sizes 2 to 8, and hardly do at 64.
TOLERANCES = {
    "resnet50": {"a100": 0.001, "h200": 0.02},
    "gpt2-sdpa": {"a100": 0.001, "h200": 0.001},
    "vgg16-bn": {"a100": 0.01, "h200": 0.005},
    "lstm": {"a100": 0.02, "h200": 0.001},
    "simclr": {"a100": 0.2, "h200": 0.001},
}


@pytest.mark.parametrize(("name", "device"), pairs(MODELS, ["a100", "h200"], every=2))
def test_seconds_of_recorded_models_are_close(name: str, device: str) -> None:
    """From sizes 2, 4 and 8 the modelled step at 3, 16 and 64 is exact but for bends of the roofline."""
    family = recorded_family(name, device)
    model = StepModel.fit({n: family(n) for n in (2, 4, 8)})
    for n in (3, 16, 64):
        assert model.at(n).seconds == pytest.approx(family(n).seconds, rel=TOLERANCES[name][device])


def test_a_size_with_another_structure_is_left_out() -> None:
    """The LSTM's step at size 1 has fewer copies; the other two are used."""
    family = recorded_family("lstm")
    model = StepModel.fit({n: family(n) for n in (1, 2, 4)})
    assert model.sizes == (2, 4)
    assert untimed(model.at(64)) == untimed(family(64))


def test_structures_that_all_differ_are_named() -> None:
    """Nothing can be predicted; the error names the sizes, the op and the module."""
    family = recorded_family("lstm")
    with pytest.raises(TuningError, match=r"1, 2 are alike.*op 5 is aten\..* in `rnn` at one and op 5 is"):
        StepModel.fit({1: family(1), 2: family(2)})


def test_a_real_recording_is_predicted() -> None:
    """Steps that really ran, with measured times, give the graph of a step that really ran at another size."""

    def real(n: int) -> StepGraph:
        torch.manual_seed(0)
        net, batch = Net(), torch.zeros(n, 256)
        return record(lambda: net(batch).square().mean().backward(), net)

    model = StepModel.fit({n: real(n) for n in (8, 16)})
    predicted = model.at(48)
    check(predicted)
    assert untimed(predicted) == untimed(real(48))
    assert predicted.seconds > 0


def test_the_longest_life_and_the_least_freedom_count() -> None:
    """What one recording lets go of early, or lets be replayed, the other may not."""
    base = chain(100, 200, 300)
    early = dataclasses.replace(base.storages[2], death=base.storages[2].death - 1)
    op = dataclasses.replace(base.ops[0], replayable=False)
    save = dataclasses.replace(base.saves[1], must_keep=True, release_tick=base.num_ticks)
    other = dataclasses.replace(
        base,
        storages=(*base.storages[:2], early, *base.storages[3:]),
        ops=(op, *base.ops[1:]),
        saves=(base.saves[0], save, base.saves[2]),
    )
    for graphs in ({2: base, 4: other}, {2: other, 4: base}):
        merged = StepModel.fit(graphs).at(3)
        assert merged.storages[2].death == base.storages[2].death
        assert not merged.ops[0].replayable
        assert merged.saves[1] == save
        assert merged.saves[0] == base.saves[0]


def test_figures_of_the_step_itself_are_taken_over() -> None:
    """State that no op touched and gradients do not grow with the batch, and stay consistent."""
    base = chain(100, 200)
    graphs = {
        2: dataclasses.replace(base, extra_bytes=500, gradient_bytes=70, old_gradient_bytes=80, accumulated_bytes=10),
        4: dataclasses.replace(base, extra_bytes=900, gradient_bytes=70, old_gradient_bytes=80, accumulated_bytes=60),
    }
    predicted = StepModel.fit(graphs).at(1000)
    check(predicted)
    assert predicted.extra_bytes == 900
    assert (predicted.gradient_bytes, predicted.old_gradient_bytes, predicted.accumulated_bytes) == (70, 80, 60)


def test_gradients_stay_consistent_when_only_some_grow() -> None:
    """What may still be there in backward is a part of what may be there before it, at any size."""
    base = chain(100, 200)
    pairs = {2: (50, 10), 4: (70, 20), 8: (60, 40)}
    graphs = {
        n: dataclasses.replace(base, old_gradient_bytes=old, accumulated_bytes=part) for n, (old, part) in pairs.items()
    }
    predicted = StepModel.fit(graphs).at(1000)
    check(predicted)
    assert predicted.accumulated_bytes == predicted.old_gradient_bytes == 5000


def test_sizes_must_be_positive_integers(subtests: pytest.Subtests) -> None:
    """In a fit and in a prediction."""
    for size in [0, -3, 2.5, True, "8", None]:
        with subtests.test(size=size):
            model = StepModel.fit({2: chain(10), 4: chain(20)})
            with pytest.raises(TuningError, match=r"batch size .* is not a positive integer"):
                model.at(size)  # type: ignore[arg-type]
            with pytest.raises(TuningError, match=r"batch size .* is not a positive integer"):
                StepModel.fit({size: chain(10), 4: chain(20)})  # type: ignore[dict-item]


@pytest.mark.parametrize("graphs", [{}, {4: chain(10)}], ids=["none", "one"])
def test_one_size_does_not_tell_how_a_step_grows(graphs: dict[int, StepGraph]) -> None:
    """The error says what to do."""
    with pytest.raises(TuningError, match="record it at two sizes or more"):
        StepModel.fit(graphs)


SMALL, LARGE, LONGER = chain(10, 20), chain(100, 200), chain(10, 20, 30)


def test_sizes_and_times_are_no_structure() -> None:
    """Steps that differ in bytes and seconds alone are the same."""
    assert same_structure({4: LARGE, 2: SMALL}) == (2, 4)
    assert difference(SMALL, LARGE) is None


def test_the_largest_group_is_taken() -> None:
    """At size 1 the step is another one; the others are taken, in order."""
    assert same_structure({1: LONGER, 8: LARGE, 2: SMALL, 4: LARGE}) == (2, 4, 8)


def test_of_equal_groups_that_of_the_larger_sizes_is_taken() -> None:
    """Two and two: the larger ones are closer to what will be predicted."""
    assert same_structure({1: LONGER, 2: LONGER, 4: SMALL, 8: LARGE}) == (4, 8)
    assert same_structure({2: LONGER, 4: SMALL}) == (4,)


def _with_save(graph: StepGraph) -> StepGraph:
    save = dataclasses.replace(graph.saves[0], unpack_ticks=())
    return dataclasses.replace(graph, saves=(save, *graph.saves[1:]))


def _with_op(graph: StepGraph) -> StepGraph:
    op = dataclasses.replace(graph.ops[1], name="aten.clone.default", module="rnn")
    return dataclasses.replace(graph, ops=(graph.ops[0], op, *graph.ops[2:]))


def _with_birth(graph: StepGraph) -> StepGraph:
    storage = dataclasses.replace(graph.storages[1], birth=-1)
    return dataclasses.replace(graph, storages=(graph.storages[0], storage, *graph.storages[2:]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_with_op, "op 1 is aten.op.default at one and op 1 is aten.clone.default in `rnn` at the other"),
        (_with_save, "save 0 is of value 1 at tick 1, read 1 times at one and"),
        (_with_birth, "storage 1 is made at tick 0 at one and storage 1 is made at tick -1"),
        (lambda g: dataclasses.replace(g, num_ticks=g.num_ticks + 1), "ticks"),
        (lambda g: dataclasses.replace(g, saves=()), "save 0"),
    ],
    ids=["op", "save", "birth", "ticks", "fewer saves"],
)
def test_the_first_difference_is_named(change: object, words: str) -> None:
    """What differs is said in words of the model."""
    assert callable(change)
    text = difference(SMALL, change(SMALL))
    assert text is not None
    assert words in text
