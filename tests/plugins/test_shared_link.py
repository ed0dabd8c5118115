"""What DDP's all-reduce leaves of the host link."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from lightning_offload.plugins.data_parallel import has_nvlink, reduced_bytes, shared_spec, under_all_reduce
from tests.graph.building import DEVICE, GraphBuilder


def step(num_bytes: int, backward_seconds: float) -> Any:
    """A step whose backward all-reduces one bucket, and whose forward reduces something else."""
    build = GraphBuilder()
    bucket, counter = build.given(num_bytes), build.given(8)
    build.op((counter,), writes=(counter,), name="c10d.allreduce_.default")
    build.phase = "backward"
    build.op((), seconds=backward_seconds)
    build.op((bucket,), writes=(bucket,), name="c10d.allreduce_.default", seconds=0.0)
    return build.build()


def test_only_what_backward_reduces_counts() -> None:
    """Collectives of forward, such as those of a synchronised norm, are not gradients."""
    assert reduced_bytes(step(400, 1.0)) == 400


def test_share_of_the_link(subtests: pytest.Subtests) -> None:
    """Copies back get what the ring leaves, at least half; 400 bytes take 4 s of a link at 100 bytes a second."""
    for num_ranks, backward_seconds, share in [
        (2, 40.0, 0.9),
        (4, 40.0, 0.85),
        (2, 6.0, 0.5),
        (2, 1.0, 0.5),
        (1, 40.0, 1.0),
    ]:
        with subtests.test(num_ranks=num_ranks):
            shared = under_all_reduce(DEVICE, step(400, backward_seconds), num_ranks)
            assert shared.h2d_bytes_per_second == pytest.approx(100.0 * share)
            assert shared.d2h_bytes_per_second == 100.0


def test_a_cpu_shares_nothing() -> None:
    """Nor does a process that is alone."""
    assert shared_spec(DEVICE, step(400, 1.0), torch.device("cpu")) is DEVICE
    assert shared_spec(DEVICE, step(400, 1.0), torch.device("cuda", 0)) is DEVICE


class NoLink(Exception):
    """What the driver raises for a link that is not there."""


@pytest.mark.parametrize(("states", "expected"), [([0, 1], True), ([0, 0], False), ([NoLink, NoLink], False)])
def test_nvlink(monkeypatch: pytest.MonkeyPatch, states: list[Any], expected: bool) -> None:
    """One active link is enough; links that are not there are none."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1234"))

    def state(handle: str, link: int) -> int:
        assert handle == "GPU-1234"
        if states[link] is NoLink:
            raise NoLink
        return int(states[link])

    nvml = types.SimpleNamespace(
        NVML_NVLINK_MAX_LINKS=len(states), NVMLError=NoLink, nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid, nvmlDeviceGetNvLinkState=state,
    )  # fmt: skip
    assert has_nvlink(torch.device("cuda", 0), nvml) is expected


def test_a_driver_that_does_not_tell() -> None:
    """Without one, plans count on no NVLink."""
    assert has_nvlink(torch.device("cuda", 0), types.SimpleNamespace()) is False
