"""Values are known by the live identity of their storage; handles stand for saved tensors, without graph or memory."""

from __future__ import annotations

import gc
import weakref

import torch

from lightning_offload.runtime.values import LiveValue, ValueTable, version_alias_of


def test_version_alias_shares_the_version_counter_and_no_memory() -> None:
    """Writes to the tensor show in the version alias, which keeps no byte of it alive."""
    tensor = torch.ones(1000)
    version_alias = version_alias_of(tensor)
    assert (version_alias.numel(), version_alias._version) == (0, tensor._version)
    tensor.add_(1.0)
    tensor[3:].zero_()
    assert version_alias._version == tensor._version == 2
    memory = weakref.ref(tensor.untyped_storage())
    del tensor
    assert memory() is None


def test_version_alias_refers_to_no_graph() -> None:
    """The version alias of a result does not hold its ``grad_fn``: that would be a cycle no collector sees."""
    leaf = torch.ones(10, requires_grad=True)
    saved = leaf.exp()  # saved by its own node, so that the node and this memory live together
    memory = weakref.ref(saved.untyped_storage())
    version_alias = version_alias_of(saved)
    assert version_alias.grad_fn is None
    del saved
    assert memory() is None


def test_value_from_before_the_step_notices_writes() -> None:
    """A replay never reads a tensor that was written since it was recorded."""
    tensor = torch.ones(10)
    value = LiveValue(-1, 40)
    assert not value.is_stale
    value.guards = ((tensor, tensor._version),)
    assert not value.is_stale
    tensor.mul_(2.0)
    assert value.is_stale


def test_new_value_is_not_live() -> None:
    """A value that nothing provides is not live; memory makes it available."""
    value = LiveValue(1, 40)
    assert value.live() is None
    value.storage = torch.ones(10).untyped_storage()
    assert value.live() is value.storage


def storage() -> torch.UntypedStorage:
    """Some device memory."""
    return torch.ones(100).untyped_storage()


def test_followed_value_is_found_by_its_storage() -> None:
    """Any tensor on the storage leads to the value, no other storage does."""
    table, tensor, value = ValueTable(), torch.ones(10, 10), LiveValue(7, 400)
    table.follow(value, tensor.untyped_storage())
    assert table.find(tensor.t()[2:].untyped_storage()) is value
    assert table.find(storage()) is None
    assert table.indexed(7) is value
    assert table.all_indexed() == [value]


def test_reused_address_is_another_storage() -> None:
    """After a storage died, one at the same address holds no value, though keys may collide."""
    table = ValueTable()
    for index in range(200):
        memory = storage()
        assert table.find(memory) is None
        table.follow(LiveValue(index, 400), memory)
        assert table.find(memory) is not None
        del memory


def test_value_dies_with_its_storage() -> None:
    """A value that owns nothing is forgotten when its storage goes."""
    table, memory = ValueTable(), storage()
    alive = weakref.ref(value := LiveValue(3, 400))
    table.follow(value, memory)
    del value
    assert alive() is not None
    del memory
    assert alive() is None
    assert table.indexed(3) is None


def test_owned_value_lives_by_who_needs_it() -> None:
    """A value that owns its memory goes when nobody holds it, and takes the memory along."""
    table, memory = ValueTable(), storage()
    value = LiveValue(3, 400)
    table.follow(value, memory)
    table.own(value, memory)
    freed = weakref.ref(memory)
    assert table.find(memory) is value
    del memory
    assert freed() is not None
    assert value.live() is freed()
    del value
    assert freed() is None


def test_dropped_storage_is_not_found() -> None:
    """A storage about to be written holds its value no more; a new one may be followed on it."""
    table, memory, old, new = ValueTable(), storage(), LiveValue(1, 400), LiveValue(1, 400)
    table.follow(old, memory)
    table.drop(memory)
    assert table.find(memory) is None
    table.follow(new, memory)
    assert table.find(memory) is new
    table.drop(storage())


def test_closed_table_lets_go() -> None:
    """At the end of the step values that nobody else needs go, others stay."""
    table, first, second = ValueTable(), storage(), storage()
    unneeded = weakref.ref(value := LiveValue(1, 400))
    table.follow(value, first)
    del value
    needed = LiveValue(2, 400)
    table.follow(needed, second)
    table.own(needed, second)
    table.close()
    gc.collect()
    assert unneeded() is None
    assert needed.live() is second
