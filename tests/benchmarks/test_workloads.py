"""The benchmarks' training steps."""

from __future__ import annotations

import torch

from benchmarks import workloads

CPU = torch.device("cpu")


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
