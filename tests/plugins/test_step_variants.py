"""The structures of a kind of step, and the widest of them."""

from __future__ import annotations

import torch

from lightning_offload.graph.step_graph import StepGraph
from lightning_offload.plugins.planned_baseline import ExternalStorages
from lightning_offload.plugins.step_variants import StepVariants, Variant
from lightning_offload.tensors.saved_forms import OPEN, SavedForm
from tests.graph.building import GraphBuilder, chain


def _variant(*sizes: int, open_sizes: tuple[int, ...] = ()) -> Variant:
    graph = chain(*sizes)
    storages = [graph.storages[graph.values[save.value].storage] for save in graph.saves]
    forms = tuple(SavedForm(torch.uint8, (storage.num_bytes,)) for storage in storages)
    return Variant(graph, forms, frozenset(open_sizes), ExternalStorages(), 0)


def _sizes(graph: StepGraph) -> list[int]:
    return [storage.num_bytes for storage in graph.storages]


def test_the_widest_one_saves_most() -> None:
    """Whenever it came."""
    variants = StepVariants()
    for sizes in ((10, 20), (10, 20, 30, 40), (10, 20, 30)):
        variants.learn(_variant(*sizes))
    assert len(variants) == 3
    assert _sizes(variants.widest().graph) == _sizes(chain(10, 20, 30, 40))


def test_each_tensor_of_one_structure_counts_with_the_most_that_it_had() -> None:
    """And sizes that varied may be any."""
    variants = StepVariants()
    variants.learn(_variant(10, 70, 30))
    variants.learn(_variant(10, 20, 90))
    widest = variants.widest()
    assert len(variants) == 1
    assert _sizes(widest.graph) == [
        max(pair) for pair in zip(*map(_sizes, (chain(10, 70, 30), chain(10, 20, 90))), strict=True)
    ]
    assert {form.shape for form in widest.route} == {(10,), (OPEN,)}
    assert widest.largest_open_bytes == 90


def test_sizes_that_depend_on_data_are_open_from_the_first_one_on() -> None:
    """As the ops that made them told."""
    variants = StepVariants()
    variants.learn(_variant(10, 70, 30, open_sizes=(70,)))
    assert (OPEN,) in {form.shape for form in variants.widest().route}


def test_four_are_remembered_and_the_narrowest_goes() -> None:
    """So that memory is bounded."""
    variants = StepVariants()
    for length in range(2, 12):
        variants.learn(_variant(*range(100, 100 + length)))
    variants.widest()
    assert len(variants) == len(list(variants)) == 4
    assert (
        max(v.saved_bytes for v in variants) == variants.widest().saved_bytes == _variant(*range(100, 111)).saved_bytes
    )


def test_what_was_given_up_is_not_the_widest_any_more() -> None:
    """Unless there is nothing else."""
    variants = StepVariants()
    variants.learn(_variant(10, 20))
    variants.learn(_variant(10, 20, 30))
    assert variants.give_up_widest()
    assert variants.widest().saved_bytes == _variant(10, 20).saved_bytes
    assert not variants.give_up_widest()


def test_largest_sizes_that_do_not_fit_give_way_to_the_smallest() -> None:
    """One rare large one is not for all to be planned for."""
    variants = StepVariants()
    for sizes in ((10, 20, 30), (10, 900, 30), (10, 25, 30)):
        variants.learn(_variant(*sizes))
    assert variants.widest().saved_bytes == _variant(10, 900, 30).saved_bytes
    assert variants.give_up_widest()
    assert _sizes(variants.widest().graph) == _sizes(chain(10, 20, 30))
    assert not variants.give_up_widest()


def test_the_widest_one_has_most_saved_at_once() -> None:
    """Not in all: one backward after another needs no more than the larger of the two."""
    single, twice = chain(10, 20, 30), GraphBuilder()
    for _ in range(2):
        made = twice.op((), (25,))
        save = twice.pack(*made)
        twice.phase = "backward"
        twice.unpack(save)
        twice.release(save)
        twice.phase = "forward"
    found = Variant(twice.build(), (), frozenset(), ExternalStorages(), 0)
    assert found.saved_bytes == 25
    assert Variant(single, (), frozenset(), ExternalStorages(), 0).saved_bytes > 25


def test_what_was_given_up_makes_room_first_and_counts_again_later() -> None:
    """So that a large one that does not fit keeps no other from being known."""
    variants = StepVariants()
    for length in (8, 2, 3, 4):
        variants.learn(_variant(*range(100, 100 + length)))
    assert variants.give_up_widest()
    for length in (5, 6):
        variants.learn(_variant(*range(100, 100 + length)))
        assert variants.widest().saved_bytes == _variant(*range(100, 100 + length)).saved_bytes
    variants.learn(_variant(*range(100, 108)))
    assert variants.widest().saved_bytes == _variant(*range(100, 106)).saved_bytes
    variants.reconsider()
    variants.learn(_variant(*range(100, 108)))
    assert variants.widest().saved_bytes == _variant(*range(100, 108)).saved_bytes


def test_plans_stay_as_long_as_what_they_are_for_does() -> None:
    """A narrower structure, or the same one again with nothing larger, has none of them made anew; a wider one has."""
    variants = StepVariants()
    variants.learn(_variant(10, 20, 30))
    basis = variants.basis
    for other in (_variant(10, 20), _variant(10, 20, 30)):
        variants.learn(other)
        assert variants.basis.is_same(basis)
    variants.learn(_variant(10, 20, 30, 40))
    wider = variants.basis
    assert not wider.is_same(basis)
    assert wider.graph is variants.widest().graph
    variants.give_up_widest()
    assert not variants.basis.is_same(wider)
    variants.reconsider()
    assert variants.basis.is_same(wider)
    assert not wider._replace(graph=chain(10, 20, 30, 40)).is_same(wider), "equal, but another recording"
