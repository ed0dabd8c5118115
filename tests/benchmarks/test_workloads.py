"""The benchmarks' training steps."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from benchmarks import workloads

CPU = torch.device("cpu")


def test_step_leaves_fresh_gradients():
    """Every step ends with the gradients of that step alone."""
    workload = workloads.many_ops(CPU, num_elements=8, quick=True)
    workload.step()
    first = [parameter.grad.clone() for parameter in workload.model.parameters()]
    workload.step(nullcontext)
    assert all(torch.equal(a, p.grad) for a, p in zip(first, workload.model.parameters(), strict=True))


def test_copies_are_equal():
    """Two copies of a workload start from the same weights and train on the same batch."""
    for make in (workloads.demo_resnet, workloads.gpt2):
        a, b = make(CPU, quick=True), make(CPU, quick=True)
        states = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
        assert all(torch.equal(x, y) for x, y in states)
        assert all(torch.equal(x, y) for x, y in zip(a.batch, b.batch, strict=True))


def test_checkpointed_blocks_give_the_same_gradients():
    """The peer computes what the plain model computes."""
    plain = workloads.demo_resnet(CPU, quick=True)
    peer = workloads.demo_resnet(CPU, quick=True, checkpointed=True)
    plain.step()
    peer.step()
    gradients = zip(plain.model.parameters(), peer.model.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in gradients)
    assert peer.config == plain.config


def test_ops_are_counted_in_forward_and_backward():
    """A chain of n links has at least two ops per link forward and as many backward."""
    workload = workloads.many_ops(CPU, num_elements=8, quick=True)
    assert workloads.count_ops(workload) >= 4 * workload.config["length"]


def test_recurrence_has_as_many_ops_as_it_says():
    """They are 17,000, give or take what another version of torch makes of a cell."""
    workload = workloads.recurrence(CPU, quick=False)
    assert 16_000 < workloads.count_ops(workload) < 18_000
    assert workloads.count_ops(workloads.recurrence(CPU, quick=True)) < 300


def test_language_model_is_gpt2_with_twelve_layers():
    """The full workload has the published number of parameters."""
    with torch.device("meta"):
        workload = workloads.gpt2(torch.device("meta"), quick=False)
    assert sum(parameter.numel() for parameter in workload.model.parameters()) == 124_439_808
    assert workload.config["num_layers"] == 12
    assert workload.batch[0].shape == (4, 256)
