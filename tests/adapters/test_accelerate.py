"""An Accelerate loop under `prepare_offload` leaves exactly what the plain loop leaves."""

from __future__ import annotations

import functools
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch import Tensor, nn

from lightning_offload import MemoryPlugin, PolicyError, UnsupportedError
from lightning_offload.accelerate import PLANS_FILE, prepare_offload
from lightning_offload.plugins.report import Report
from tests.adapters.nets import NUM_STEPS, assert_same, net, rows, state_of

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mixed_precision": "bf16"},
    "accumulate": {"gradient_accumulation_steps": 3},
}


def train(
    settings: dict[str, Any],
    *,
    budget: Any = None,
    policy: str | None = None,
    bare: bool = False,
    by_module: bool = False,
    **more: Any,
) -> tuple[dict[str, Tensor], Report | None]:
    """An ordinary Accelerate loop with evaluation; with a policy, under a budget."""
    accelerator = Accelerator(cpu=True, **settings)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(3)
    module = model
    model, optimizer, loader = accelerator.prepare(model, optimizer, rows())
    planned = module if by_module else model
    memory = prepare_offload(accelerator, planned, budget, policy=policy, **more) if policy else None
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            if bare:
                loss.backward()
            else:
                accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss)
        model.eval()
        with torch.no_grad():
            losses.append(model(x).sum())
        model.train()
    if memory is None:
        return state_of(model, optimizer, losses), None
    report = memory.report()
    memory.detach()
    return state_of(model, optimizer, losses), report


@functools.cache
def plainly(setting: str) -> dict[str, Tensor]:
    """What the plain loop leaves."""
    return train(SETTINGS[setting])[0]


