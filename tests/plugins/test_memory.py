"""The plugin's surface: switches, reports, plans from outside, host memory, state."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer
from torch.testing._internal.two_tensor import TwoTensor

from lightning_offload import MemoryPlugin
from lightning_offload.errors import BudgetError, PlanError, UnsupportedError
from lightning_offload.graph import MemoryPlan, StepGraph
from lightning_offload.plugins import hardware, persistent, steps
from tests.plugins.training import MIB, attached, middle_budget, net, phases_of, report_of, rows, train_step


def state_of(budget: int | None = None, policy: str = "auto") -> dict[str, Any]:
    """The state of a plugin that has planned a step."""
    model, batch = net(), rows()
    with attached(model, budget=budget, policy=policy) as memory:
        for _ in range(5):
            train_step(model, batch, memory)
        return memory.state_dict()


def plan_in(state: dict[str, Any]) -> MemoryPlan:
    """The plan in a state."""
    (row,) = state["plans"]
    return MemoryPlan.from_json(row["plan"])


def test_report_before_any_step() -> None:
    """Nothing is known, and nothing is guessed."""
    for memory in (MemoryPlugin(), MemoryPlugin("4MiB", enabled=False)):
        report = memory.report()
        assert (report.phase, report.num_steps, report.policy) == ("idle", 0, "auto")
        assert report.floor_bytes is None
        assert report.predicted_peak_bytes is None
        assert report.measured_step_seconds is None
        assert (report.kept_bytes, report.swapped_bytes, report.recomputed_bytes) == (0, 0, 0)
    assert MemoryPlugin("4MiB").report().budget_bytes == 4 * MIB
    assert MemoryPlugin().state_dict()["plans"] == []


@pytest.mark.filterwarnings("ignore:memory.step.. has no effect, because the plugin was not attached")
@pytest.mark.parametrize("how", ["keyword", "environment", "not attached", "detached"])
def test_switched_off_plugin_does_nothing(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hooks, no mode, no threads, no count; training is plain."""
    if how == "environment":
        monkeypatch.setenv("LIGHTNING_OFFLOAD", "0")
    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    model, batch = net(), rows(32)
    memory = MemoryPlugin(budget="1MiB", enabled=how != "keyword", module=model)
    if how != "not attached":
        memory.attach(model)
    if how == "detached":
        memory.detach()
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks
    for _ in range(4):
        with memory.step(batch):
            assert torch._C._len_torch_dispatch_stack() == 0
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            loss = model(batch).sum()
        memory.backward(loss)
    assert (memory.report().num_steps, memory.report().phase) == (0, "idle")
    memory.detach()


def test_detach_takes_everything_off_and_may_be_repeated() -> None:
    """Hooks and threads are gone after the first; plans are remembered for the next attach."""
    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    model, batch = net(), rows()
    memory = MemoryPlugin(policy="all-swap")
    memory.detach()
    memory.attach(model)
    memory.attach(model)
    for _ in range(4):
        train_step(model, batch, memory)
    for _ in range(2):
        memory.detach()
        assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks
        assert not any(thread.name.startswith("lightning-offload") for thread in threading.enumerate())
    expected = train_step(model, batch)
    with memory:
        assert train_step(model, batch, memory) == expected
        assert memory.report().phase == "planned"


def test_nested_step_is_part_of_the_outer_one() -> None:
    """A step inside a step counts once."""
    model, batch = net(), rows(32)
    with attached(model, policy="all-swap") as memory:
        with memory.step(batch), memory.step(batch[:3]):
            model(batch).sum().backward()
        assert memory.report().num_steps == 1


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_report_after_detach(num_steps: int) -> None:
    """What is known can be read after the plugin was detached, in whichever phase it was."""
    model, batch = net(), rows(64)
    with attached(model, policy="all-swap") as memory:
        for _ in range(num_steps):
            train_step(model, batch, memory)
    report = memory.report()
    assert report.num_steps == num_steps
    assert report.measured_peak_bytes is not None


