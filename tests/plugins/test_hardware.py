"""What plans are made for: tiers and links as they are, and when plans are made again."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_offload.errors import SpillError
from lightning_offload.graph.device_spec import DeviceSpec
from lightning_offload.graph.host_layout import Layout
from lightning_offload.graph.memory_plan import Decision, MemoryPlan
from lightning_offload.plugins import hardware as module
from lightning_offload.plugins import lifecycle
from lightning_offload.plugins.hardware import Hardware
from lightning_offload.plugins.plan_entry import PlanEntry
from lightning_offload.plugins.plan_source import Recorded
from lightning_offload.plugins.settings import check_settings
from lightning_offload.runtime.cpu_lanes import HANDOVER_SECONDS, SMALL_BYTES
from lightning_offload.runtime.lanes import LaneTimes
from lightning_offload.runtime.program import compile_plan
from tests.plugins.training import MIB, attached, net, rows, train_step

CPU = torch.device("cpu")
SPEC = DeviceSpec(
    name="cpu", kind="cpu", memory_bytes=None, d2h_bytes_per_second=1000.0, h2d_bytes_per_second=500.0,
    copy_interference=0.0, overhead_seconds=0.0, disk_write_bytes_per_second=100.0, disk_read_bytes_per_second=50.0,
)  # fmt: skip
FREE = 100 * MIB


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A host with 100 MiB, whose links are known; says for each measurement whether the disk was part of it."""
    asked: list[bool] = []

    def measure_spec(device: torch.device, tiers: Any, *, with_disk: bool) -> DeviceSpec:
        asked.append(with_disk)
        without = {"disk_write_bytes_per_second": 0.0, "disk_read_bytes_per_second": 0.0}
        return SPEC if with_disk else dataclasses.replace(SPEC, **without)

    monkeypatch.setattr(module, "measure_spec", measure_spec)
    monkeypatch.setattr(module, "available_bytes", lambda: FREE)
    return asked


def made(tier: str = "auto", **keywords: Any) -> Hardware:
    """The hardware under some settings."""
    defaults: dict[str, Any] = {
        "budget": None, "policy": "auto", "host_budget": None, "spill_dir": None, "plan": None, "keep": (),
        "enabled": True, "verify": "first",
    }  # fmt: skip
    return Hardware(CPU, check_settings(tier=tier, **{**defaults, **keywords}))


def layout(**num_bytes: int) -> Layout:
    """A layout that takes this much of each tier."""
    return Layout(offsets={}, tier_bytes=num_bytes)  # type: ignore[arg-type]


# ---- what plans are made for


def test_enough_host_memory_sets_no_limit(measured: list[bool]) -> None:
    """Where all that could be swapped has room, there is no limit and no disk, which is not even measured."""
    for tier in ("auto", "host"):
        spec = made(tier).planning_spec(saved_bytes=80 * MIB)
        assert spec.host_memory_bytes is None
        assert not spec.has_disk
    assert measured == [False, False]


def test_links_count_with_0_8_of_what_was_measured() -> None:
    """Every rate is derated; nothing else is. A host that computes hands larger copies over."""
    spec = made("disk").planning_spec(saved_bytes=MIB)
    assert (spec.handover_bytes, spec.handover_seconds) == (SMALL_BYTES, HANDOVER_SECONDS)
    rates = (spec.d2h_bytes_per_second, spec.h2d_bytes_per_second)
    assert rates == pytest.approx((800.0, 400.0))
    assert (spec.disk_write_bytes_per_second, spec.disk_read_bytes_per_second) == pytest.approx((80.0, 40.0))
    spec = dataclasses.replace(spec, host_memory_bytes=None, handover_bytes=None, handover_seconds=0.0)
    assert spec == SPEC.derated(0.8)


def test_little_host_memory_without_a_disk(measured: list[bool]) -> None:
    """The limit is most of what is free, or what was asked for; there is no disk."""
    for keywords, limit in (({}, 80 * MIB), ({"host_budget": "8MiB"}, 8 * MIB)):
        spec = made("host", **keywords).planning_spec(saved_bytes=81 * MIB)
        assert spec.host_memory_bytes == limit
        assert not spec.has_disk
    assert measured == [False, False]


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each counts on its share of what is free; a limit that was asked for is every rank's own."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for keywords, limit in (({}, 10 * MIB), ({"host_budget": "8MiB"}, 8 * MIB)):
        assert made("host", **keywords).planning_spec(saved_bytes=81 * MIB).host_memory_bytes == limit