@pytest.mark.parametrize("policy", ["auto", "all-swap", "all-recompute"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_exact(setting: str, policy: str) -> None:
    """Losses, parameters, buffers, optimizer and random state are equal, and every training forward was a step."""
    plain, budget = plainly(setting), "1GiB"
    if policy == "auto":
        _, roomy = train(SETTINGS[setting], budget=budget, policy="all-swap")
        assert roomy is not None
        assert roomy.floor_bytes is not None
        assert roomy.plain_peak_bytes is not None
        budget = f"{(roomy.floor_bytes + roomy.plain_peak_bytes) // 2}B"
    ours, report = train(SETTINGS[setting], budget=budget, policy=policy)
    assert_same(ours, plain)
    assert report is not None
    assert report.num_steps == NUM_STEPS
    assert report.phase == "planned"
    assert report.swapped_bytes + report.recomputed_bytes > 0


def test_bare_backward() -> None:
    """A loop that calls `loss.backward()` itself is equal too."""
    plain, _ = train({}, bare=True)
    ours, report = train({}, bare=True, budget="1GiB", policy="all-recompute")
    assert_same(ours, plain)
    assert report is not None
    assert report.num_steps == NUM_STEPS


@pytest.mark.parametrize("by_module", [True, False])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled(by_module: bool) -> None:
    """A model that Accelerate compiles is followed by what `prepare` returned, and by the model itself."""
    torch._dynamo.reset()
    settings = {"dynamo_backend": "aot_eager"}
    plain, _ = train(settings)
    torch._dynamo.reset()
    ours, report = train(settings, budget="1GiB", policy="all-swap", by_module=by_module)
    torch._dynamo.reset()
    assert_same(ours, plain)
    assert report is not None
    assert report.num_steps == NUM_STEPS
    assert report.swapped_bytes > 0


def test_disabled() -> None:
    """With enabled=False nothing is hooked."""
    plain, _ = train({})
    ours, report = train({}, budget="1GiB", policy="all-swap", enabled=False)
    assert_same(ours, plain)
    assert report is not None
    assert report.num_steps == 0


def adversarial(policy: str | None) -> dict[str, Tensor]:
    """Two networks; the critic runs twice before one backward, under the accelerator's autocast."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    generator, critic = accelerator.prepare(net(1), net(2))
    optimizers = [accelerator.prepare(torch.optim.Adam(m.parameters(), 1e-3)) for m in (generator, critic)]
    memory = prepare_offload(accelerator, [generator, critic], "1GiB", policy=policy) if policy else None
    torch.manual_seed(3)
    losses = []
    for _ in range(5):
        z = torch.randn(64, 32)
        with accelerator.autocast():
            fake = generator(z).repeat(1, 8)
            loss = critic(torch.randn(64, 32)).square().mean() + critic(fake.detach()).sin().mean()
        accelerator.backward(loss)
        optimizers[1].step()
        optimizers[1].zero_grad()
        accelerator.backward(critic(fake).cos().mean())
        optimizers[0].step()
        optimizers[0].zero_grad()
        losses.append(loss)
    if memory is not None:
        assert memory.report().num_steps == 10
        memory.detach()
    both = nn.ModuleList([generator, critic])
    return {**state_of(both, optimizers[0], losses), **state_of(both, optimizers[1], [])}


@pytest.mark.parametrize("policy", ["auto", "all-swap", "all-recompute"])
def test_two_models(policy: str) -> None:
    """Several models of one plugin, several forwards before one backward: still equal."""
    assert_same(adversarial(policy), adversarial(None))


def test_plans_in_checkpoints(tmp_path: Path) -> None:
    """`save_state` writes the plans, `load_state` starts with them, and checkpoints without them load too."""
    _save(tmp_path / "plain", with_plans=False)
    _save(tmp_path / "planned", with_plans=True)
    assert not (tmp_path / "plain" / PLANS_FILE).exists()
    for folder, num_plans in (("plain", 0), ("planned", 1)):
        accelerator, model, memory = _prepared()
        accelerator.load_state(str(tmp_path / folder))
        assert len(memory.state_dict()["plans"]) == num_plans
        model(torch.ones(64, 32)).sum().backward()
        assert (memory.report().phase == "recording") == (num_plans == 0)
        memory.detach()


def _prepared() -> tuple[Accelerator, nn.Module, MemoryPlugin]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(net())
    return accelerator, model, prepare_offload(accelerator, model, "1GiB", policy="all-recompute")


def _save(folder: Path, *, with_plans: bool) -> None:
    accelerator, model, memory = _prepared()
    if not with_plans:
        memory.detach()
    for _ in range(4):
        model(torch.ones(64, 32)).sum().backward()
    accelerator.save_state(str(folder))
    memory.detach()


def test_malformed_plans(tmp_path: Path) -> None:
    """Plans that cannot be read are a warning, not the end of the run."""
    _save(tmp_path / "c", with_plans=True)
    (tmp_path / "c" / PLANS_FILE).write_text(json.dumps({"schema": -1}))
    accelerator, _, memory = _prepared()
    with pytest.warns(UserWarning, match="are not used, new ones are made"):
        accelerator.load_state(str(tmp_path / "c"))
    memory.detach()


def test_free_memory() -> None:
    """`accelerator.free_memory` takes every hook off, and the accelerator can serve another model."""
    accelerator, model, _ = _prepared()
    accelerator.free_memory()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert "free_memory" not in vars(accelerator)
    with prepare_offload(accelerator, model, "1GiB", policy="all-swap") as memory:
        model(torch.ones(64, 32)).sum().backward()
        assert memory.report().num_steps == 1
    assert not model._forward_pre_hooks


def test_second_plugin() -> None:
    """A second call for a model, or for an accelerator, is refused; after detach it is not."""
    accelerator, model, memory = _prepared()
    with pytest.raises(UnsupportedError, match="detach"):
        prepare_offload(accelerator, net())
    with pytest.raises(UnsupportedError, match="this Net already trains within a budget"):
        prepare_offload(Accelerator(cpu=True), model)
    memory.detach()
    prepare_offload(accelerator, model).detach()


def test_bad_input() -> None:
    """What is no model or no accelerator is told what to give, before anything is hooked."""
    accelerator = Accelerator(cpu=True)
    with pytest.raises(PolicyError, match=r"model=3 is an int: give a torch\.nn\.Module"):
        prepare_offload(accelerator, 3)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="there is no model"):
        prepare_offload(accelerator, [])
    with pytest.raises(PolicyError, match="give an Accelerator"):
        prepare_offload(net(), accelerator)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="DataParallel"):
        prepare_offload(accelerator, nn.DataParallel(net()))
    with pytest.raises(TypeError, match=r"^prepare_offload\(\) got .* 'bugdet': did you mean 'budget'"):
        prepare_offload(accelerator, net(), bugdet="1GiB")


def test_what_it_says(caplog: pytest.LogCaptureFixture) -> None:
    """The budget when the model is followed, and the plan's table once it is final, each once."""
    with caplog.at_level(logging.INFO, "lightning_offload"):
        train({}, budget="1GB", policy="auto")
    assert caplog.text.count("Offload budget: 1GB (953.7 MiB) on cpu, planned in the first steps") == 1
    assert caplog.text.count("Offload plan") == 1
    assert caplog.text.count("Peak measured") == 1


def test_a_run_that_ends_as_its_plan_is_final(caplog: pytest.LogCaptureFixture) -> None:
    """The table comes at the end; without any plan there is none, and without a budget that is said."""
    with caplog.at_level(logging.INFO, "lightning_offload"):
        for num_steps in range(6):
            _, model, memory = _prepared()
            caplog.clear()
            for _ in range(num_steps):
                model(torch.ones(64, 32)).sum().backward()
            is_final = memory.report().phase == "planned"
            memory.detach()
            assert caplog.text.count("Offload plan") == is_final
        prepare_offload(Accelerator(cpu=True), net()).detach()
    assert is_final
    assert "such as prepare_offload(accelerator, model, budget='4GiB')" in caplog.text


class Tracker(GeneralTracker):
    """Collects what is logged."""

    name = "collecting"
    requires_logging_directory = False
    tracker = None

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, Any]] = []

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.logged.append({"step": step, **values})


def test_trackers() -> None:
    """What the loop logs goes to the trackers with the figures of the steps, until the plugin is detached."""
    tracker = Tracker()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("run")
    model = accelerator.prepare(net())
    with prepare_offload(accelerator, model, "1GiB", policy="all-swap") as memory:
        for step in range(4):
            model(torch.ones(64, 32)).sum().backward()
            accelerator.log({"loss": 1.0}, step=step)
        report = memory.report()
    accelerator.log({"loss": 2.0}, step=4)
    assert [entry["step"] for entry in tracker.logged] == [0, 1, 2, 3, 4]
    assert tracker.logged[3]["loss"] == 1.0
    assert tracker.logged[3]["offload/budget_bytes"] == 1 << 30
    assert tracker.logged[3]["offload/swapped_bytes"] == report.swapped_bytes > 0
    assert tracker.logged[4] == {"step": 4, "loss": 2.0}
    assert "log" not in vars(accelerator)


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Accelerate the error names the extra."""
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(UnsupportedError, match=r"lightning-offload\[accelerate\]"):
        prepare_offload(None, net())  # type: ignore[arg-type]