def test_keep_patterns_keep_what_they_name() -> None:
    """Saved tensors of the named modules stay; the floor rises by them; other patterns change nothing."""
    model, batch = net(), rows()
    free = report_of(model, batch, policy="all-swap")
    kept = report_of(model, batch, policy="all-swap", keep=["blocks.3.*", "blocks.5.1"])
    one = 512 * 256 * 4
    assert free.kept_bytes == 0
    assert kept.kept_bytes == 3 * one or kept.kept_bytes == 4 * one
    assert kept.swapped_bytes == free.swapped_bytes - kept.kept_bytes
    assert (kept.floor_bytes or 0) > (free.floor_bytes or 0)
    with pytest.warns(UserWarning, match=r"keep=\['nothing\*'\] matches no module"):
        assert report_of(model, batch, policy="all-swap", keep="nothing*").kept_bytes == 0
    everything = report_of(model, batch, policy="all-swap", keep="*")
    assert everything.swapped_bytes == 0


def test_host_budget_that_is_too_small_keeps_tensors_on_the_device() -> None:
    """Without a disk steps are exact, and host memory stays within its budget."""
    model, batch = net(), rows()
    expected = train_step(model, batch)
    with attached(model, policy="all-swap", tier="host", host_budget="2MiB") as memory:
        for _ in range(5):
            assert train_step(model, batch, memory) == expected
        report = memory.report()
    assert 0 < report.host_peak_bytes <= report.host_bytes <= 2 * MIB
    assert (report.disk_bytes, report.disk_peak_bytes, report.pinned_bytes) == (0, 0, 0)


def test_report_of_the_tiers(tmp_path: Path) -> None:
    """Used and mapped bytes of each tier, and what is mapped in vain: nearly nothing."""
    model, batch = net(), rows()
    host = report_of(model, batch, policy="all-swap", tier="host")
    assert host.host_peak_bytes == host.swapped_bytes > 0
    assert host.host_bytes <= 1.05 * host.host_peak_bytes
    assert host.host_waste is not None
    assert 1 <= host.host_waste <= 1.05
    assert host.disk_bytes == 0
    disk = report_of(model, batch, policy="all-swap", tier="disk", spill_dir=tmp_path)
    assert disk.swapped_bytes == host.swapped_bytes
    assert disk.disk_peak_bytes == disk.swapped_bytes <= disk.disk_bytes
    assert (disk.host_bytes, disk.host_peak_bytes, disk.host_waste) == (0, 0, None)


def test_fraction_of_a_cpu_is_refused() -> None:
    """A CPU has no memory of its own to take a fraction of; the error comes with the first step."""
    model, batch = net(), rows(32)
    with attached(model, budget=0.5) as memory, pytest.raises(BudgetError, match="fraction"), memory.step(batch):
        pytest.fail("the step must not run")


# ---- plans from outside


@pytest.mark.usefixtures("in_python")
def test_plan_from_a_file_is_executed(tmp_path: Path) -> None:
    """A plan, or the path of its file, is used as it is in place of planning."""
    model, batch = net(), rows()
    plan = plan_in(state_of(policy="all-swap"))
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    expected = train_step(model, batch)
    for given in (plan, path, str(path)):
        with attached(model, plan=given) as memory:
            for _ in range(5):
                assert train_step(model, batch, memory) == expected
            assert memory.report().swapped_bytes == plan.bytes_of(_graph_of(memory), "swap") > 0
            assert plan_in(memory.state_dict()) == plan


def _graph_of(memory: MemoryPlugin) -> StepGraph:
    (row,) = memory.state_dict()["plans"]
    return StepGraph.from_json(row["graph"])