def test_little_host_memory_and_a_disk(measured: list[bool]) -> None:
    """The disk is measured when it is first needed, and not again."""
    found = made(host_budget="8MiB")
    assert not found.planning_spec(saved_bytes=8 * MIB).has_disk
    spec = found.planning_spec(saved_bytes=8 * MIB + 1)
    assert spec.host_memory_bytes == 8 * MIB
    assert spec.has_disk
    found.planning_spec(saved_bytes=9 * MIB)
    assert measured == [False, True]


def test_disk_alone(measured: list[bool]) -> None:
    """With tier="disk" there is no host memory, however much is free, as soon as anything is swapped."""
    spec = made("disk").planning_spec(saved_bytes=1)
    assert spec.host_memory_bytes == 0
    assert spec.has_disk
    assert measured == [True]


def test_host_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where free memory is not known there is no limit."""
    monkeypatch.setattr(module, "available_bytes", lambda: None)
    assert made().planning_spec(saved_bytes=1 << 50).host_memory_bytes is None


def test_what_the_host_refused_is_not_counted_on() -> None:
    """Then there is what is mapped, and no more."""
    found = made("host")
    assert found.tiers.host.prepare(5 * MIB)
    found.tiers.host.is_refused = True
    assert found.planning_spec(saved_bytes=50 * MIB).host_memory_bytes == 5 * MIB


# ---- what makes plans void


def test_version_grows_with_each_refusal() -> None:
    """Once for each: page locks, host memory, the disk; not without a refusal."""
    found = made(host_budget="8MiB")
    assert found.tiers.disk is not None
    found.refresh()
    assert found.version == 0
    found.tiers.host.pinning.is_refused = True
    found.refresh()
    found.refresh()
    assert found.version == 1
    found.tiers.host.is_refused = True
    found.refresh()
    assert found.version == 2
    found.tiers.disk.fail(OSError("broken"))
    found.refresh()
    found.refresh()
    assert found.version == 3
    assert not found.planning_spec(saved_bytes=9 * MIB).has_disk


def test_links_are_measured_again_without_page_locks(measured: list[bool]) -> None:
    """Once, since copies are slower then."""
    found = made("host")
    found.planning_spec(MIB)
    found.tiers.host.pinning.is_refused = True
    found.planning_spec(MIB)
    found.planning_spec(MIB)
    assert measured == [False, False]


def test_disk_that_cannot_be_measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is given up with a warning where there is host memory, and an error where there is none."""
    measure = module.measure_spec

    def refuse(device: torch.device, tiers: Any, *, with_disk: bool) -> DeviceSpec:
        if with_disk:
            raise SpillError("no room")
        return measure(device, tiers, with_disk=False)

    monkeypatch.setattr(module, "measure_spec", refuse)
    found = made(host_budget="8MiB")
    spec = found.planning_spec(saved_bytes=9 * MIB)
    assert not spec.has_disk
    assert spec.host_memory_bytes == 8 * MIB
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    with pytest.raises(SpillError, match="no room"):
        made("disk").planning_spec(saved_bytes=9 * MIB)


