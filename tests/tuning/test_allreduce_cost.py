"""Exchanges of gradients are withheld in trials, counted, timed, and added where they would be waited for."""

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
from lightning_offload.tuning.allreduce_cost import AllReduceCost, Exchanges, GradientSyncOff, Traffic
from lightning_offload.tuning.ranks import SingleProcess
from tests.tuning.trainings import Clock


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
    with GradientSyncOff() as withheld:
        for _ in range(2):
            with model.no_sync():
                model(torch.ones(1, 2)).sum().backward()
            model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            model(torch.ones(1, 2))
    assert reduced == []
    assert withheld.num_exchanges == 2
    assert withheld.traffic is not None
    assert (withheld.traffic.num_bytes, withheld.traffic.bucket_bytes) == (12, 25 << 20)
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
    with GradientSyncOff(), pytest.raises(UnsupportedError, match="cannot be tried with SyncBatchNorm"):
        model(torch.ones(1, 2))
    assert ran == []


@pytest.mark.usefixtures("group")
def test_flags_are_put_back_after_an_error() -> None:
    """A forward that fails leaves DDP as it was."""
    model = DistributedDataParallel(nn.Linear(2, 1))
    with GradientSyncOff(), pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert model.require_backward_grad_sync


@pytest.mark.usefixtures("group")
def test_measured() -> None:
    """One bucket is timed, and the last takes its share of that; what was timed once is known from then on."""
    clock = Clock(tick=2.0)
    exchanges = Exchanges(SingleProcess(), clock)
    traffic = Traffic(num_bytes=250, bucket_bytes=100, device=torch.device("cpu"), group=None)
    assert exchanges.of(traffic).bucket_seconds == (2.0, 2.0, 1.0)
    clock.tick = 3.0
    assert exchanges.of(traffic).bucket_seconds == (2.0, 2.0, 1.0)
    small = Traffic(num_bytes=50, bucket_bytes=100, device=torch.device("cpu"), group=None)
    assert exchanges.of(small).bucket_seconds == (3.0,)
    assert exchanges.of(None).bucket_seconds == ()


@pytest.mark.usefixtures("group")
def test_a_hook_is_timed_in_place_of_a_reduction() -> None:
    """All that it does counts, for each bucket, and nothing of it is hidden; one with a state is not called."""
    clock = Clock(tick=0.0)
    buffers: list[int] = []

    def slow(state: object, bucket: object):  # type: ignore[no-untyped-def]  # text is refused by DDP
        buffers.append(bucket.buffer().numel())  # type: ignore[attr-defined]
        clock.now += 0.1
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]

    slow.__annotations__.clear()
    model = DistributedDataParallel(nn.Linear(2, 1))
    model.register_comm_hook(None, slow)
    cost = Exchanges(SingleProcess(), clock).of(Traffic.of(model))
    assert cost.bucket_seconds == (pytest.approx(0.1),)
    assert cost.exposed_seconds(5.0) == pytest.approx(0.1)
    assert set(buffers) == {3}
    two = AllReduceCost(bucket_seconds=(0.1, 0.1), is_blocking=True)
    assert two.exposed_seconds(5.0) == pytest.approx(0.2)
    other = DistributedDataParallel(nn.Linear(2, 1))
    other.register_comm_hook(["a state"], slow)
    assert Traffic.of(other).hook is None


@pytest.mark.parametrize(
    ("buckets", "step_seconds", "exposed"),
    [
        ((), 3.0, 0.0),
        ((0.5,), 3.0, 0.5),  # ready at the end of backward
        ((0.5, 0.5), 3.0, 0.5),  # ready after 2 and 3 seconds: the first one is hidden
        ((2.0, 2.0), 3.0, 3.0),  # from 2 to 4, then to 6
        ((4.0, 0.5), 3.0, 3.5),
    ],
)
def test_exposed(buckets: tuple[float, ...], step_seconds: float, exposed: float) -> None:
    """Buckets go one after another, each once its gradients are there; what is left after backward counts."""
    assert AllReduceCost(bucket_seconds=buckets).exposed_seconds(step_seconds) == pytest.approx(exposed)
