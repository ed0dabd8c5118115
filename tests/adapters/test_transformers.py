"""A Hugging Face Trainer with `OffloadCallback` leaves exactly what the plain one leaves."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import logging
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lightning_offload import PolicyError, UnsupportedError
from lightning_offload.accelerate import find_efficient_batch_size
from lightning_offload.errors import BudgetError
from lightning_offload.planning.planner import plan as make_plan
from lightning_offload.plugins.memory import attached_plugins
from lightning_offload.transformers import OffloadCallback
from tests.adapters.nets import assert_same, state_of
from tests.graph.building import DEVICE
from tests.graph.building import chain as step_of_chain

NUM_STEPS = 6

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "accumulate": {"gradient_accumulation_steps": 2},
}


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens."""

    def __init__(self, num_rows: int = 24) -> None:
        self.tokens = torch.randint(0, 64, (num_rows, 16), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def gpt2() -> GPT2LMHeadModel:
    """A tiny GPT-2 with random weights and its usual dropout."""
    torch.manual_seed(2)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, use_cache=False))


class Losses(Trainer):
    """Notes the loss of every training step."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self.__dict__.setdefault("losses", []).append(loss)
        return loss


def trainer_for(folder: Path, callback: OffloadCallback | None, model: Any = None, **settings: Any) -> Losses:
    arguments: dict[str, Any] = {
        "use_cpu": True, "per_device_train_batch_size": 4, "num_train_epochs": 1, "report_to": "none",
        "eval_strategy": "steps", "eval_steps": 3, "logging_steps": 2, "save_strategy": "no",
        "disable_tqdm": True, "dataloader_pin_memory": False, "seed": 3,
    }  # fmt: skip
    return Losses(
        gpt2() if model is None else model,
        TrainingArguments(output_dir=str(folder), **{**arguments, **settings}),
        train_dataset=Text(),
        eval_dataset=Text(8),
        callbacks=[callback] if callback is not None else [],
    )


def run(
    folder: Path, callback: OffloadCallback | None, resume: str | None = None, **settings: Any
) -> dict[str, Tensor]:
    trainer = trainer_for(folder, callback, **settings)
    trainer.train(resume_from_checkpoint=resume)
    evals = [torch.tensor(log["eval_loss"]) for log in trainer.state.log_history if "eval_loss" in log]
    return state_of(trainer.model, trainer.optimizer, [*trainer.losses, *evals])


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The Trainer prints its logs where there is no progress bar."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)


def budget_for(policy: str, folder: Path, **settings: Any) -> str:
    """A budget that is tight for a policy that looks at it."""
    if policy != "auto":
        return "1GiB"
    probe = OffloadCallback("1GiB", policy="all-swap")
    run(folder, probe, **settings)
    seen = probe.memory.report()
    assert seen.floor_bytes is not None
    assert seen.plain_peak_bytes is not None
    return f"{(seen.floor_bytes + seen.plain_peak_bytes) // 2}B"


@pytest.mark.parametrize(
    ("setting", "policy"),
    [*((setting, "auto") for setting in SETTINGS), ("fp32", "all-swap"), ("accumulate", "all-recompute")],
)
def test_exact(tmp_path: Path, setting: str, policy: str) -> None:
    """Losses, evaluations, parameters, optimizer and random state are equal; only training forwards are steps."""
    plain = run(tmp_path, None, **SETTINGS[setting])
    callback = OffloadCallback(budget_for(policy, tmp_path, **SETTINGS[setting]), policy=policy)
    ours = run(tmp_path, callback, **SETTINGS[setting])
    assert_same(ours, plain)
    report = callback.memory.report()
    assert report.num_steps == NUM_STEPS
    assert report.swapped_bytes + report.recomputed_bytes > 0


@pytest.mark.parametrize(("policy", "restores_callbacks"), [("all-recompute", True), ("auto", False)])
def test_resume(tmp_path: Path, policy: str, restores_callbacks: bool) -> None:
    """A run resumed from a checkpoint equals one that was not interrupted, and starts with its plans."""
    settings = {
        "save_strategy": "steps",
        "save_steps": 4,
        "restore_callback_states_from_checkpoint": restores_callbacks,
    }
    plain = run(tmp_path / "plain", None)
    budget = budget_for(policy, tmp_path / "probe")
    run(tmp_path / "ours", OffloadCallback(budget, policy=policy), **settings)
    checkpoint = tmp_path / "ours" / "checkpoint-4"
    saved = json.loads((checkpoint / "trainer_state.json").read_text())["stateful_callbacks"]["OffloadCallback"]
    assert saved["args"] == {"budget": budget, "policy": policy}
    assert len(saved["attributes"]["plans"]["plans"]) == 1

    callback = OffloadCallback(budget, policy=policy)
    trainer = trainer_for(tmp_path / "resumed", callback, **settings)
    phases = _note_phases(trainer)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    in_force = callback_of(trainer)
    assert (in_force is callback) != restores_callbacks  # then the Trainer makes another from the checkpoint
    assert in_force.memory.report().num_steps == 2
    assert "recording" not in phases
    ours = state_of(trainer.model, trainer.optimizer, [])
    assert_same(ours, {name: value for name, value in plain.items() if not name.startswith("loss")})


def _note_phases(trainer: Losses) -> list[str]:
    """In which phase each training step was."""
    noted: list[str] = []
    original = trainer.training_step

    def training_step(*args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = original(*args, **kwargs)
        noted.append(callback_of(trainer).memory.report().phase)
        return loss

    trainer.training_step = training_step
    return noted


def test_tuned(tmp_path: Path) -> None:
    """A Trainer made in a tuned function trains as one made with that size, and the trials leave no plugin behind."""

    def fit(batch_size: int) -> dict[str, Tensor]:
        settings = {"per_device_train_batch_size": batch_size, "max_steps": 10, "eval_strategy": "no"}
        return run(tmp_path, OffloadCallback("1GiB"), **settings)

    torch.manual_seed(0)
    tuned = find_efficient_batch_size(fit, starting_batch_size=4, max_size=8, max_trials=2)
    ours = tuned()
    assert all(trial.is_ok and trial.peak_bytes for trial in tuned.result.trials)
    assert attached_plugins() == []
    assert_same(ours, fit(tuned.result.batch_size))


def test_second_training(tmp_path: Path) -> None:
    """The callback takes its hooks off after `train()`, and serves the next one with the plans it has."""
    callback = OffloadCallback("1GiB", policy="all-recompute")
    trainer = trainer_for(tmp_path, callback)
    for num_steps in (NUM_STEPS, 2 * NUM_STEPS):
        trainer.train()
        assert not trainer.model._forward_pre_hooks
        assert callback.memory.report().num_steps == num_steps
        assert len(callback.plans["plans"]) == 1


class Failing(GPT2LMHeadModel):
    """Fails in its third training forward."""

    count = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.count == 3:
            raise ValueError("third")
        return super().forward(*args, **kwargs)


def failing() -> Failing:
    return Failing(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=16, use_cache=False))


def test_exceptions(tmp_path: Path) -> None:
    """After an exception no mode is on; another `train()`, `detach()` or the end of the model take the hooks off."""
    callback = OffloadCallback("1GiB", policy="all-swap")
    trainer = trainer_for(tmp_path, callback, failing(), eval_strategy="no", remove_unused_columns=False)
    with pytest.raises(ValueError, match="third"):
        trainer.train()
    assert torch._C._len_torch_dispatch_stack() == 0
    trainer.train()
    assert not trainer.model._forward_pre_hooks

    trainer.model.count = 0
    with pytest.raises(ValueError, match="third"):
        trainer.train()
    callback.detach()
    assert not trainer.model._forward_pre_hooks

    trainer.model.count = 0
    with pytest.raises(ValueError, match="third"):
        trainer.train()
    del trainer
    gc.collect()
    assert callback.memory.num_followed == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled(tmp_path: Path) -> None:
    """A model that the Trainer compiles is followed, and trains to the bits of the compiled one."""
    settings: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    found = []
    callback = OffloadCallback("1GiB", policy="all-swap")
    for each in (None, callback):
        torch._dynamo.reset()
        found.append(run(tmp_path, each, **settings))
    torch._dynamo.reset()
    assert_same(*found)
    report = callback.memory.report()
    assert report.num_steps == NUM_STEPS
    assert report.swapped_bytes > 0


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("is_reentrant", [True, False])
def test_its_own_checkpointing_replaced(tmp_path: Path, is_reentrant: bool) -> None:
    """A model that checkpoints itself trains to the bits of one that does not, and within less memory."""

    def own() -> GPT2LMHeadModel:
        model = gpt2()
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        return model

    plain = run(tmp_path, None)
    left, replaced = (OffloadCallback("1GiB", policy="all-swap", replace_checkpointing=on) for on in (False, True))
    run(tmp_path, left, model=own())
    assert_same(run(tmp_path, replaced, model=own()), plain)
    floors = [callback.memory.report().floor_bytes for callback in (left, replaced)]
    assert None not in floors
    assert floors[1] < floors[0]  # type: ignore[operator]
    again = OffloadCallback(f"{(floors[0] + floors[1]) // 2}B", replace_checkpointing=True)  # type: ignore[operator]
    assert_same(run(tmp_path, again, model=own()), plain)


def test_unsupported(tmp_path: Path) -> None:
    """What does not run one model on one device is refused when training begins."""
    callback = OffloadCallback("1GiB")
    trainer = trainer_for(tmp_path, callback)
    arguments = copy.copy(trainer.args)
    arguments._n_gpu = 2
    with pytest.raises(UnsupportedError, match=r"n_gpu=2 in one process .* start one process for each GPU"):
        callback.on_train_begin(arguments, trainer.state, trainer.control, model=trainer.model)
    with pytest.raises(PolicyError, match="model=None"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    with pytest.raises(BudgetError):
        OffloadCallback("much")
    with pytest.raises(TypeError, match=r"^OffloadCallback\(\) got .* 'bugdet': did you mean 'budget'"):
        OffloadCallback(bugdet="1GiB")
    other = OffloadCallback("1GiB")
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    with pytest.raises(UnsupportedError, match="already trains within a budget"):
        other.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    callback.detach()


def test_what_it_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line for the budget, the plan's table once, and the figures beside each loss of the log history."""
    callback = OffloadCallback("1GB", policy="all-swap")
    trainer = trainer_for(tmp_path, callback)
    with caplog.at_level(logging.INFO, "lightning_offload"):
        trainer.train()
    assert caplog.text.count("Offload budget: 1GB (953.7 MiB) on cpu") == 1
    assert caplog.text.count("Offload plan") == 1
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == NUM_STEPS // 2
    assert all(entry["offload/budget_bytes"] == 10**9 for entry in losses)
    assert losses[-1]["offload/swapped_bytes"] > 0
    assert losses[-1]["offload/peak_bytes"] > 0
    others = [entry for entry in trainer.state.log_history if "loss" not in entry]
    assert others
    assert not any("offload" in name for entry in others for name in entry)
    json.dumps(trainer.state.log_history)