def test_plan_of_another_model_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """It is noticed when the step has been recorded, before a step runs under it; the step is planned here instead."""
    plan, batch = plan_in(state_of(policy="all-swap")), rows()
    other = torch.nn.Sequential(torch.nn.Linear(256, 8), torch.nn.Sigmoid())
    expected = train_step(other, batch)
    with attached(other, plan=plan, policy="all-swap") as memory, caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert train_step(other, batch, memory) == expected
        report = memory.report()
    assert report.phase == "planned"
    assert report.planned is not None
    assert report.planned.plan.graph_digest != plan.graph_digest
    (warning,) = (record.getMessage() for record in caplog.records if "for another step" in record.getMessage())
    assert plan.graph_digest in warning


# ---- state


@pytest.mark.parametrize("policy", ["auto", "all-recompute"])
def test_state_round_trip_starts_planned(policy: str) -> None:
    """A restored plugin runs the same plan from its first step on, within the budget, without recording."""
    model, batch = net(), rows()
    budget = middle_budget(model, batch) if policy == "auto" else None
    state = json.loads(json.dumps(state_of(budget, policy)))
    expected = train_step(model, batch)
    memory = MemoryPlugin(budget=budget, policy=policy)
    memory.load_state_dict(state)
    assert memory.state_dict() == state
    with memory:
        memory.attach(model)
        for _ in range(4):
            assert train_step(model, batch, memory) == expected
            report = memory.report()
            assert report.phase != "recording"
            assert budget is None or (report.measured_peak_bytes or 0) <= budget
        assert report.phase == "planned"
        assert report.swapped_bytes + report.recomputed_bytes > 0


def test_state_at_the_floor_is_restored() -> None:
    """A plan at the smallest feasible budget is feasible after a restart, module known or not."""
    model, batch = net(), rows()
    floor = report_of(model, batch, policy="all-swap").floor_bytes
    assert floor is not None
    state = state_of(floor)
    for known in (True, False):
        memory = MemoryPlugin(budget=floor)
        memory.load_state_dict(state)
        with memory:
            memory.attach(model if known else None)
            for _ in range(3):
                train_step(model, batch, memory)
            assert (memory.report().measured_peak_bytes or 0) <= floor


def test_state_for_other_settings_is_planned_anew() -> None:
    """Graphs serve any budget and policy; a plan made for others is not used."""
    model, batch = net(), rows()
    memory = MemoryPlugin(policy="keep-all", budget="64MiB")
    memory.load_state_dict(state_of(policy="all-swap"))
    with memory:
        memory.attach(model)
        train_step(model, batch, memory)
        assert memory.report().phase == "verifying"
        assert memory.report().swapped_bytes == 0
        assert memory.report().policy == "keep-all"


def _without(key: str) -> Any:
    def change(state: dict[str, Any]) -> Any:
        del state["plans"][0][key]
        return state

    return change


def _with(key: str, item: Any) -> Any:
    def change(state: dict[str, Any]) -> Any:
        state["plans"][0][key] = item
        return state

    return change


MALFORMED: dict[str, Any] = {
    "None": lambda state: None,
    "list": lambda state: [],
    "empty": lambda state: {},
    "other schema": lambda state: {**state, "schema": 99},
    "no plans": lambda state: {"schema": state["schema"]},
    "plans are a number": lambda state: {**state, "plans": 3},
    "plans are None": lambda state: {**state, "plans": None},
    "row is None": lambda state: {**state, "plans": [None]},
    "row is text": lambda state: {**state, "plans": ["x"]},
    "no graph": _without("graph"),
    "no signature": _without("signature"),
    "graph is None": _with("graph", None),
    "graph is a dict": _with("graph", {}),
    "graph is no JSON": _with("graph", "{"),
    "plan is None": _with("plan", None),
    "plan is a graph": lambda state: _with("plan", state["plans"][0]["graph"])(state),
    "signature is a list": _with("signature", ["x"]),
    "signature is a number": _with("signature", 3),
}


