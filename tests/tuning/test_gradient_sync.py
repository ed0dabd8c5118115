"""Gradients are not exchanged while it is not known whether a size fits on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_offload import UnsupportedError
from lightning_offload.tuning.runner import gradient_sync_off


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("static_graph", [False, True])
def test_withheld(static_graph: bool) -> None:
    """Nothing is reduced inside, in a static graph's first iteration neither; afterwards DDP is as it was."""
    reduced: list[int] = []
    model = DistributedDataParallel(nn.Linear(2, 1), static_graph=static_graph)
    # DDP refuses annotations that are text
    model.register_comm_hook(None, lambda _, bucket: reduced.append(bucket.index()) or allreduce_hook(None, bucket))
    flags = dict(vars(model))
    with gradient_sync_off():
        for _ in range(2):
            with model.no_sync():
                model(torch.ones(1, 2)).sum().backward()
            model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            model(torch.ones(1, 2))
    assert reduced == []
    assert model.require_backward_grad_sync
    names = [name for name in flags if "require" in name or "enqueued" in name]
    assert {name: vars(model)[name] for name in names} == {name: flags[name] for name in names}
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    assert reduced


@pytest.mark.usefixtures("group")
def test_synchronised_batch_norm_is_refused() -> None:
    """It talks to other ranks within a step; it is known by its type, before it has run."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))
    model.module.append(nn.SyncBatchNorm(2))
    ran = []
    model.module.register_forward_pre_hook(lambda *_: ran.append(1))
    with gradient_sync_off(), pytest.raises(UnsupportedError, match="cannot be tried with SyncBatchNorm"):
        model(torch.ones(1, 2))
    assert ran == []


@pytest.mark.usefixtures("group")
def test_flags_are_put_back_after_an_error() -> None:
    """A forward that fails leaves DDP as it was."""
    model = DistributedDataParallel(nn.Linear(2, 1))
    with gradient_sync_off(), pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert model.require_backward_grad_sync