def test_malformed_plans(tmp_path: Path) -> None:
    """Plans that cannot be read are a warning."""
    callback = OffloadCallback("1GiB")
    with pytest.warns(UserWarning, match="are not used, new ones are made"):
        callback.plans = {"schema": -1}


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Transformers the error names the extra."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "lightning_offload.transformers")
    with pytest.raises(UnsupportedError, match=r"lightning-offload\[transformers\]"):
        importlib.import_module("lightning_offload.transformers")


def test_saved_arguments(tmp_path: Path) -> None:
    """As JSON has them: paths as text, numbers of other libraries as Python's."""
    given = {"spill_dir": tmp_path, "keep": ["lm_head*"], "device": torch.device("cpu")}
    callback = OffloadCallback(np.int64(12 << 20), **given)
    expected = {"budget": 12 << 20, "spill_dir": str(tmp_path), "keep": ["lm_head*"], "device": "cpu"}
    assert callback.state()["args"] == expected
    again = OffloadCallback.from_state(json.loads(json.dumps(callback.state())))
    assert again.state() == callback.state()


def test_copies(tmp_path: Path) -> None:
    """A Trainer is copied with its callback, and each copy has a plugin of its own, with the plans made so far."""
    trainer = trainer_for(tmp_path, OffloadCallback("1GiB", policy="all-recompute"))
    trainer.train()
    ours = callback_of(trainer)
    for copied in (callback_of(copy.deepcopy(trainer)), pickle.loads(pickle.dumps(ours))):
        assert copied.memory is not ours.memory
        assert copied.plans == ours.plans
        assert copied.state() == ours.state()


def test_a_plan_in_memory_is_no_argument_of_a_checkpoint() -> None:
    """Which is JSON: what a run followed is among the plans of the callback."""
    plan = make_plan(step_of_chain(4096, 4096), DEVICE, None)
    saved = json.loads(json.dumps(OffloadCallback("1GiB", plan=plan).state()))
    assert saved["args"] == {"budget": "1GiB"}
    OffloadCallback.from_state(saved)


def callback_of(trainer: Trainer) -> OffloadCallback:
    return next(each for each in trainer.callback_handler.callbacks if isinstance(each, OffloadCallback))
