"""What autograd holds in place of a saved tensor: no graph, no memory of its own, the same version counter."""

from __future__ import annotations

import weakref

import torch

from lightning_offload.runtime.values import LiveValue, witness_of


def test_witness_shares_the_version_counter_and_no_memory() -> None:
    """WriteBarrier to the tensor show in the witness, which keeps no byte of it alive."""
    tensor = torch.ones(1000)
    witness = witness_of(tensor)
    assert (witness.numel(), witness._version) == (0, tensor._version)
    tensor.add_(1.0)
    tensor[3:].zero_()
    assert witness._version == tensor._version == 2
    memory = weakref.ref(tensor.untyped_storage())
    del tensor
    assert memory() is None


def test_witness_refers_to_no_graph() -> None:
    """The witness of a result does not hold its ``grad_fn``: that would be a cycle no collector sees."""
    leaf = torch.ones(10, requires_grad=True)
    saved = leaf.exp()  # saved by its own node, so that the node and this memory live together
    memory = weakref.ref(saved.untyped_storage())
    witness = witness_of(saved)
    assert witness.grad_fn is None
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


def test_new_value_has_no_source() -> None:
    """A value that nothing provides is not live; memory, a host copy or a call makes it available."""
    value = LiveValue(1, 40)
    assert value.live() is None
    assert not value.has_source
    value.storage = torch.ones(10).untyped_storage()
    assert value.has_source
    assert value.live() is value.storage
