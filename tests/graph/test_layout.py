"""Layouts: nothing overlaps, whatever the plan, and what nests wastes nothing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from lightning_offload.graph import Decision, StepGraph
from lightning_offload.graph.host_layout import (
    ALIGNMENT,
    LiveRanges,
    Stay,
    most_bytes,
    place,
    plan_layout,
    stored_bytes,
)
from lightning_offload.graph.memory_plan import Action, Tier
from lightning_offload.planning.problem import Problem
from tests.capture.recording import record
from tests.graph.building import chain, step_graphs
from tests.graph.test_memory_plan import plan_for
from tests.zoo.models.hugging_face import gpt2
from tests.zoo.models.plain_conv import DenseNet
from tests.zoo.models.resnet import ResNet
from tests.zoo.models.sequence import Seq2Seq

BLOCKS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 30)).map(
        lambda t: Stay(num_bytes=t[2], begin=t[0], end=t[0] + t[1])
    ),
    max_size=20,
)


def overlapping(blocks: list[Stay], offsets: list[int]) -> list[tuple[int, int]]:
    """Pairs of blocks that share a byte at a tick."""
    return [
        (i, j)
        for i, j in itertools.combinations(range(len(blocks)), 2)
        if blocks[i].begin < blocks[j].end
        and blocks[j].begin < blocks[i].end
        and offsets[i] < offsets[j] + blocks[j].num_bytes
        and offsets[j] < offsets[i] + blocks[i].num_bytes
    ]


@given(BLOCKS)
def test_blocks_never_overlap(blocks: list[Stay]) -> None:
    """Whatever their sizes and stays; the size is where the highest ends, and no less than must be there at once."""
    offsets, size = place(blocks)
    assert not overlapping(blocks, offsets)
    assert size == max((at + block.num_bytes for at, block in zip(offsets, blocks, strict=True)), default=0)
    assert most_bytes(blocks) <= size <= sum(block.num_bytes for block in blocks)
    assert place(blocks) == (offsets, size)


@given(BLOCKS)
def test_most_bytes_is_the_highest_sum(blocks: list[Stay]) -> None:
    """Tick by tick."""
    sums = [sum(b.num_bytes for b in blocks if b.begin <= tick < b.end) for tick in range(62)]
    assert most_bytes(blocks) == max(sums)


@st.composite
def nested_blocks(draw: st.DrawFn) -> list[Stay]:
    """Stays that nest, as brackets do."""
    blocks: list[Stay] = []
    is_open: list[int] = []
    for tick in range(draw(st.integers(0, 40))):
        if is_open and draw(st.booleans()):
            blocks.append(Stay(num_bytes=draw(st.integers(1, 30)), begin=is_open.pop(), end=tick))
        else:
            is_open.append(tick)
    return draw(st.permutations(blocks))


@given(nested_blocks())
def test_nested_stays_waste_nothing(blocks: list[Stay]) -> None:
    """First in forward, last in backward: the size is exactly what is there at once."""
    assert place(blocks)[1] == most_bytes(blocks)


def test_layout_by_hand() -> None:
    """Each storage of a chain lies on top of those before it, in whole pages, in its own tier."""
    graph = chain(100, 5000, 40, 60)
    plan = plan_for(
        graph,
        Decision(storage=1, action="swap"),
        Decision(storage=2, action="swap", tier="disk"),
        Decision(storage=3, action="recompute"),
        Decision(storage=4, action="swap"),
    )
    layout = plan_layout(graph, plan)
    assert layout.offsets == {1: 0, 4: ALIGNMENT, 2: 0}
    assert layout.tier_bytes == {"host": 2 * ALIGNMENT, "disk": 2 * ALIGNMENT}


def test_layout_without_swaps_is_empty() -> None:
    """Nothing has an offset, and no tier a size."""
    layout = plan_layout(chain(40, 50), plan_for(chain(40, 50), Decision(storage=1, action="recompute")))
    assert layout.offsets == {}
    assert layout.tier_bytes == {"host": 0, "disk": 0}


def _stored(graph: StepGraph, decisions: list[Decision], tier: Tier) -> dict[int, Stay]:
    """What a plan puts on a tier, by storage."""
    stays = LiveRanges(graph)
    ends = stays.ends({d.storage for d in decisions if d.action == "recompute"})
    return {
        d.storage: Stay(
            num_bytes=stored_bytes(graph.storages[d.storage].num_bytes),
            begin=stays.begin[d.storage],
            end=ends[d.storage],
        )
        for d in decisions
        if d.action == "swap" and d.tier == tier
    }


@given(graph=step_graphs(unit=1000), data=st.data())
def test_layout_of_any_plan_is_sound(graph: StepGraph, data: st.DataObject) -> None:
    """Whatever a plan does: aligned, inside its tier, and never two storages at the same place at once."""
    actions: tuple[Action, ...] = ("keep", "swap", "recompute")
    tiers: tuple[Tier, ...] = ("host", "disk")
    decisions = [
        Decision(storage=s, action=data.draw(st.sampled_from(actions[: 2 + c.can_recompute])), tier=tier)
        for s, c in Problem(graph).candidates.items()
        for tier in [data.draw(st.sampled_from(tiers))]
    ]
    layout = plan_layout(graph, plan_for(graph, *decisions))
    assert set(layout.offsets) == {d.storage for d in decisions if d.action == "swap"}
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets.values())
    for tier in tiers:
        stored = _stored(graph, decisions, tier)
        offsets = [layout.offsets[s] for s in stored]
        assert not overlapping(list(stored.values()), offsets)
        assert all(at + b.num_bytes <= layout.tier_bytes[tier] for at, b in zip(offsets, stored.values(), strict=True))


def _classify(model: torch.nn.Module, side: int) -> Callable[[], None]:
    images, labels = torch.randn(2, 3, side, side), torch.tensor([1, 0])
    return lambda: functional.cross_entropy(model(images), labels).backward()


def _predict(model: torch.nn.Module) -> Callable[[], None]:
    tokens = torch.arange(24).view(2, 12)
    return lambda: functional.cross_entropy(model(tokens, tokens).flatten(0, 1), tokens.flatten()).backward()


def _speak(model: torch.nn.Module) -> Callable[[], None]:
    tokens = torch.arange(24).view(2, 12)
    return lambda: model(input_ids=tokens, labels=tokens).loss.backward()


def _real_graph(name: str) -> StepGraph:
    torch.manual_seed(0)
    if name == "resnet":
        return record(_classify(model := ResNet((2, 2, 1), bottleneck=False, width=8, num_classes=10), 32), model)
    if name == "densenet":
        return record(_classify(model := DenseNet((3, 3)), 16), model)
    if name == "seq2seq":
        return record(_predict(model := Seq2Seq()), model)
    return record(_speak(model := gpt2("eager").train()), model)


def _enlarged(graph: StepGraph) -> StepGraph:
    """The same step on larger tensors, so that sizes are not all one page."""
    storages = tuple(dataclasses.replace(s, num_bytes=50 * s.num_bytes) for s in graph.storages)
    return dataclasses.replace(graph, storages=storages)


@pytest.mark.parametrize("name", ["resnet", "densenet", "seq2seq", "gpt2"])
def test_layout_of_real_steps_wastes_little(name: str) -> None:
    """At most a twentieth beyond what is stored at once, also where replays keep what they read for longer."""
    graph = _enlarged(_real_graph(name))
    candidates = Problem(graph).candidates
    for swapped_of_six in (6, 4, 2, 1):
        decisions = [
            Decision(storage=s, action="swap" if i % 6 < swapped_of_six or not c.can_recompute else "recompute")
            for i, (s, c) in enumerate(candidates.items())
        ]
        layout = plan_layout(graph, plan_for(graph, *decisions))
        least = most_bytes(list(_stored(graph, decisions, "host").values()))
        assert 0 < layout.tier_bytes["host"] <= 1.05 * least