def test_given_plan_without_its_disk(caplog: pytest.LogCaptureFixture) -> None:
    """It swaps to host memory instead, and says so once; where there is a disk it stays as it is."""
    decisions = tuple(Decision(storage=i, action="swap", tier=tier) for i, tier in enumerate(("host", "disk")))
    given = MemoryPlan(
        graph_digest="", policy="auto", budget_bytes=None, decisions=decisions, predicted_peak_bytes=1,
        predicted_step_seconds=1.0, plain_peak_bytes=1, plain_step_seconds=1.0, floor_bytes=1, floor_op="",
        bound_seconds=1.0,
    )  # fmt: skip
    hardware = made("host")
    for _ in range(2):
        assert [d.tier for d in hardware.adapted(given).decisions] == ["host", "host"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert made("auto").adapted(given) is given


def test_room_for_every_kind_of_step(tmp_path: Path) -> None:
    """Each tier has room for the largest wish of any kind; what is had is not asked for again."""
    found = made(host_budget="8MiB", spill_dir=tmp_path)
    kinds = [Recorded(), Recorded()]
    assert found.prepare(kinds[0], layout(host=2 * MIB, disk=3 * MIB))
    assert found.prepare(kinds[1], layout(host=MIB))
    use = found.use()
    assert (use.host_bytes, use.disk_bytes, use.pinned_bytes) == (2 * MIB, 3 * MIB, 0)
    assert (use.host_peak_bytes, use.disk_peak_bytes, found.version) == (0, 0, 0)
    found.tiers.close()


def test_room_of_a_kind_of_step_that_is_gone_is_given_back(tmp_path: Path) -> None:
    """Those that are left ask for what they did, and there is no more."""
    found = made(host_budget="64MiB", spill_dir=tmp_path)
    kinds = [Recorded(), Recorded()]
    assert found.prepare(kinds[1], layout(host=MIB, disk=MIB))
    assert found.prepare(kinds[0], layout(host=32 * MIB, disk=3 * MIB))
    assert (found.use().host_bytes, found.use().disk_bytes) == (32 * MIB, 3 * MIB)
    del kinds[0]
    assert found.prepare(kinds[0], layout(host=MIB, disk=MIB))
    assert (found.use().host_bytes, found.use().disk_bytes) == (MIB, MIB)
    found.tiers.close()


def test_less_room_than_planned_makes_plans_void() -> None:
    """The host's limit, say, is smaller than what a given plan wants."""
    found = made("host", host_budget="2MiB")
    assert not found.prepare(Recorded(), layout(host=3 * MIB))
    assert found.version == 1


# ---- what is learned of links


def slow(share: float) -> dict[Any, LaneTimes]:
    """Large transfers from the device, at a share of the known rate."""
    num_bytes = 1 << 30
    return {"host": LaneTimes(out_bytes=num_bytes, out_seconds=num_bytes / (share * SPEC.d2h_bytes_per_second))}


def test_slower_links_are_noticed() -> None:
    """A link at half its rate is slower than planned; one at its rate, or faster, is not, nor is an unknown one."""
    found = made("host")
    found.observe(slow(0.5))
    spec = found.planning_spec(MIB)
    assert found.links_since(None) != "slower"
    for share in (1.0, 3.0):
        found.observe(slow(share))
        assert found.links_since(spec) != "slower"
    found.observe(slow(0.5))
    assert found.links_since(spec) == "slower"
    assert found.planning_spec(MIB).d2h_bytes_per_second < spec.d2h_bytes_per_second
    assert found.links_since(found.planning_spec(MIB)) != "slower"
    assert made("host").links_since(spec) != "slower", "nothing is known yet"


def test_faster_links_are_noticed_when_seen_twice() -> None:
    """A link that is a little faster is not worth a word; a slower one beside it is what counts."""
    found = made("host")
    spec = found.planning_spec(MIB)
    assert found.links_since(None) != "faster"
    for share in (1.3, 1.05, 1.3):
        found.observe(slow(share))
        assert found.links_since(spec) != "faster"
    found.observe(slow(1.3))
    assert found.links_since(spec) == "faster"
    assert found.links_since(spec) != "slower"
    now = found.planning_spec(MIB)
    assert now.d2h_bytes_per_second == pytest.approx(1.3 * spec.d2h_bytes_per_second)
    assert found.links_since(now) != "faster"
    num_bytes = 1 << 30
    back = LaneTimes(in_bytes=num_bytes, in_seconds=2 * num_bytes / SPEC.h2d_bytes_per_second)
    found.observe({"host": back})
    assert found.links_since(spec) == "slower"
    assert found.links_since(spec) != "faster"


def planned_kind() -> PlanEntry:
    """A kind of step under its final plan."""
    model, batch = net(), rows()
    # Real copies are much faster than the links of these tests, which is not to be noticed.
    with mock.patch.object(Hardware, "observe"), attached(model, policy="all-swap", tier="host") as memory:
        for _ in range(5):
            train_step(model, batch, memory)
        memory.report()
        (kind,) = memory._steps.cache.entries.values()
    assert kind.program is not None
    return kind


def test_unforeseen_stalls_plan_again() -> None:
    """If a link is why; not for the stalls that were planned, and not for ever."""
    kind = planned_kind()
    plan, program, graph = kind.plan, kind.program, kind.graph
    assert plan is not None
    step = plan.predicted_step_seconds
    much = 1.1 * plan.predicted_stall_seconds + 0.2 * step
    lifecycle.compare(kind, step + much, much)
    lifecycle.compare(kind, step, plan.predicted_stall_seconds, links="slower")
    assert kind.program is program
    for _ in range(3):
        lifecycle.compare(kind, step + much, much, links="slower")
        assert kind.program is None
        kind.program = program
    lifecycle.compare(kind, step + 10 * much, 10 * much, links="slower")
    assert kind.program is program
    assert kind.graph is graph


def test_a_faster_link_plans_again_where_the_plan_costs_time() -> None:
    """A plan that is as fast as the plain step has nothing to gain."""
    kind = planned_kind()
    assert kind.graph is not None
    assert kind.plan is not None
    for factor, is_planned_again in ((1.01, False), (1.05, True)):
        step = factor * kind.plan.plain_step_seconds
        plan = dataclasses.replace(kind.plan, predicted_step_seconds=step, predicted_stall_seconds=0.0)
        program = kind.program = compile_plan(kind.graph, plan)
        lifecycle.compare(kind, step, 0.0, links="faster")
        assert (kind.program is None) == is_planned_again
        kind.program = program


def test_slower_compute_plans_again_when_seen_twice() -> None:
    """Durations are scaled by the quicker one of two steps in a row; a plan made between them forgets the first."""
    kind = planned_kind()
    plan, program, graph, spec = kind.plan, kind.program, kind.graph, kind.made.spec
    assert plan is not None
    assert graph is not None
    assert spec is not None
    computing = plan.predicted_step_seconds - plan.predicted_stall_seconds
    for _ in range(3):
        lifecycle.compare(kind, 2 * computing, 0.0)
        assert kind.program is program, "a CPU's ops are what they are"
    card = dataclasses.replace(spec, kind="cuda")
    kind.made.spec = card
    lifecycle.compare(kind, 2 * computing, 0.0)
    lifecycle.make_plan(kind, card, None, "all-swap", ())
    kind.program = program
    lifecycle.compare(kind, 2 * computing, 0.0)
    lifecycle.compare(kind, computing, 0.0)
    lifecycle.compare(kind, 2 * computing + 1.0, 1.0)
    assert kind.program is program
    lifecycle.compare(kind, 1.5 * computing, 0.0)
    assert kind.program is None
    assert kind.graph is not None
    assert kind.graph.seconds == pytest.approx(1.5 * graph.seconds)
    assert kind.graph.digest() == graph.digest()


def test_faster_compute_plans_again() -> None:
    """Ops that take less back to back than one by one are scaled on an accelerator; a CPU's are what they are."""
    kind = planned_kind()
    plan, program, graph, spec = kind.plan, kind.program, kind.graph, kind.made.spec
    assert plan is not None
    assert graph is not None
    assert spec is not None
    half = (plan.predicted_step_seconds - plan.predicted_stall_seconds) / 2
    lifecycle.compare(kind, half, 0.0)
    assert kind.program is program
    kind.made.spec = dataclasses.replace(spec, kind="cuda")
    lifecycle.compare(kind, 2 * half, 0.0)
    assert kind.program is program
    lifecycle.compare(kind, half + 1.0, 1.0)
    assert kind.program is None
    assert kind.graph is not None
    found, before = (sum(op.seconds for op in g.ops) for g in (kind.graph, graph))
    assert found == pytest.approx(before / 2)
    assert kind.graph.digest() == graph.digest()


def test_running_out_of_memory_plans_for_less() -> None:
    """The next plan is made for 0.9 of the peak that did not fit, and for less if that does not fit either."""
    kind = planned_kind()
    assert kind.plan is not None
    peak = kind.plan.predicted_peak_bytes
    lifecycle.ran_out_of_memory(kind)
    assert kind.usable_bytes == int(0.9 * peak)
    assert kind.program is None
    lifecycle.ran_out_of_memory(kind)
    assert kind.usable_bytes == int(0.9 * peak), "there was no plan to learn from"