@pytest.fixture(scope="module")
def good_state() -> str:
    """A state as JSON."""
    return json.dumps(state_of(policy="all-swap"))


def test_malformed_state_is_a_plan_error(good_state: str, subtests: pytest.Subtests) -> None:
    """Whatever is wrong with a state, it ends in a PlanError and leaves the plugin as it was."""
    for kind in MALFORMED:
        with subtests.test(kind=kind):
            memory = MemoryPlugin(policy="all-swap")
            with pytest.raises(PlanError):
                memory.load_state_dict(MALFORMED[kind](json.loads(good_state)))
            assert memory.state_dict()["plans"] == []


def test_half_good_state_changes_nothing(good_state: str) -> None:
    """If a later row is malformed, none is taken over."""
    state = json.loads(good_state)
    state["plans"].append({**state["plans"][0], "signature": "other", "graph": "{"})
    memory = MemoryPlugin(policy="all-swap")
    with pytest.raises(PlanError):
        memory.load_state_dict(state)
    assert memory.state_dict()["plans"] == []


def test_plan_of_another_graph_in_a_state_is_a_plan_error(good_state: str) -> None:
    """A plan that was mixed up with another graph is refused on loading."""
    state = json.loads(good_state)
    plan = json.loads(state["plans"][0]["plan"])
    plan["graph_digest"] = "0" * 32
    state["plans"][0]["plan"] = json.dumps(plan)
    with pytest.raises(PlanError, match="another model"):
        MemoryPlugin(policy="all-swap").load_state_dict(state)


# ---- unusual steps


def test_wrapping_tensors_do_not_leave_the_plan() -> None:
    """Steps that save tensor subclasses are planned like others, and run under a plan that keeps everything."""
    x = torch.linspace(-1, 1, 64 * 1024).requires_grad_()
    other = TwoTensor(torch.ones(64 * 1024), torch.ones(64 * 1024))

    def step() -> None:
        y = x.sin().exp()
        (y * other).sum()
        y.square().mean().backward()
        x.grad = None

    with MemoryPlugin(policy="keep-all", budget="64MiB") as memory:
        phases = []
        for _ in range(7):
            with memory.step():
                step()
            phases.append(memory.report().phase)
    assert phases == ["recording", "verifying", "measuring"] + ["planned"] * 4


def test_steps_that_run_plainly_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a budget, and with a plan that keeps everything, nobody looks at what is on the device."""
    look, num_looks = persistent.live_storages, 0

    def count(device: torch.device) -> Any:
        nonlocal num_looks
        num_looks += 1
        return look(device)

    monkeypatch.setattr(persistent, "live_storages", count)
    model, batch = net(), rows(8)
    with attached(model, policy="keep-all") as memory:
        train_step(model, batch, memory)
        train_step(model, batch, memory)
        assert num_looks > 0
        num_looks = 0
        for _ in range(4):
            train_step(model, batch, memory)
    assert num_looks == 0


class SavesElsewhere(torch.autograd.Function):
    """Saves a tensor of another device, as attention kernels save their seeds on the host."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, torch.empty(3, device="meta"))
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.saved_tensors[0].cos()


@pytest.mark.parametrize(("policy", "budget"), [("keep-all", "64MiB"), ("all-swap", None), ("all-recompute", None)])
def test_tensors_of_another_device_do_not_leave_the_plan(policy: str, budget: str | None) -> None:
    """What is saved on another device is kept, and its steps are planned like others."""
    x = torch.linspace(-1, 1, 64 * 1024).requires_grad_()
    with MemoryPlugin(policy=policy, budget=budget, device="cpu") as memory:
        phases = []
        for _ in range(7):
            with memory.step():
                SavesElsewhere.apply(x.exp()).square().mean().backward()
            x.grad = None
            phases.append(memory.report().phase)
    assert phases == ["recording", "verifying", "measuring"] + ["planned"] * 4


@pytest.mark.parametrize("copy_it", [copy.deepcopy, pickle.dumps])
def test_a_plugin_is_not_copied(copy_it: Callable[[object], object]) -> None:
    """It holds what belongs to its process; the error says how to hand its plans over."""
    with pytest.raises(TypeError, match="load_state_dict"):
        copy_it(MemoryPlugin("1GiB"))


def test_gradients_made_before_the_first_saved_tensor_is_read_are_new() -> None:
    """That of a bias added last is there before any unpack, and is none of an earlier step's all the same."""
    weight, bias = (torch.ones(64, requires_grad=True) for _ in range(2))
    with MemoryPlugin(device="cpu", policy="all-swap") as memory:
        for _ in range(3):
            weight.grad = bias.grad = None
            with memory.step():
                (torch.arange(64.0).sin() * weight + bias).sum().backward()
        memory.report()
        assert memory._steps.cache.entry.phase == "planned"
        assert memory._steps.cache.entry.baseline.gradients.most_bytes == 0


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_backward_of_another_model_between_steps_is_not_part_of_one(budget: str | None) -> None:
    """A step whose own backward ran inside it is over; what others do before the next one is not recorded."""
    model, other, batch = net(), net(), rows()
    graphs = []
    for has_other in (False, True):
        with MemoryPlugin(budget, policy="auto" if budget else "all-swap", device="cpu", module=model) as memory:
            for _ in range(5):
                with memory.step(batch):
                    model(batch).sum().backward()
                if has_other:
                    other(batch).sum().backward()
                model.zero_grad()
            memory.report()
            assert memory._steps.cache.entry.phase == "planned"
            graph = memory._steps.cache.entry.graph
            assert graph is not None
            graphs.append(graph.digest())
    assert graphs[0] == graphs[1]


def test_forget() -> None:
    """Kinds of step that are not to be kept are as never met: out of the state and the report, and recorded anew."""
    model = net()
    with attached(model, policy="all-swap") as memory:
        phases_of(memory, model, rows(64), 4)
        known, plans = memory.step_kinds, memory.state_dict()
        assert len(known) == 1
        phases_of(memory, model, rows(128), 2)
        assert len(memory.step_kinds) == 2

        memory.forget(keep=known)
        assert memory.step_kinds == known
        assert memory.state_dict() == plans
        report = memory.report()
        assert report.phase == "idle"
        assert report.planned is not None  # of the kind that was kept
        assert not report.others
        assert phases_of(memory, model, rows(64), 1) == ["planned"]
        assert phases_of(memory, model, rows(128), 3) == ["recording", "verifying", "measuring"]

        memory.forget()
        assert memory.step_kinds == frozenset()
        with memory.step(rows(64)), pytest.raises(UnsupportedError, match="within a step"):
            memory.forget()


def test_attached_again_it_has_the_budget_of_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one of its own that is what is free: where another process has taken much, plans are made anew."""
    model, batch, free = net(), rows(), [0]
    for user in (hardware, steps):
        monkeypatch.setattr(user, "budget_bytes_on", lambda *_: free[0])
    free[0] = 64 * MIB
    known = report_of(model, batch, policy="all-swap")
    assert known.floor_bytes is not None
    assert known.plain_peak_bytes is not None
    memory = MemoryPlugin(module=model)
    budgets = (known.plain_peak_bytes + MIB, known.plain_peak_bytes + MIB - 1024, known.floor_bytes + MIB)
    expected = (budgets[0], budgets[0], budgets[2])
    for budget, counts in zip(budgets, expected, strict=True):
        free[0] = budget
        with memory:
            for _ in range(4):
                train_step(model, batch, memory)
            report = memory.report()
        assert report.budget_bytes == counts
        assert report.predicted_peak_bytes is not None
        assert report.predicted_peak_bytes <= counts
    assert report.replans.get("hardware", 0) <= 1
